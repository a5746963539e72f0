"""Builds partitions by hand, with none of kafkalog's code: batches, segments, indexes, and a model.

`Batch` knows the records that a reader must get from it; `write_segment` writes Kafka's files.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

CONTROL = 0x30
GZIP = 0x01


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int


def varint(number: int) -> bytes:
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest >= 0x80:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


@dataclass(frozen=True)
class Batch:
    base_offset: int
    last_offset: int
    records: Sequence[Record] = ()
    attributes: int = 0
    max_timestamp: int | None = None
    magic: int = 2
    producer_id: int = -1

    @property
    def largest_timestamp(self) -> int:
        if self.max_timestamp is not None:
            return self.max_timestamp
        return max((record.timestamp for record in self.records), default=-1)

    def data(self) -> bytes:
        base_timestamp = self.records[0].timestamp if self.records else -1
        section = b""
        for record in self.records:
            body = (
                b"\0"
                + varint(record.timestamp - base_timestamp)
                + varint(record.offset - self.base_offset)
                + sized(record.key)
                + sized(record.value)
                + varint(0)
            )
            section += varint(len(body)) + body
        if self.attributes & GZIP:
            section = gzip.compress(section, mtime=0)
        checked = (
            struct.pack(
                ">hiqqqhii",
                self.attributes,
                self.last_offset - self.base_offset,
                base_timestamp,
                self.largest_timestamp,
                self.producer_id,
                -1,
                -1,
                len(self.records),
            )
            + section
        )
        crc = crc32c(checked)
        return (
            struct.pack(">qiibI", self.base_offset, len(checked) + 9, 0, self.magic, crc) + checked
        )


def batch(
    first: int,
    count: int,
    *,
    size: int = 10,
    last: int | None = None,
    step: int = 1,
    attributes: int = 0,
    timestamp: int | None = None,
) -> Batch:
    """A batch of `count` records from offset `first`, every `step` offsets; timestamps rise."""
    records = [
        Record(
            offset,
            b"key-%d" % (offset % 7),
            b"%d:" % offset + b"v" * size,
            1000 + 10 * offset if timestamp is None else timestamp,
        )
        for offset in range(first, first + count * step, step)
    ]
    end = first + max(count, 1) * step - 1
    return Batch(first, end if last is None else last, records, attributes)


def empty(first: int, last: int) -> Batch:
    """Return what the cleaner leaves of a batch of which no record stays."""
    return Batch(first, last, max_timestamp=1000 + 10 * last)


def marker(offset: int, *, abort: bool = False) -> Batch:
    """A control batch: the end of a transaction."""
    key, value = struct.pack(">hh", 0, int(not abort)), b"\0\0\0\0\0\0"
    return Batch(offset, offset, [Record(offset, key, value, 1000 + 10 * offset)], CONTROL)


def data_records(batches: Iterable[Batch]) -> list[Record]:
    return [r for b in batches if b.attributes & CONTROL != CONTROL for r in b.records]


def name(base: int, suffix: str) -> str:
    return f"{base:020d}{suffix}"


@dataclass
class IndexEntries:
    offsets: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)


def write_segment(
    directory: Path,
    base: int,
    batches: Sequence[Batch],
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
        data = item.data()
        if item.largest_timestamp > largest:
            largest, largest_offset = item.largest_timestamp, item.last_offset
        if pending > interval:
            entries.offsets.append((item.last_offset, len(log)))
            if not entries.times or largest > entries.times[-1][0]:
                entries.times.append((largest, largest_offset))
            pending = 0
        pending += len(data)
        log += data
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


def gap_list(sections: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]) -> bytes:
    """The bytes of `kl-gaps`, or of `kl-raw-gaps`: sections (base, size, gaps), one part each."""
    bodies = [b"".join(struct.pack(">qq", *gap) for gap in gaps) for _, _, gaps in sections]
    table = struct.pack(">8sII", b"kl-gaps\n", 1, len(sections))
    for (base, size, gaps), body in zip(sections, bodies, strict=True):
        first = gaps[0][0] if gaps else -1
        table += struct.pack(">qqIIqI", base, size, 0, len(gaps), first, crc32c(body))
    return table + struct.pack(">I", crc32c(table)) + b"".join(bodies)


def gaps_of(base: int, ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What is missing between batches of (first, last offset), from `base` up to `end`."""
    found = []
    expected = base
    for first, last in [*ranges, (end, end)]:
        if first != expected:
            found.append((expected, first))
        expected = last + 1
    return found
