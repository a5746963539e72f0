"""Bounds of a compacted topic without any config, with a turn of the cleaner after each commit.

    python -m bench.self_tuning [--scale N] [--partitions N ...] [--floor BYTES]

Each line is a history of commits, in a directory and in an object store, with 1, 12 and 50
partitions. It shows the most that a partition takes over its live bytes (the latest record of each
key), at every moment after its first cleaning. A moment is the end of a commit, the end of a
cleaning before its sources go, and its end. Files that wait for file.delete.delay.ms do not count:
they go a minute after a cleaning, and a history has many cleanings in a minute. The exit status is
1 if a bound is broken:

- a partition takes at most 4 times its live bytes, and 4 MiB;
- cleaning writes at most 4 bytes for each byte that was appended;
- a partition has at most 30 segments.

`--floor` replaces the least size of a segment that the cleaner closes, to compare.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import kafkalog
from kafkalog.cleaner import plan
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.stored_segments import stored_segments
from kafkalog.storage_engine.segment.segments import list_segments

KEY_SIZE, VALUE_SIZE, OVERHEAD = 10, 100, 8
"""Bytes of a record: key, value, and what the format adds in a large batch."""
TURN_MS: Final = 15_000
ROOM: Final = 4 << 20
MOST_LIVE, MOST_WRITTEN, MOST_SEGMENTS = 4.0, 4.0, 30
Keys = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Keys]
"""Draws the keys of the commit of a number."""


@dataclass(frozen=True, slots=True)
class History:
    """Commits of drawn keys."""

    name: str
    keys: int
    commits: int
    draw: Draw
    deletes: float = 0.0
    """The share of tombstones."""
    is_loaded: bool = False
    """Whether a first commit has each key."""


def uniform(keys: int, rows: int) -> Draw:
    """Draw each key as often."""
    return lambda rng, _: rng.integers(0, keys, rows)


def zipf(keys: int, rows: int, exponent: float) -> Draw:
    """Draw the n-th key n^-exponent as often as the first."""
    shares = np.cumsum(1 / np.arange(1, keys + 1) ** exponent)
    return lambda rng, _: np.searchsorted(shares / shares[-1], rng.random(rows)).astype(np.int64)


def hot(keys: int, rows: int) -> Draw:
    """Draw one of the first hundredth of the keys in 99 cases of 100."""

    def draw(rng: np.random.Generator, _: int) -> Keys:
        is_hot = rng.random(rows) < 0.99
        return np.where(is_hot, rng.integers(0, keys // 100, rows), rng.integers(0, keys, rows))

    return draw


def growing(rows: int) -> Draw:
    """Draw each key once."""
    return lambda _, number: np.arange(number * rows, (number + 1) * rows)


def histories(scale: int) -> Iterator[History]:
    """Yield the histories; each number of rows is divided by `scale`."""
    rows, many = 20_000 // scale, 100_000 // scale
    yield History("uniform", rows, 40, uniform(rows, rows))
    yield History("zipf 1.2", many, 40, zipf(many, rows, 1.2))
    yield History("hot 1 %", many, 40, hot(many, rows), is_loaded=True)
    yield History("half deletes", rows, 40, uniform(rows, rows), deletes=0.5)
    yield History("only new keys", 40 * rows, 40, growing(rows))
    yield History("tiny commits", 2_000, 600 // scale, uniform(2_000, 100))
    yield History("large commits", 2 * many, 8, uniform(2 * many, 2 * many))


class Occupied:
    """What each partition of a topic `t` takes: bytes of batches, and segments."""

    def __init__(self, log: KafkaLog, partitions: int) -> None:
        self._engine: Any = log._log
        self._partitions = range(partitions)

    def sizes(self) -> Keys:
        """Return the bytes of batches of each partition."""
        return np.array([sum(size for size in self._sizes(p)) for p in self._partitions])

    def segments(self) -> int:
        """Return the most segments of a partition that have records."""
        return max(sum(size > 0 for size in self._sizes(p)) for p in self._partitions)

    def _sizes(self, partition: int) -> list[int]:
        known = self._engine.describe("t")
        held = known.partitions[partition]
        if isinstance(self._engine, ObjectLog):
            state = self._engine.known_state
            return [each.size for each in stored_segments(state, known, partition)]
        found = list_segments(self._engine.partition_directory("t", partition))
        return [held.active_size if s.base_offset == held.active_base else s.size for s in found]


@dataclass(slots=True)
class Found:
    """What a history has shown."""

    peak: float = 0.0
    """The most bytes of a partition less the room, over its live bytes."""
    share: float = 0.0
    """The most bytes of all partitions over all live bytes."""
    segments: int = 0
    appended: int = 0
    written: int = 0
    cleanings: int = 0
    cpu_s: float = 0.0

    def is_bad(self) -> bool:
        """Return whether a bound is broken."""
        return (
            self.peak > MOST_LIVE
            or self.written > MOST_WRITTEN * self.appended
            or self.segments > MOST_SEGMENTS
        )


def measured(history: History, partitions: int, where: str) -> Found:
    """Write a history into a new log, with a turn of the cleaner after each commit."""
    rng, now_ms, found = np.random.default_rng(1), 1_700_000_000_000, Found()
    sizes = np.zeros(history.keys, np.int64)
    places = np.arange(history.keys) % partitions
    keys = pa.array([b"%010d" % number for number in range(history.keys)], pa.binary())
    values = pa.array([*(rng.bytes(VALUE_SIZE) for _ in range(64)), None], pa.binary())
    is_cleaned = np.zeros(partitions, np.bool_)
    with kafkalog.open(where) as log:
        log.create_topic("t", partitions, now_ms=now_ms)
        occupied = Occupied(log, partitions)
        before = occupied.sizes()
        for number in range(-history.is_loaded, history.commits):
            drawn = np.arange(history.keys) if number < 0 else history.draw(rng, number)
            chosen = rng.integers(0, 64, len(drawn))
            chosen[rng.random(len(drawn)) < history.deletes] = 64
            now_ms += TURN_MS
            columns = {
                "key": keys.take(pa.array(drawn)),
                "value": values.take(pa.array(chosen)),
                "partition": pa.array(places[drawn], pa.int32()),
            }
            log.append("t", pa.table(columns), now_ms=now_ms)
            sizes[drawn] = KEY_SIZE + OVERHEAD + np.where(chosen < 64, VALUE_SIZE, 0)
            live = np.bincount(places, sizes, partitions)
            taken = occupied.sizes()
            found.appended += int((taken - before).sum())
            started, most = time.process_time(), taken.copy()
            for stats in log.clean(now_ms=now_ms):
                assert not stats.error, stats.error
                is_cleaned[stats.partition] = True
                most[stats.partition] += stats.bytes_written
                found.written += stats.bytes_written
                found.cleanings += 1
            found.cpu_s += time.process_time() - started
            before = occupied.sizes()
            note(found, most[is_cleaned], live[is_cleaned], occupied.segments())
    return found


def note(found: Found, most: Keys, live: npt.NDArray[Any], segments: int) -> None:
    """Note a turn: the most bytes of each partition that was ever cleaned, and its live ones."""
    found.segments = max(found.segments, segments)
    if len(most):
        found.peak = max(found.peak, float(((most - ROOM) / np.maximum(live, 1)).max()))
        found.share = max(found.share, float(most.sum() / max(live.sum(), 1)))


def main() -> None:
    """Print the table; exit with 1 if a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m bench.self_tuning", description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="divides the rows of each commit")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 12, 50])
    parser.add_argument("--floor", type=int, help="bytes")
    options = parser.parse_args()
    if options.floor is not None:
        plan.CLOSING_LEAST = plan.CLOSING_MOST = options.floor  # type: ignore[misc]  # to try another
    names = "history partitions where peak/live written/appended segments cleanings CPU-s"
    print("|", " | ".join(names.split()), "|")
    print("|---" * 8 + "|")
    broken = 0
    for history in histories(options.scale):
        for partitions in options.partitions:
            for kind in ("directory", "store"):
                directory = Path(tempfile.mkdtemp())
                where = (
                    str(directory / "log")
                    if kind == "directory"
                    else f"memory://bench/{directory.name}"
                )
                found = measured(history, partitions, where)
                shutil.rmtree(directory)
                broken += found.is_bad()
                row = [
                    history.name,
                    partitions,
                    kind,
                    f"{found.share:.1f}",
                    f"{found.written / found.appended:.2f}",
                    found.segments,
                    found.cleanings,
                    f"{found.cpu_s:.1f}" + (" BROKEN" if found.is_bad() else ""),
                ]
                print("|", " | ".join(map(str, row)), "|", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
