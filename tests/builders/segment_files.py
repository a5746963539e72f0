"""Write the files of a segment by hand: nothing here is kafkalog's code."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

from tests.builders.batch_builder import BuiltBatch


def name(base: int, suffix: str) -> str:
    return f"{base:020d}{suffix}"


@dataclass
class IndexEntries:
    """What both indexes have: (offset, position), and (timestamp, offset)."""

    offsets: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)


def write_segment(
    directory: Path,
    base: int,
    batches: Sequence[BuiltBatch],
    *,
    stage: str = "",
    interval: int = 200,
    indexes: bool = True,
) -> IndexEntries:
    """Write `.log`, `.index` and `.timeindex`; an entry about every `interval` bytes."""
    log = b""
    entries = IndexEntries()
    pending = 0
    largest, largest_offset = -1, base
    for item in batches:
        if item.max_timestamp > largest:
            largest, largest_offset = item.max_timestamp, item.last_offset
        if pending > interval:
            entries.offsets.append((item.last_offset, len(log)))
            if not entries.times or largest > entries.times[-1][0]:
                entries.times.append((largest, largest_offset))
            pending = 0
        pending += len(item.data)
        log += item.data
    if largest >= 0 and (not entries.times or largest > entries.times[-1][0]):
        entries.times.append((largest, largest_offset))
    (directory / name(base, ".log" + stage)).write_bytes(log)
    if indexes:
        (directory / name(base, ".index" + stage)).write_bytes(
            b"".join(struct.pack(">ii", offset - base, at) for offset, at in entries.offsets)
        )
        (directory / name(base, ".timeindex" + stage)).write_bytes(
            b"".join(struct.pack(">qi", time, offset - base) for time, offset in entries.times)
        )
    return entries


def aborted_entry(
    producer_id: int, first: int, last: int, stable: int | None = None, *, version: int = 0
) -> bytes:
    """Return the entry of a transaction index; its last stable offset follows the marker."""
    return struct.pack(
        ">hqqqq", version, producer_id, first, last, last + 1 if stable is None else stable
    )


def producer_snapshot(
    entries: Iterable[tuple[int, ...]],
    *,
    version: int = 1,
    count: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """Return the bytes of a `.snapshot` file, of which count and tail may be wrong.

    An entry is (producer, epoch, last sequence, last offset, offset delta, timestamp, coordinator
    epoch, first offset of its open transaction).
    """
    rows = [struct.pack(">qhiqiqiq", *fields) for fields in entries]
    checked = struct.pack(">i", len(rows) if count is None else count) + b"".join(rows) + tail
    return struct.pack(">hI", version, crc32c(checked)) + checked


def gap_list(sections: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]) -> bytes:
    """Return the bytes of `kl-gaps`, or of `kl-raw-gaps`: sections (base, size, gaps)."""
    bodies = [b"".join(struct.pack(">qq", *gap) for gap in gaps) for _, _, gaps in sections]
    table = struct.pack(">8sII", b"kl-gaps\n", 1, len(sections))
    for (base, size, gaps), body in zip(sections, bodies, strict=True):
        first = gaps[0][0] if gaps else -1
        table += struct.pack(">qqIIqI", base, size, 0, len(gaps), first, crc32c(body))
    return table + struct.pack(">I", crc32c(table)) + b"".join(bodies)


def gaps_of(base: int, ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return what lies between batches of (first, last offset), from `base` up to `end`."""
    found = []
    expected = base
    for first, last in [*ranges, (end, end)]:
        if first != expected:
            found.append((expected, first))
        expected = last + 1
    return found
