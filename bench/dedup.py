"""Exact dedup in fixed memory, with many more dirty keys than the cleaner's buffer holds.

    python -m bench.dedup [--json] [--quick] [--keys N] [--budget BYTES] [--path DIR]

A log gets a clean section, then N distinct keys (20 million) in random order, a tenth twice. A
process of its own, with all modules imported, cleans it with a buffer of 16 MiB. Told are its peak
of resident memory above the idle level (the limit is the buffer and 32 MiB), how often the log was
rewritten, and the disk. The peer is Kafka's way, by our own cleaner: a rewrite for each filling
of the map. How many these are is reckoned; --quick and --bounded run it once, on a copy, before
ours, for the time. What is left is read back and compared with a reference that knows nothing of
the cleaner, an array of the last offset of each key; a difference ends the program with an error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import kafkalog
from bench import Claim, compare_figures, program, report
from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.fs.clock import now_ms
from kafkalog.storage_engine.place import directory_log_of

MIB: Final = 1 << 20
ALLOWANCE: Final = 32 * MIB
TOPIC: Final = "t"
NOW_MS: Final = now_ms()
DAY_MS: Final = 86_400_000
APPENDED: Final = 500_000
"""Records of one commit."""
SAMPLED_S: Final = 0.02

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The cleaning process's own figures."""

    idle_bytes: int
    peak_bytes: int
    seconds: float
    rounds: int
    bytes_read: int
    bytes_written: int
    spilled_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("dedup", __doc__, quick="300,000 keys, 1 MiB")
    parser.add_argument("--keys", type=int, help="distinct dirty keys")
    parser.add_argument("--budget", type=int, help="bytes of the cleaner's buffer")
    parser.add_argument("--bounded", action="store_true", help="clean a copy in rounds, as Kafka")
    parser.add_argument("--clean", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    keys = options.keys or (300_000 if options.quick else 20_000_000)
    budget = options.budget or (MIB if options.quick else 16 * MIB)
    if options.clean is not None:
        print(json.dumps(asdict(clean(options.clean, budget, spill=not options.bounded))))
        return
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        root = Path(scratch, "log")
        latest = fill(root, keys)
        peer: Cleaning | None = None
        if options.quick or options.bounded:
            shutil.copytree(root, Path(scratch, "copy"))
            peer, _ = cleaned(Path(scratch, "copy"), budget, "--bounded")
            compare_with(latest, Path(scratch, "copy"))
            shutil.rmtree(Path(scratch, "copy"))
        before = disk_usage(root)
        cleaning, most = cleaned(root, budget)
        compare_with(latest, root)
        disk = before, most, disk_usage(root)
        show(keys, budget, (cleaning, peer), disk, as_json=options.json)


def fill(root: Path, keys: int) -> Int64s:
    """Write the log; returns the last offset of each key (n)."""
    rng = np.random.default_rng(1)
    latest = np.full(keys, -1, dtype=np.int64)
    clean = rng.permutation(keys)[: keys // 10]
    twice = rng.permutation(keys)[: keys // 10]
    dirty = rng.permutation(np.concatenate([np.arange(keys), twice]))
    config = {"segment.bytes": str(256 * MIB), "file.delete.delay.ms": "0"}
    end = 0
    with kafkalog.open(root) as log:
        log.create_topic(TOPIC, config=config)
        for numbers in (clean, dirty):
            for first in range(0, len(numbers), APPENDED):
                part = numbers[first : first + APPENDED]
                log.append(TOPIC, table(part), now_ms=NOW_MS)
                np.maximum.at(latest, part, np.arange(end, end + len(part)))
                end += len(part)
            if numbers is clean:
                log.clean(TOPIC, force=True, now_ms=NOW_MS)
    return latest


def table(numbers: Int64s) -> pa.Table:
    """Rows whose key is a number's 8 bytes and whose value is the number again."""
    data = pa.py_buffer(numbers.astype("<i8").tobytes())
    places = pa.py_buffer((8 * np.arange(len(numbers) + 1, dtype=np.int32)).tobytes())
    column = pa.Array.from_buffers(pa.binary(), len(numbers), [None, places, data])
    return pa.table({"key": column, "value": column})


def cleaned(root: Path, budget: int, *more: str) -> tuple[Cleaning, int]:
    """Clean the log in a process of its own; returns the most the disk held meanwhile, too."""
    command = [sys.executable, "-m", "bench.dedup", "--clean", str(root), "--budget", str(budget)]
    command += more
    most = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, disk_usage(root))
            time.sleep(SAMPLED_S)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the cleaning process ended with {process.returncode}")
    return Cleaning(**json.loads(output.splitlines()[-1])), most


def clean(root: Path, budget: int, *, spill: bool) -> Cleaning:
    """Clean the log and watch the own memory; for the process that does nothing else."""
    warm()
    with kafkalog.open(root) as log:
        idle = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        started = time.perf_counter()
        config = CleanerConfig(dedupe_buffer_size=budget, spill=spill)
        (stats,) = manager.clean(
            directory_log_of(log), TOPIC, force=True, now_ms=NOW_MS, config=config
        )
        seconds = time.perf_counter() - started
        peak = memory("VmHWM")
        if stats.error:
            raise SystemExit(stats.error)
        manager.sweep(directory_log_of(log), now_ms=NOW_MS + DAY_MS)
    return Cleaning(
        idle_bytes=idle,
        peak_bytes=peak,
        seconds=seconds,
        rounds=stats.rounds,
        bytes_read=stats.bytes_read,
        bytes_written=stats.bytes_written,
        spilled_bytes=stats.spilled_bytes,
    )


def warm() -> None:
    """Import all modules of a cleaning: clean a small log."""
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as scratch:
        fill(Path(scratch, "log"), 2_000)
        with kafkalog.open(Path(scratch, "log")) as log:
            config = CleanerConfig(dedupe_buffer_size=24 * 100)
            manager.clean(directory_log_of(log), TOPIC, force=True, now_ms=NOW_MS, config=config)


def memory(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/self/status has no {name}")


def disk_usage(root: Path) -> int:
    """Return the bytes of the files below a directory."""
    total = 0
    for entry in root.rglob("*"):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def compare_with(latest: Int64s, root: Path) -> None:
    """End the program if the log does not hold the last record of each key and nothing else."""
    expected = np.sort(latest[latest >= 0])
    place = 0
    with kafkalog.open(root, read_only=True) as log:
        for rows in log.read(TOPIC, 0):
            offsets = np.asarray(rows["offset"])
            keys = np.frombuffer(b"".join(rows["key"].to_pylist()), dtype="<i8")
            same = np.array_equal(offsets, expected[place : place + len(offsets)])
            if not same or not np.array_equal(latest[keys], offsets):
                raise SystemExit(f"other records than expected behind offset {offsets[0]}")
            place += len(offsets)
    if place != len(expected):
        raise SystemExit(f"{place:,} records left, expected {len(expected):,}")


def show(
    keys: int,
    budget: int,
    cleanings: tuple[Cleaning, Cleaning | None],
    disk: tuple[int, int, int],
    *,
    as_json: bool,
) -> None:
    """Print what was measured."""
    ours, peer = cleanings
    above = max(1, ours.peak_bytes - ours.idle_bytes)
    limit = budget + ALLOWANCE
    kafka = "Kafka's way, a rewrite a filling"
    reckoned = kafka if peer is not None else f"{kafka}, reckoned"
    title = f"{keys:,} distinct dirty keys in {budget / MIB:.3g} MiB"
    fillings = -(-keys // int(budget // 24 * 0.9)) if peer is None else peer.rounds
    text = f"{title}: rewrites of the log"
    claims = [
        claim(f"{title}: peak memory above idle", above, limit, "MiB", MIB, "the limit", "<= 1"),
        claim(text, ours.rounds, fillings, "rewrites", 1, reckoned, "ours <= 1"),
        claim(f"{title}: disk after", disk[2], disk[0], "MiB", MIB, "before"),
        claim(f"{title}: most disk while cleaning", disk[1], disk[0], "MiB", MIB, "before"),
    ]
    if peer is not None:
        seconds = claim(f"{title}: time", ours.seconds, peer.seconds, "s", 1, kafka)
        ours_mib, peer_mib = (round(side.peak_bytes / MIB, 1) for side in (ours, peer))
        claims.append(replace(seconds, ours_mib=ours_mib, peer_mib=peer_mib))
    for each in claims:
        report(each, as_json=as_json)
    if not as_json:
        print(f"{ours.seconds:.1f} s, {ours.spilled_bytes / MIB:.0f} MiB of keys on disk")


def claim(
    text: str,
    ours: float,
    peer: float,
    unit: str,
    scale: int,
    peer_name: str,
    target: str = "",
) -> Claim:
    """A claim of which less is better."""
    return compare_figures(
        text,
        [ours / scale],
        [peer / scale],
        unit=unit,
        peer_name=peer_name,
        ratio_is="of that",
        target=target,
    )


if __name__ == "__main__":
    main()
