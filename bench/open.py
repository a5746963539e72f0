"""How long it takes to open a large log after SIGKILL, and to say how it stands.

    python -m bench.open [--json] [--quick] [--path DIR]

A log of 10 GB in 1,000 partitions of two segments each (sparse files, with real index entries), a
journal that is full to the next rewrite, and a writer that was killed in the middle of its commits.
Each figure is the median of fresh processes: seconds from `import kafkalog` to the result, without
and with the process's start, those on a processor, and the largest resident memory. The second log
has producer state in every partition, and its processes may have 256 files open.

The peer of opening is a walk over the directories that looks at the name and the size of every
file, which is the least that an engine does that has to look at its data; that of `status` is the
same walk, which it cannot do without. The ratio is ours / peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
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
from kafkalog.storage_engine import files, layout

SIZE: Final = 10 << 30
PARTITIONS: Final = 1_000
SEGMENTS: Final = 2
PRODUCERS: Final = 100
"""Producers in the snapshot of each partition."""
INDEX_INTERVAL: Final = 4096
FILES_MAX: Final = 256
JOURNAL_MARGIN: Final = 64 << 10
"""What is left free in the journal for the writer that gets killed."""

PEAK: Final = """
import re
print(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""
"""Unlike ru_maxrss this is not inherited from the process that started it."""
OPEN: Final = """
import json, sys, time
started = time.perf_counter()
import kafkalog
log = kafkalog.open(sys.argv[1])
partitions = sum(len(t.partitions) for t in log.state().topics.values())
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "partitions": partitions}))
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
for n in itertools.count():
    log.append("t", [(b"key-%d" % (n + i), b"value") for i in range(20)])
    print(n, flush=True)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.open", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument(
        "--quick", action="store_true", help="100 partitions, 1 GB, fewer processes"
    )
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure")
    options = parser.parse_args(arguments)
    partitions = PARTITIONS // 10 if options.quick else PARTITIONS
    rounds = 3 if options.quick else 7
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for has_producers in (False, True):
            root = Path(scratch) / f"producers-{has_producers}"
            build(root, partitions, has_producers=has_producers)
            killed(root)
            measure(root, partitions, rounds, has_producers=has_producers, as_json=options.json)


# --- the log -------------------------------------------------------------------------------------


def build(root: Path, partitions: int, *, has_producers: bool) -> None:
    """Write a log whose segments are sparse, and fill its journal with small commits."""
    size = SIZE // PARTITIONS // SEGMENTS
    with unsynced():
        log = kafkalog.open(root)
        log.create_topic("t", partitions, {"min.cleanable.dirty.ratio": "0.1"})
        with log.transaction() as transaction:
            for number in range(partitions):
                directory = log.partition_directory("t", number)
                count = size // INDEX_INTERVAL
                for place in range(SEGMENTS):
                    write_segment(directory, place * count, count)
                end = SEGMENTS * count
                if has_producers:
                    write_snapshot(directory, end)
                transaction.change_partition(
                    "t",
                    number,
                    high_watermark=end,
                    last_stable_offset=end,
                    active_base=end - count,
                    active_size=count * INDEX_INTERVAL,
                    producer_snapshot=end if has_producers else -1,
                )
            transaction.publish(1)
        fill_journal(log)


def write_segment(directory: Path, base: int, count: int) -> None:
    """Write a sparse segment of `count` batches: the first one's header, the size, the indexes."""
    timestamp = 1_700_000_000_000
    with (directory / layout.segment_file(base, layout.LOG)).open("wb") as file:
        length = INDEX_INTERVAL - layout.LOG_OVERHEAD
        header = (base, length, 0, 2, 0, 0, 0, timestamp, timestamp, -1, -1, -1, 1)
        file.write(layout.BATCH_HEADER.pack(*header))
        file.truncate(count * INDEX_INTERVAL)
    offsets = [struct.pack(">ii", n, n * INDEX_INTERVAL) for n in range(1, count)]
    times = [struct.pack(">qi", timestamp + n, n) for n in range(1, count)]
    (directory / layout.segment_file(base, layout.INDEX)).write_bytes(b"".join(offsets))
    (directory / layout.segment_file(base, layout.TIME_INDEX)).write_bytes(b"".join(times))


def write_snapshot(directory: Path, offset: int) -> None:
    """Write the state of some producers, as a broker leaves it."""
    entry = layout.SNAPSHOT_ENTRY
    body = struct.pack(">i", PRODUCERS)
    body += b"".join(entry.pack(n, 0, 5, offset - 1, 0, 1, 0, -1) for n in range(PRODUCERS))
    head = struct.pack(">hI", layout.SNAPSHOT_VERSION, crc32c(body))
    (directory / layout.segment_file(offset, layout.SNAPSHOT)).write_bytes(head + body)


def fill_journal(log: kafkalog.log.KafkaLog) -> None:
    """Commit single records until the journal is nearly full: opening has to replay them all."""
    journal = log.root / layout.COMMIT
    number = 0
    while journal.stat().st_size == layout.JOURNAL_SIZE and used(journal) < (
        layout.JOURNAL_SIZE - JOURNAL_MARGIN
    ):
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


def killed(root: Path) -> None:
    """Let a writer commit for a while, then kill it."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)


# --- measuring -----------------------------------------------------------------------------------


def measure(
    root: Path, partitions: int, rounds: int, *, has_producers: bool, as_json: bool
) -> None:
    """Time fresh processes, ours and the peer in turn, and print the claims."""
    limit = FILES_MAX if has_producers else None
    programs: dict[str, list[str]] = {
        "open": [sys.executable, "-c", OPEN + PEAK, str(root)],
        "status": [sys.executable, "-c", STATUS + PEAK, str(root)],
        "walk": [sys.executable, "-c", WALK + PEAK, str(root)],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, command in programs.items():
            found[name].append(run(command, limit))
    command = [sys.executable, "-c", COMMAND + PEAK, "status", str(root), "--json"]
    found["command"] = [run(command, limit) for _ in range(rounds)]
    text = f"{partitions:,} partitions, {partitions * SIZE // PARTITIONS >> 30} GB, after SIGKILL"
    if has_producers:
        text += f", {PRODUCERS} producers each, {FILES_MAX} open files"
    for name in ("open", "status"):
        assert {one["partitions"] for one in found[name]} == {partitions}
        report(f"{name}: {text}", found[name], found["walk"], as_json=as_json)
    whole = [{**one, "seconds": one["whole"]} for one in found["command"]]
    report(f"kafkalog status --json: {text}", whole, found["walk"], as_json=as_json)


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


def report(
    claim: str, ours: list[dict[str, Any]], peer: list[dict[str, Any]], *, as_json: bool
) -> None:
    """Print the medians, as text or as a JSON line."""

    def median(found: list[dict[str, Any]], name: str) -> float:
        return float(statistics.median(one[name] for one in found))

    mine, theirs = median(ours, "seconds"), median(peer, "seconds")
    figures = {
        "claim": claim,
        "ours": round(mine, 4),
        "peer": round(theirs, 4),
        "ratio": round(mine / theirs, 2),
        "unit": "s",
        "peer_name": "names and sizes of all files",
        "with_process_start": round(median(ours, "whole"), 3),
        "cpu": round(median(ours, "cpu"), 3),
        "peak_mib": round(max(one["peak_kib"] for one in ours) / 1024, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if as_json:
        print(json.dumps(figures), flush=True)
    else:
        print(
            f"{claim}: {figures['ours']} s, {figures['with_process_start']} s with the process's "
            f"start, {figures['peak_mib']} MiB; names and sizes of all files {figures['peer']} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
