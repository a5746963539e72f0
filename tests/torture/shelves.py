"""The same drawn jobs on a directory and on an object store, which must say the same.

    python -m tests.torture.shelves [--quick] [--jobs N] [--only CASE]

A log is drawn: partitions, and configs of segments, lags, retention and compaction. Then come some
rounds, each a few steps long. Steps append records in one commit, as several tasks, or one by one
by a producer; some have old or future times, some are tombstones. They change configs, add
partitions, delete records and topics, and open the log again. They clean what is due, or all, in
turns of the background cleaner or by `kafkalog clean`. Half of the logs are copies of one that
brokers' producers write, with transactions that end late, or never; what is new is copied in each
round.

Each step is done to a directory and to a store, at one time. After each round the program asks both
for their records, in both isolation levels, and for the latest ones. It looks up keys and times. It
compares `status`, `explain`, log starts, what a cleaning returned, and the exit code and the words
of `kafkalog clean`. What differs is a violation, unless it differs by nature: then it is a sentence
of docs/limits.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import secrets
import shutil
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pyarrow as pa

import kafkalog
from kafkalog.cleaner.schedule import manager
from kafkalog.cli import main as kafkalog_command
from kafkalog.errors import KafkaLogError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.log.results import RetentionStats
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.segment import segment_times
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.conformance.twin_batches import Writers, draw_taste
from tests.torture import Tally
from tests.torture.drawn_logs import Judged, judge, options_of
from tests.torture.repeatable import repeatable
from tests.torture.scratch import scratch
from tests.torture.shelf_views import differences, plain, view

__all__ = ["Job", "judged", "main"]

_LOGS: Final = 300
_QUICK: Final = 12
_PORTION: Final = 5
_T0: Final = 1_700_000_000_000
_MINUTE: Final = 60_000
_DAY: Final = 86_400_000
_KEYS: Final = [b"k%d" % number for number in range(9)]
_ELSEWHERE: Final = (b"", b"key number 1", b"absent")
_NEVER: Final = str(2**63 - 1)
_CONFIGS: Final = {
    "cleanup.policy": ("compact", "compact", "delete", "compact,delete"),
    "segment.bytes": ("1073741824", "400", "1500", "5000"),
    "segment.ms": ("604800000", "30000", str(_DAY)),
    "retention.ms": ("-1", str(3 * _DAY), "100000"),
    "retention.bytes": ("-1", "-1", "3000"),
    "min.cleanable.dirty.ratio": ("0", "0.5", "0.5", "0.9"),
    "min.compaction.lag.ms": ("0", "0", "100000", str(2 * _DAY)),
    "max.compaction.lag.ms": (_NEVER, str(10 * _DAY), "200000"),
    "delete.retention.ms": (str(_DAY), "0", "1000"),
    "compression.type": ("producer", "zstd", "uncompressed"),
    "message.timestamp.type": ("CreateTime", "CreateTime", "LogAppendTime"),
    "kafkalog.cleaner.merge.batches": ("true", "false"),
}
_LATER_MS: Final = (0, 1_000, _MINUTE, 3_600_000, _DAY, 4 * _DAY)
_TICK_S: Final = 0.005
_ODD_MS: Final = (-40 * _DAY, -_DAY, -_MINUTE, 500, 3_000_000)
"""How far a record's time is from that of its commit."""


class Job:
    """A log in a directory, one in a store, and what is done to both."""

    def __init__(self, seed: int, case: int, directory: Path) -> None:
        self._draw = random.Random(f"{seed}:{case}")
        self.now_ms = _T0
        self._places = [str(directory / "log"), f"memory://{secrets.token_hex(8)}/log"]
        self._logs: list[KafkaLog] = []
        self.moments: list[tuple[int, int]] = [(time.time_ns(), _T0)]
        """Real times (ns), and the drawn ones (ms) that began with them."""
        self.steps: Counter[str] = Counter()
        self.done: list[str] = []
        """The steps so far, to be told with a violation."""
        self.found: list[str] = []
        """What differs."""
        self._batches = Counter[str]()
        self._is_cut = False
        self._source: KafkaLog | None = None
        self._writers: dict[int, Writers] = {}
        self._is_copy = self._draw.random() < 0.5
        if self._is_copy:
            self._source = kafkalog.open(directory / "source")

    def run(self) -> None:
        """Do some rounds, up to the first one after which something differs."""
        with repeatable(str(self.done)):
            setattr(clock, "now_ms", lambda: self.now_ms)  # noqa: B010  (a function but for this)
            with mock.patch.object(segment_times, "os", _FileTimes(self)):
                self._run()

    def _run(self) -> None:
        try:
            self._logs = [kafkalog.open(place) for place in self._places]
            self._create()
            for _ in range(self._draw.randint(2, 7)):
                for _ in range(self._draw.randint(1, 6)):
                    self._step()
                self._compare()
                if self.found:
                    return
            self._is_cut = True
            self._cut()
            self._compare()
        finally:
            for log in self._logs:
                log.close()
            if self._source is not None:
                self._source.close()

    def _begin_moment(self) -> None:
        """Note which real time has this one; the kernel's clock of files has a coarse hand."""
        time.sleep(_TICK_S)
        self.moments.append((time.time_ns(), self.now_ms))
        time.sleep(_TICK_S)

    # --- compare ---------------------------------------------------------------------------------

    def _compare(self) -> None:
        keys = [*_KEYS, *_ELSEWHERE]
        views = [
            view(log, place, keys, self.now_ms)
            for log, place in zip(self._logs, self._places, strict=True)
        ]
        self.steps["comparisons"] += 1
        self.found += differences(*views, is_cut=self._is_cut)

    def _both(self, name: str, act: Callable[[KafkaLog], Any]) -> None:
        """Do something to both logs; both must answer the same, or raise the same."""
        self.steps[name] += 1
        self.done.append(f"{name} at {self.now_ms - _T0}")
        answers = []
        for log, place in zip(self._logs, self._places, strict=True):
            try:
                answer = act(log)
            except KafkaLogError as fault:
                answer = f"{type(fault).__name__}: {fault}"
            answers.append({name: plain(answer, place)})
        self.found += differences(*answers)

    # --- the steps -------------------------------------------------------------------------------

    def _config(self) -> dict[str, str]:
        draw = self._draw
        names = draw.sample(sorted(_CONFIGS), draw.randint(2, len(_CONFIGS)))
        config = {name: draw.choice(_CONFIGS[name]) for name in names}
        if self._is_copy and draw.random() < 0.3:
            config["segment.jitter.ms"] = draw.choice(("20000", str(_DAY)))
        low = int(config.get("min.compaction.lag.ms", 0))
        if low > int(config.get("max.compaction.lag.ms", _NEVER)):
            del config["max.compaction.lag.ms"]
        return config

    def _create(self) -> None:
        partitions, config = self._draw.randint(1, 3), self._config()
        if self._source is not None:
            self._source.create_topic("t", partitions, config, now_ms=self.now_ms)
            for number in range(partitions):
                self._writers[number] = Writers(self._draw, draw_taste(self._draw))
            self._copy()
            return
        self._both(
            f"create {partitions} {config}",
            lambda log: log.create_topic("t", partitions, config, now_ms=self.now_ms).config,
        )

    def _step(self) -> None:
        self.now_ms += self._draw.choice(_LATER_MS)
        self._begin_moment()
        steps: list[Callable[[], None]] = [
            *[self._write] * 5,
            *[self._clean] * 2,
            *[self._turn] * 2,
            self._command,
            self._alter,
            self._delete_segments,
            self._reopen,
        ]
        if self._source is None:
            steps += [self._recreate]
        self._draw.choice(steps)()

    def _write(self) -> None:
        if self._source is not None:
            self._copy()
        else:
            self._draw.choice((self._append, self._append, self._tasks, self._produce))()

    def _rows(self, most: int) -> list[tuple[bytes | None, bytes | None, int]]:
        draw = self._draw
        rows: list[tuple[bytes | None, bytes | None, int]] = []
        for _ in range(draw.randint(1, most)):
            value = None if draw.random() < 0.2 else b"v" * draw.choice((0, 3, 40, 300))
            odd = draw.choice(_ODD_MS) if draw.random() < 0.2 else 0
            rows.append((draw.choice(_KEYS), value, self.now_ms + odd))
        return rows

    def _append(self) -> None:
        rows = [(key, value, [("h", b"1")], time) for key, value, time in self._rows(12)]
        self._both("append", lambda log: log.append("t", rows, now_ms=self.now_ms))

    def _produce(self) -> None:
        rows = self._rows(4)

        def send(log: KafkaLog) -> None:
            with log.producer("t", batch_size=0) as producer:
                for key, value, _ in rows:
                    producer.send(key, value).result()

        self._both("produce", send)

    def _tasks(self) -> None:
        """Several tasks of a micro-batch write to some partitions each; it may come again."""
        draw, name = self._draw, f"w{self._draw.randrange(2)}"
        batch_id = self._batches[name]
        self._batches[name] += draw.choice((1, 1, 0))
        parts = [self._rows(8) for _ in range(draw.randint(1, 3))]
        size = draw.choice((100, 65_536))

        def commit(log: KafkaLog) -> Any:
            engine = _engine(log)
            messages = []
            for rows in parts:
                keys, values, times = zip(*rows, strict=True)
                columns = {
                    "key": pa.array(keys, pa.binary()),
                    "value": pa.array(values, pa.binary()),
                    "timestamp": pa.array(times, pa.int64()),
                }
                staged = StagedWriter(
                    None, engine.state(), now_ms=lambda: self.now_ms, batch_size=size
                )
                staged.append("t", pa.RecordBatch.from_pydict(columns))
                messages.append(staged.finish())
            return engine.commit(messages, writer=Writer(name, "t", batch_id), now_ms=self.now_ms)

        self._both(f"tasks of {size}", commit)

    def _copy(self) -> None:
        """Let a broker's producers write, and copy what is new."""
        source = self._source
        assert source is not None
        for number, writers in self._writers.items():
            if self._draw.random() < 0.7:
                odd = self._draw.choice(_ODD_MS) if self._draw.random() < 0.2 else 0
                data = writers.batches(self._draw.randint(1, 5), self.now_ms + odd)
                share = self._draw.choice((0.0, 0.5, 1.0))
                data += writers.end_transactions(self.now_ms, share)
                source.append_raw("t", number, data, now_ms=self.now_ms)

        def copy(log: KafkaLog) -> Any:
            return kafkalog.copy(str(source.root), self._places[self._logs.index(log)])

        self._both("copy", copy)

    def _clean(self) -> None:
        is_forced, topic = self._draw.random() < 0.3, self._draw.choice(("t", None))

        def clean(log: KafkaLog) -> Any:
            return log.clean(topic, force=is_forced, now_ms=self.now_ms)

        self._both(f"clean {topic}{' by force' if is_forced else ''}", clean)

    def _turn(self) -> None:
        """Take turns of the background cleaner until nothing is due, then retain and sweep."""

        def turn(log: KafkaLog) -> Any:
            engine = _engine(log)
            found = []
            for _ in range(9):
                stats = manager.clean_filthiest(engine, now_ms=self.now_ms)
                if stats is None:
                    break
                found.append(stats)
            retained = _retained(log, self.now_ms)
            manager.sweep(engine, now_ms=self.now_ms)
            return found, retained

        self._both("turn", turn)

    def _command(self) -> None:
        """Run `kafkalog clean`."""
        arguments = ["--force"] if self._draw.random() < 0.3 else []

        def clean(log: KafkaLog) -> Any:
            place = self._places[self._logs.index(log)]
            return run_command(["clean", place, *arguments, "--json"])

        self._both(" ".join(["command", *arguments]), clean)

    def _alter(self) -> None:
        config: dict[str, str | None] = {**self._config()}
        names = self._draw.sample(sorted(config), self._draw.randint(1, min(3, len(config))))
        changed = {name: self._draw.choice((config[name], config[name], None)) for name in names}
        partitions = None
        if not self._is_copy and self._draw.random() < 0.2:
            partitions = len(self._logs[0].describe("t").partitions) + 1

        def alter(log: KafkaLog) -> Any:
            topic = log.alter_topic(
                "t", changed, partitions, keys_may_move=True, now_ms=self.now_ms
            )
            return dict(topic.config)

        self._both(f"alter {changed} {partitions}", alter)

    def _delete_segments(self) -> None:
        """Delete whole segments, which retention then removes."""
        topic = self._logs[0].describe("t")
        if not TopicConfig.parse(topic.config).is_deleted:
            return
        number = self._draw.randrange(len(topic.partitions))
        files = Path(self._places[0], f"t-{number}").glob("*.log")
        before = self._draw.choice(sorted(int(path.stem) for path in files))
        self._delete_records(number, before)
        for log in self._logs:
            _retained(log, self.now_ms)

    def _cut(self) -> None:
        """Delete records up to any offset of each partition."""
        for number, (start, end) in self._logs[0].offsets("t").items():
            self._delete_records(number, self._draw.choice((-1, start, end, (start + end) // 2)))

    def _delete_records(self, number: int, before: int) -> None:
        self._both(
            f"delete records before {before} in {number}",
            lambda log: log.delete_records("t", number, before, now_ms=self.now_ms),
        )

    def _reopen(self) -> None:
        for log in self._logs:
            log.close()
        self._logs = [kafkalog.open(place) for place in self._places]

    def _recreate(self) -> None:
        if self._draw.random() < 0.2:
            self._both("delete topic", lambda log: log.delete_topic("t", now_ms=self.now_ms))
            self._batches.clear()
            self._create()


def _retained(log: KafkaLog, now_ms: int) -> list[RetentionStats]:
    return manager.retain(_engine(log), now_ms=now_ms, is_skipped=lambda _: False)


def _engine(log: KafkaLog) -> Log:
    return log._engine


class _FileTimes:
    """Stands for `os`: the times of files are those that a job has drawn."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def fstat(self, fd: int) -> Any:
        """Return what the system says, with the drawn time of the last change."""
        found = os.fstat(fd)
        names = ("st_dev", "st_ino", "st_size", "st_ctime_ns")
        told = {name: getattr(found, name) for name in names}
        return SimpleNamespace(**told, st_mtime_ns=self._drawn(found.st_mtime_ns))

    def _drawn(self, real_ns: int) -> int:
        moments = self._job.moments
        place = bisect_right(moments, (real_ns, 1 << 62)) - 1
        return real_ns if place < 0 else moments[place][1] * 1_000_000  # a cleaner has set it


def run_command(arguments: Sequence[str]) -> tuple[Any, list[Any], str]:
    """Run the command line in this process; return status, the rows of --json, and messages."""
    out, err, known = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["kafkalog", *arguments]
    status: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            kafkalog_command()
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = known
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    named = [{_snake(name): value for name, value in row.items()} for row in rows]
    return status, named, err.getvalue()


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


# --- the program ---------------------------------------------------------------------------------


def judged(cases: tuple[int, ...], seed: int, directory: str) -> Judged:
    """Return what comes of some logs."""
    logging.disable(logging.WARNING)
    result = Judged()
    for case in cases:
        place = Path(directory) / f"{os.getpid()}-{case}"
        place.mkdir()
        job = None
        try:
            job = Job(seed, case, place)
            job.run()
        except Exception as fault:  # whatever it is, it is a fault of one of both
            told = "" if job is None else "; ".join(job.done)
            result.faults.append((case, f"{told}: {type(fault).__name__}: {fault}"))
        else:
            told = "; ".join(job.done)
            result.faults += [(case, f"{told}: {each}") for each in job.found[:1]]
        if job is not None:
            result.counts["comparisons"] += job.steps["comparisons"]
            result.counts["steps"] += len(job.done)
        result.count += 1
        shutil.rmtree(place, ignore_errors=True)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Draw, compare and report."""
    options = options_of("shelves", __doc__, arguments, logs=_LOGS)
    tally = Tally("shelves", "logs in a directory and in a store", options, target=_LOGS)
    with scratch("shelves") as directory:
        tally.more |= judge(judged, str(directory), options, tally, quick=_QUICK, size=_PORTION)
    tally.report()


if __name__ == "__main__":
    main()
