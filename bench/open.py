"""Opening a large log after SIGKILL, and reporting its status.

    python -m bench.open [--json] [--quick] [--path DIR]

A log of 10 GB in 1,000 partitions of two segments each, whose journal is nearly full to its next
rewrite. In each round a writer is killed in the middle of its commits, and fresh processes follow
in turn: those that only look (`status`, the command `kafkalog status`, the walk), the last of one
round being the first of the next, and then the one that opens the log to write, which settles what
the dead one left. It has to find every record that had been acknowledged; it appends one more and
reads it. Times are seconds from `import kafkalog` to the result; told besides are those with the
process's start, and those on a processor. The first round does not count. The second log has
producer state in every partition, and its processes may have 256 files open.

The peer of opening is Kafka's broker (as its start scripts run it, bench/broker.py), which is
killed before each start, with a copy of the log as the first killed writer left it: closed segments
are links to the same bytes, which nobody changes, active ones are copies. Its time is from the
process's start until it leads all partitions, which is when clients get on; ours is the whole life
of a process that opens, appends and reads. The broker reads the active segments, as it does not
know how much of them it had synced; the closed ones are below its recovery point. What its log says
of the loading alone is told besides. It takes part in three of the rounds, before ours and after it
in turn. A broker writes a record, too, before it is killed.

The peer of looking, and the second one of opening, is a walk over the directories that looks at the
name and the size of every file, which is the least that an engine does that has to look at its
data. Everything lies in the page cache, for all of them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from crc32c import crc32c

import kafkalog
from bench import MORE, compare_figures, leave_out, program, report
from bench.mounted import KilledBroker
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance import kafka

SIZE: Final = 10 << 30
PARTITIONS: Final = 1_000
SEGMENTS: Final = 2
PRODUCERS: Final = 100
"""Producers in the snapshot of each partition."""
ROUNDS: Final = 5
BROKER_ROUNDS: Final = 3
FILES_MAX: Final = 256
JOURNAL_MARGIN: Final = 128 << 10
"""What is left free in the journal for the writers that get killed."""
COMMITS: Final = 20
"""That a writer makes, at the least, before it is killed."""

PEAK: Final = """
import re
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""
"""Unlike ru_maxrss this is not inherited from the process that started it."""
OPEN: Final = """
import json, re, sys, time
started = time.perf_counter()
import kafkalog
from kafkalog.storage_engine.place import directory_log_of
log = kafkalog.open(sys.argv[1])
partitions = sum(len(t.partitions) for t in directory_log_of(log).state().topics.values())
seconds = time.perf_counter() - started
peak_kib = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
records = sum(end for _, end in log.offsets("t").values())
(((topic, partition), (offset, _)),) = log.append("t", [(b"key", b"value")]).offsets.items()
(batch,) = log.read(topic, partition, offset)
assert batch["value"].to_pylist() == [b"value"]
found = {"seconds": seconds, "open_kib": peak_kib}
print(json.dumps({**found, "partitions": partitions, "records": records}))
"""
STATUS: Final = """
import json, sys, time
started = time.perf_counter()
import kafkalog
partitions = len(kafkalog.open(sys.argv[1], read_only=True).status())
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "partitions": partitions}))
"""
COMMAND: Final = """
import sys
from kafkalog.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
WALK: Final = """
import json, os, sys, time
started = time.perf_counter()
count = 0
for entry in os.scandir(sys.argv[1]):
    if entry.is_dir():
        count += 1
        sizes = [file.stat().st_size for file in os.scandir(entry.path)]
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "partitions": count}))
"""
WRITER: Final = """
import itertools, sys
import kafkalog
log = kafkalog.open(sys.argv[1])
records = sum(end for _, end in log.offsets("t").values())
for n in itertools.count():
    records += log.append("t", [(b"key-%d" % (n + i), b"value") for i in range(3)]).rows
    print(records, flush=True)
"""
"""It says how many records there are after each commit."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("open", __doc__, quick="50 partitions, fewer processes").parse_args(arguments)
    partitions = PARTITIONS // 20 if options.quick else PARTITIONS
    rounds = 1 if options.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for has_producers in (False, True):
            root = Path(scratch) / f"producers-{has_producers}"
            build(root, partitions, has_producers=has_producers)
            with ExitStack() as opened:
                opened.callback(shutil.rmtree, root)  # the next one needs the space
                broker = None
                if not has_producers:  # as a broker would have to have their state, too
                    broker = killed_broker(Path(scratch) / "kafka", root, partitions)
                if broker is not None:
                    opened.callback(shutil.rmtree, broker.directory)
                os.sync()  # what was built is not to be written out meanwhile
                found = take_turns(root, broker, rounds, FILES_MAX if has_producers else None)
                text = f"{partitions:,} partitions, {size_of(root) / (1 << 30):.1f} GiB"
                text = f"{text}, after SIGKILL"
                if has_producers:
                    text += f", {PRODUCERS} producers each, {FILES_MAX} open files"
                show(text, partitions, found, as_json=options.json)


def killed_broker(directory: Path, root: Path, partitions: int) -> KilledBroker | None:
    """Return a broker with a copy of what a killed writer leaves, if there is one to be had."""
    reason = kafka.fault()
    if reason is not None:
        leave_out("the start of Kafka's broker", reason)
        return None
    killed(root)
    return KilledBroker(directory, root, partitions)


# --- the log -------------------------------------------------------------------------------------


def build(root: Path, partitions: int, *, has_producers: bool) -> None:
    """Write a log, each partition with the same bytes, and fill its journal with small commits."""
    template = Template(root.with_name("template"))
    with unsynced():
        log = kafkalog.open(root)
        log.create_topic("t", partitions, {"min.cleanable.dirty.ratio": "0.1"})
        with directory_log_of(log).transaction() as transaction:
            for number in range(partitions):
                directory = directory_log_of(log).partition_directory("t", number)
                template.copy_to(directory)
                if has_producers:
                    write_snapshot(directory, template.end)
                transaction.change_partition(
                    "t",
                    number,
                    high_watermark=template.end,
                    last_stable_offset=template.end,
                    active_base=template.active_base,
                    active_size=template.active_size,
                    producer_snapshot=template.end if has_producers else -1,
                )
            transaction.publish(1)
        fill_journal(log, partitions)


class Template:
    """Two segments that every partition gets."""

    def __init__(self, root: Path) -> None:
        size = SIZE // PARTITIONS // SEGMENTS
        if not root.exists():
            with unsynced(), kafkalog.open(root) as log:
                log.create_topic("t", config={"segment.bytes": str(size)})
                while directory_log_of(log).state().topic("t").partitions[0].active_base == 0:
                    self._append(log)
                while (
                    directory_log_of(log).state().topic("t").partitions[0].active_size
                    < size * 9 // 10
                ):
                    self._append(log)
        with kafkalog.open(root, read_only=True) as log:
            state = directory_log_of(log).state().topic("t").partitions[0]
            self._directory = directory_log_of(log).partition_directory("t", 0)
        self.end, self.active_base = state.high_watermark, state.active_base
        self.active_size = state.active_size

    @staticmethod
    def _append(log: kafkalog.log.KafkaLog) -> None:
        rows = [(b"key-%d" % number, b"%090d" % number) for number in range(2_000)]
        log.append("t", rows)

    def copy_to(self, directory: Path) -> None:
        """Put the segments, and their indexes, into a partition's directory."""
        for suffix in (layout.LOG, layout.INDEX, layout.TIME_INDEX):
            for base in (0, self.active_base):
                name = layout.segment_file(base, suffix)
                shutil.copyfile(self._directory / name, directory / name)


def write_snapshot(directory: Path, offset: int) -> None:
    """Write the state of some producers, as a broker leaves it."""
    entry = layout.SNAPSHOT_ENTRY
    body = struct.pack(">i", PRODUCERS)
    body += b"".join(entry.pack(n, 0, 5, offset - 1, 0, 1, 0, -1) for n in range(PRODUCERS))
    head = struct.pack(">hI", layout.SNAPSHOT_VERSION, crc32c(body))
    (directory / layout.segment_file(offset, layout.SNAPSHOT)).write_bytes(head + body)


def fill_journal(log: kafkalog.log.KafkaLog, partitions: int) -> None:
    """Commit single records until the journal is nearly full: opening has to replay them all.

    A log of few partitions gets fewer of them.
    """
    journal = log.root / layout.COMMIT
    number = 0
    while used(journal) < journal.stat().st_size - JOURNAL_MARGIN:
        if partitions < PARTITIONS and number > partitions:
            break
        for _ in range(100):
            log.append("t", [(b"key-%d" % number, b"value")])
            number += 1


def used(journal: Path) -> int:
    """Return how many bytes of the journal are records."""
    with journal.open("rb") as file:
        file.seek(layout.JOURNAL_PUBLISHED_POSITION)
        end: int = layout.JOURNAL_PUBLISHED.unpack(file.read(layout.JOURNAL_PUBLISHED.size))[0]
    return end


@contextmanager
def unsynced() -> Iterator[None]:
    """Build without syncs, which are not what is measured."""
    with ExitStack() as patches:
        for name in ("sync_file", "sync_data", "sync_path", "sync_directory"):
            patches.enter_context(mock.patch.object(files, name, lambda *_: None))
        yield


def killed(root: Path) -> int:
    """Let a writer commit for a while, then kill it; returns how many records it told of."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        try:
            lines = [writer.stdout.readline() for _ in range(COMMITS)]
        finally:
            writer.kill()
        lines += writer.stdout.readlines()
    told = [int(line) for line in lines if line.endswith(b"\n")]
    if len(told) < COMMITS or writer.returncode != -signal.SIGKILL:
        raise SystemExit(f"the writer ended with {writer.returncode} before it was killed")
    return told[-1]


# --- measuring -----------------------------------------------------------------------------------


def take_turns(
    root: Path, broker: KilledBroker | None, rounds: int, limit: int | None
) -> dict[str, list[dict[str, Any]]]:
    """Return what the processes said, round by round, of which the first does not count."""
    opening = [sys.executable, "-c", OPEN + PEAK, str(root)]
    looking = {
        "status": [sys.executable, "-c", STATUS + PEAK, str(root)],
        "walk": [sys.executable, "-c", WALK + PEAK, str(root)],
        "command": [sys.executable, "-c", COMMAND + PEAK, "status", str(root), "--json"],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("open", "broker", *looking)}
    for turn in range(rounds + 1):
        acknowledged = killed(root)
        for name in list(looking)[:: -1 if turn % 2 else 1]:
            found[name].append(run(looking[name], limit))
        peer = broker if 0 < turn <= BROKER_ROUNDS else None
        if peer is not None and turn % 2:
            found["broker"].append(peer.start())
        opened = run(opening, limit)
        found["open"].append(opened)
        if peer is not None and not turn % 2:
            found["broker"].append(peer.start())
        if opened["records"] < acknowledged:
            raise SystemExit(f"lost: of {acknowledged} records found {opened['records']}")
    return {name: each if name == "broker" else each[1:] for name, each in found.items()}


def show(
    text: str, partitions: int, found: dict[str, list[dict[str, Any]]], *, as_json: bool
) -> None:
    """Print the claims."""
    for name in ("open", "status", "walk"):
        if {one["partitions"] for one in found[name]} != {partitions}:
            raise SystemExit(f"wrong: {name} finds other partitions than {partitions}")
    found["command"] = [{**one, "seconds": one["whole"]} for one in found["command"]]
    # What is told of the whole process has the append and the read in it.
    opens = [{**one, "peak_kib": one["open_kib"]} for one in found["open"]]
    walks = found["walk"]
    tell(f"open: {text}", opens, walks, whole="with_append_and_read", as_json=as_json)
    tell(f"status: {text}", found["status"], walks, target="ours < 0.5", as_json=as_json)
    tell(f"kafkalog status: {text}", found["command"], walks, as_json=as_json)
    if found["broker"]:
        tell_of_broker(text, found["open"], found["broker"], as_json=as_json)


def size_of(root: Path) -> int:
    """Return the bytes of all files of a log."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def tell_of_broker(
    text: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, as_json: bool
) -> None:
    """Print the claim next to the broker, of the rounds in which it took part."""
    starts = ours[: len(theirs)]
    peaks = [one["peak_mib"] for one in theirs if one["peak_mib"] is not None]
    claim = compare_figures(
        f"open, append a record and read it: {text}",
        [one["whole"] for one in starts],
        [one["seconds"] for one in theirs],
        unit="s",
        peer_name="start of Kafka's broker 4.4.0",
        ratio_is=MORE,
        target=">= 10",
        is_time=True,
        ours_mib=max(one["peak_kib"] for one in starts) / 1024,
        peer_mib=max(peaks, default=None),
    )
    loading = statistics.median(one["loading"] for one in theirs)
    report(claim.told(of_which_loading_logs_s=loading), as_json=as_json)


def run(command: list[str], limit: int | None) -> dict[str, Any]:
    """Run a program that prints its figures, and its memory's peak last.

    Adds `whole`, the seconds with the start of the process, and `cpu`, those it was running.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(limited(command, limit), check=True, stdout=subprocess.PIPE)
    whole = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *_, text, peak = done.stdout.splitlines()
    figures: dict[str, Any] = json.loads(text)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**figures, "peak_kib": int(peak), "whole": whole, "cpu": cpu}


def limited(command: list[str], limit: int | None) -> list[str]:
    """Return the command under a limit, soft and hard, of open files."""
    if limit is None:
        return command
    return ["/bin/sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]


def tell(
    claim: str,
    ours: list[dict[str, Any]],
    walk: list[dict[str, Any]],
    *,
    whole: str = "with_process_start",
    target: str = "",
    as_json: bool,
) -> None:
    """Print a claim of figures whose peer is the walk; `whole` is what the process did besides."""
    made = compare_figures(
        claim,
        [one["seconds"] for one in ours],
        [one["seconds"] for one in walk],
        unit="s",
        peer_name="names and sizes of all files",
        target=target,
        ours_mib=max(one["peak_kib"] for one in ours) / 1024,
        peer_mib=max(one["peak_kib"] for one in walk) / 1024,
    )
    lived = round(statistics.median(one["whole"] for one in ours), 3)
    cpu = statistics.median(one["cpu"] for one in ours)
    report(made.told(**{f"{whole}_s": lived}, on_a_processor_s=round(cpu, 3)), as_json=as_json)


if __name__ == "__main__":
    main()
