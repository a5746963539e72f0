"""Many tasks stage a few rows for each of many partitions, and the driver commits them.

    python -m bench.staging [--json] [--quick] [--path DIR] [--rounds N]

64 tasks, one after the other in one process, each stage 20 records of 100 bytes for each of 50
partitions, as the sink's tasks do, into one file per task; then one commit, as the sink's driver
does it, appends them to the 50 logs. That is compared with two bare writings of the same bytes. The
first is one file per task: 64 new files, each written, and no commit at all. The second is that,
and what a commit cannot do without: the same bytes appended to 50 files, which are synced in the
same threads as ours, a piece of one preallocated file overwritten and synced, the 64 files removed.
Nobody syncs the 64 files: the commit copies them, and syncs the copy. Neither encodes anything,
computes a checksum or reads anything back. Ours and the bare writing take turns, round by round,
another begins each time; times are medians, without the first rounds, which create the logs. What
the partitions and the bare files hold afterwards is counted. All run in one process, whose memory
is told for each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

import kafkalog
from bench import LESS, Side, compare_figures, in_turn, program, report
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter

TASKS: Final = 64
PARTITIONS: Final = 50
ROWS: Final = 20
"""Of each task for each partition."""
VALUE_SIZE: Final = 90
KEY_SIZE: Final = 10
JOURNAL_RECORD_SIZE: Final = 4_000
JOURNAL_SIZE: Final = 1 << 20
WARM_UP: Final = 2
WRITER: Final = "00000000-0000-0000-0000-000000000000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("staging", __doc__, quick="fewer rounds")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 25)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        found = measure(Path(scratch), rounds)
    staged, committed = found.staging.ms, found.commit.ms
    ours = [sum(parts) for parts in zip(staged, committed, strict=True)]
    bare = [sum(parts) for parts in zip(found.bare_files.ms, found.bare_commit.ms, strict=True)]
    with_commit = f"the same, and a bare commit to {PARTITIONS} logs"
    for name, peer, target, last in (
        (with_commit, bare, "<= 1.6", found.bare_commit),
        ("one file per task, bare", found.bare_files.ms, "", found.bare_files),
    ):
        claim = compare_figures(
            f"stage and commit {TASKS} tasks x {PARTITIONS} partitions, {ROWS} records of 100 "
            "bytes each",
            ours,
            peer,
            unit="ms",
            peer_name=name,
            ratio_is=LESS,
            target=target,
            ours_mib=max(found.staging.mib, found.commit.mib),
            peer_mib=max(found.bare_files.mib, last.mib),
        )
        told = claim.told(
            staging_ms=round(statistics.median(staged), 1),
            commit_ms=round(statistics.median(committed), 1),
            staged_bytes=found.staged_bytes,
        )
        report(told, as_json=options.json)


@dataclass(slots=True)
class Found:
    """The parts of both sides."""

    staging: Side = field(default_factory=Side)
    commit: Side = field(default_factory=Side)
    bare_files: Side = field(default_factory=Side)
    bare_commit: Side = field(default_factory=Side)
    staged_bytes: int = 0


def measure(directory: Path, rounds: int) -> Found:
    """Let ours and the bare writing take turns."""
    found = Found()
    with kafkalog.open(directory / "log") as log:
        log.create_topic("t", partitions=PARTITIONS)
    rows = [task_rows(task) for task in range(TASKS)]
    bare: BareWrites | None = None

    def stage_all(turn: int) -> list[StagedMessage]:
        return [stage(directory / "log", turn, task, rows[task]) for task in range(TASKS)]

    for turn in range(rounds + WARM_UP):
        is_counted = turn >= WARM_UP
        for is_ours in in_turn(turn, [True, False]):
            if is_ours:
                messages = found.staging.time(partial(stage_all, turn), is_counted=is_counted)
                commit = shared_log(directory / "log").commit
                writer = Writer(WRITER, "t", turn)
                found.commit.time(partial(commit, messages, writer=writer), is_counted=is_counted)
                found.staged_bytes = sum(file.size for each in messages for file in each.files)
                bare = bare or BareWrites(directory / "bare", messages)
            else:
                assert bare is not None  # ours began
                found.bare_files.time(partial(bare.stage, turn), is_counted=is_counted)
                found.bare_commit.time(partial(bare.commit, turn), is_counted=is_counted)
    check(directory / "log", rounds + WARM_UP)
    assert bare is not None
    bare.check(rounds + WARM_UP)
    return found


def task_rows(task: int) -> pa.RecordBatch:
    """Return the rows of a task: as many for each partition."""
    count = PARTITIONS * ROWS
    keys = [b"%0*d" % (KEY_SIZE, task * count + row) for row in range(count)]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array([b"x" * VALUE_SIZE] * count, pa.binary()),
            "partition": pa.array([row % PARTITIONS for row in range(count)], pa.int32()),
        }
    )


def stage(root: Path, batch_id: int, task: int, rows: pa.RecordBatch) -> StagedMessage:
    """Do what a task of the sink does with its rows."""
    log = shared_readable(root, read_only=True)
    writer = StagedWriter(
        log,
        log.state(),
        writer_slug=writer_slug(WRITER, "t"),
        batch_id=batch_id,
        spark_partition=task,
        attempt=task << 32,
        now_ms=lambda: time.time_ns() // 1_000_000,
    )
    writer.append("t", rows)
    return writer.finish()


def check(root: Path, turns: int) -> None:
    """End the program unless every partition holds every record."""
    expected = dict.fromkeys(range(PARTITIONS), (0, turns * TASKS * ROWS))
    with kafkalog.open(root, read_only=True) as log:
        if log.offsets("t") != expected:
            raise SystemExit(f"wrong: expected {expected}, found {log.offsets('t')}")


class BareWrites:
    """The writes and syncs of the tasks and of the commit, and nothing else."""

    def __init__(self, directory: Path, messages: Sequence[StagedMessage]) -> None:
        directory.mkdir()
        self.directory = directory
        self.staged = [bytes(sum(file.size for file in each.files)) for each in messages]
        sizes = [0] * PARTITIONS
        for message in messages:
            for run in message.runs:
                sizes[run.partition] += run.size
        self.appended = [bytes(size) for size in sizes]
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self.logs = [os.open(directory / f"{n}.log", flags) for n in range(PARTITIONS)]
        self.journal = os.open(directory / "journal", os.O_CREAT | os.O_RDWR)
        os.write(self.journal, bytes(JOURNAL_SIZE))
        os.fsync(self.journal)

    def stage(self, turn: int) -> None:
        """Write a file per task."""
        for path, data in zip(self._paths(turn), self.staged, strict=True):
            file = os.open(path, os.O_CREAT | os.O_WRONLY)
            os.write(file, data)
            os.close(file)

    def commit(self, turn: int) -> None:
        """Append to every log and sync it, sync a piece of the journal, remove the files."""
        for log, data in zip(self.logs, self.appended, strict=True):
            os.write(log, data)
        files.all_at_once([partial(os.fsync, log) for log in self.logs])
        position = turn * JOURNAL_RECORD_SIZE % (JOURNAL_SIZE - JOURNAL_RECORD_SIZE)
        os.pwrite(self.journal, bytes(JOURNAL_RECORD_SIZE), position)
        os.fdatasync(self.journal)
        for path in self._paths(turn):
            path.unlink()

    def check(self, turns: int) -> None:
        """End the program unless every log holds all of its bytes."""
        found = [os.fstat(log).st_size for log in self.logs]
        if found != [turns * len(data) for data in self.appended]:
            raise SystemExit(f"wrong: the bare logs hold {found} bytes")

    def _paths(self, turn: int) -> list[Path]:
        return [self.directory / f"{turn}-{task}.staged" for task in range(TASKS)]


if __name__ == "__main__":
    main()
