"""What is done to a log while it is broken: `operations`, one after the other.

The same sequence gives the same records at the same offsets, whenever it runs: keys, values and the
clock follow from how many operations came before. Only ids and the cleaner's secrets are drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.torture.operations import (
    BASIC,
    DELAY_MS,
    OPERATIONS,
    Moment,
    Opened,
    Operation,
    topic_config,
)
from tests.torture.rows import batch, rows

__all__ = [
    "BASIC",
    "OPERATIONS",
    "VARIANTS",
    "Moment",
    "Opened",
    "Operation",
    "begin",
    "prepare",
    "random_sequences",
    "sequences",
    "small_files",
]

VARIANTS: Final = ("plain", "lz4", "full", "preallocated", "relaxed", "large")
"""As it comes; compressed; with a journal so full that one of the next commits rewrites it; with
room in the segments for what comes; with such a journal, and no commit synced at once; with batches
that several sectors of a disk hold."""
_LARGE: Final = 10
"""How many times a batch of the variant `large` is as long."""


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let new journals be of a few KB: to copy, and to compare, a MB of zeros takes long."""
    size = layout.JOURNAL_SIZE
    setattr(layout, "JOURNAL_SIZE", 4 << 10)  # noqa: B010  (a constant but for this)
    try:
        yield
    finally:
        setattr(layout, "JOURNAL_SIZE", size)  # noqa: B010


def begin(variant: str) -> Moment:
    """Return the moment before the first operation on a log of that variant."""
    return Moment(scale=_LARGE if variant == "large" else 1)


def prepare(root: Path, variant: str = "plain") -> None:
    """Make the log that workloads begin with.

    A compacted topic `t` of several small segments with overwritten and deleted keys, a topic `d`
    that retention takes from, `r` whose commits are not synced at once, and `x` to be deleted.
    """
    moment = begin(variant)
    scale, now_ms = moment.scale, moment.now_ms
    common = topic_config(scale, compression="lz4" if variant == "lz4" else "uncompressed")
    common["preallocate"] = "true" if variant == "preallocated" else "false"
    deleted = {
        "cleanup.policy": "delete",
        "retention.bytes": str(400 * scale),
        "segment.bytes": str(300 * scale),
    }
    relaxed = {"flush.messages": "5", "segment.bytes": str(1_000 * scale)}
    with small_files(), DirectoryLog(root) as engine:
        engine.create_topic("t", 2, common, now_ms=now_ms)
        engine.create_topic("d", 1, {**common, **deleted}, now_ms=now_ms)
        engine.create_topic("r", 1, {**common, **relaxed}, now_ms=now_ms)
        engine.create_topic("x", 1, {"file.delete.delay.ms": str(DELAY_MS)}, now_ms=now_ms)
        for turn in range(5):
            for topic in ("t", "d"):
                engine.append(topic, batch(rows(turn, 6, scale)), now_ms=now_ms + turn)
        engine.append("x", batch(rows(1, 2, scale)), now_ms=now_ms)
        engine.sync(now_ms=now_ms)
        if variant == "relaxed":
            for topic in ("t", "d"):
                engine.alter_topic(topic, {"flush.messages": "40"}, now_ms=now_ms)
    if variant in ("full", "relaxed"):
        _fill_journal(root)


def _fill_journal(root: Path) -> None:
    """Make commits until another one of them does not fit into the journal."""
    journal, spare = root / layout.COMMIT, root.with_name(root.name + ".before")
    inode = journal.stat().st_ino
    with DirectoryLog(root, create=False) as engine:
        size = 10_000
        while journal.stat().st_ino == inode:
            shutil.copy2(journal, spare)
            size += 1
            engine.alter_topic("r", {"max.message.bytes": str(size)}, now_ms=Moment().now_ms)
    spare.replace(journal)


def sequences(most: int, *, least: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield all sequences of `least` to `most` of the basic operations."""
    for length in range(least, most + 1):
        yield from itertools.product(BASIC, repeat=length)


def random_sequences(seed: int, length: int, count: int) -> Iterator[tuple[str, ...]]:
    """Yield sequences drawn by `seed` from all operations."""
    dice = random.Random(f"sequences {seed} {length}")
    for _ in range(count):
        yield tuple(dice.choices(tuple(OPERATIONS), k=length))
