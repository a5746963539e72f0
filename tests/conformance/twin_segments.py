"""What a partition's directory holds, batch by batch, in a form in which two can be compared.

Bytes are compared where nothing was compressed; of a compressed section only its records are, as
two libraries do not compress alike; nor are the places then that indexes name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import crc32c

from kafkalog.storage_engine.format.compression import decompress
from tests.unit.storage_engine import naive

HORIZON = 0x40
_HEADER = struct.Struct(">qiibIhiqqqhii")
_INDEX = struct.Struct(">ii")
_TIME_INDEX = struct.Struct(">qi")


@dataclass(frozen=True)
class Batch:
    base: int
    last: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    leader_epoch: int
    producer: tuple[int, int, int]
    records: tuple[tuple[object, ...], ...]
    """(offset, timestamp, key, value, headers) of each."""

    def __str__(self) -> str:
        names = ((0x10, "transactional"), (0x20, "control"), (0x40, "horizon"))
        flags = " ".join(name for bit, name in names if self.attributes & bit)
        return (
            f"[{self.base}..{self.last}] {self.attributes:#04x} {flags} "
            f"base ts {self.base_timestamp} max ts {self.max_timestamp} producer {self.producer} "
            f"epoch {self.leader_epoch} records "
            + " ".join(
                f"{offset}:{key!r}{'' if value is None else '='}"
                for offset, _, key, value, _ in self.records
            )
        )


@dataclass(frozen=True)
class Segment:
    base: int
    batches: tuple[Batch, ...]
    aborted: tuple[tuple[int, ...], ...]
    index: tuple[tuple[int, ...], ...]
    time_index: tuple[tuple[int, ...], ...]


def read_segments(directory: Path) -> list[Segment]:
    """Read the live segments of a directory in which no swap is under way."""
    return [_segment(path) for path in sorted(directory.glob("*.log"))]


def _segment(path: Path) -> Segment:
    return Segment(
        int(path.stem),
        tuple(_batches(path)),
        tuple(_entries(path.with_suffix(".txnindex"), struct.Struct(">hqqqq"))),
        tuple(_entries(path.with_suffix(".index"), _INDEX)),
        tuple(_entries(path.with_suffix(".timeindex"), _TIME_INDEX)),
    )


def _entries(path: Path, layout: struct.Struct) -> Iterator[tuple[int, ...]]:
    """Yield the entries of an index; an open one has room behind them, of zeros."""
    data = path.read_bytes() if path.exists() else b""
    count = -(-len(data.rstrip(b"\0")) // layout.size)
    yield from layout.iter_unpack(data[: count * layout.size])


def _batches(path: Path) -> Iterator[Batch]:
    data, position = path.read_bytes(), 0
    while position < len(data):
        (
            base,
            length,
            leader_epoch,
            magic,
            crc,
            attributes,
            delta,
            base_timestamp,
            max_timestamp,
        ) = _HEADER.unpack_from(data, position)[:9]
        *producer, count = _HEADER.unpack_from(data, position)[9:]
        if length == 0:
            break  # room of a preallocated file
        end = position + 12 + length
        assert magic == 2, path
        assert crc == crc32c.crc32c(data[position + 21 : end]), (path, position)
        section = data[position + _HEADER.size : end]
        if attributes & 7:
            section = bytes(decompress(attributes & 7, section, limit=1 << 28))
        records = naive.read_section(
            section,
            count=count,
            base_offset=base,
            last_offset_delta=delta,
            base_timestamp=base_timestamp,
            append_timestamp=max_timestamp if attributes & 8 else None,
        )
        yield Batch(
            base,
            base + delta,
            attributes,
            base_timestamp,
            max_timestamp,
            leader_epoch,
            (producer[0], producer[1], producer[2]),
            tuple((r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in records),
        )
        position = end


FEATURES = (
    "data with a delete horizon",
    "a marker with a delete horizon",
    "an empty batch of a producer",
    "an empty batch at the end",
    "an aborted transaction",
    "a batch without its last record",
    "several closed segments",
)


def features(segments: list[Segment]) -> set[str]:
    """Say what there is in a log that was cleaned, in the words of `FEATURES`."""
    batches = [batch for segment in segments for batch in segment.batches]
    has = (
        any(batch.attributes & 0x60 == HORIZON for batch in batches),
        any(batch.attributes & 0x60 == 0x60 for batch in batches),
        any(not batch.records and batch.producer[0] >= 0 for batch in batches),
        any(not batch.records and batch.producer[0] < 0 for batch in batches[-1:]),
        any(segment.aborted for segment in segments),
        any(batch.records and batch.records[-1][0] != batch.last for batch in batches),
        len(segments) > 2,
    )
    return {name for name, is_there in zip(FEATURES, has, strict=True) if is_there}


def differences(theirs: list[Segment], ours: list[Segment]) -> list[str]:
    """Say where two logs differ: their segments, batches, aborted transactions and indexes."""
    found: list[str] = []
    found += _only("segment", [s.base for s in theirs], [s.base for s in ours])
    mine = {segment.base: segment for segment in ours}
    found += _only(
        "batch", [b for s in theirs for b in s.batches], [b for s in ours for b in s.batches]
    )
    for segment in theirs:
        other = mine.get(segment.base)
        if other is None or found:
            continue
        place = f"segment {segment.base}:"
        found += _only(f"{place} batch", list(segment.batches), list(other.batches))
        found += _only(f"{place} aborted", list(segment.aborted), list(other.aborted))
        is_compressed = any(batch.attributes & 7 for batch in segment.batches)
        if segment is not theirs[-1] and not is_compressed:
            found += _only(f"{place} index entry", list(segment.index), list(other.index))
            found += _only(f"{place} time entry", list(segment.time_index), list(other.time_index))
    return found


def record_differences(theirs: list[Segment], ours: list[Segment]) -> list[str]:
    """Say which records two logs do not share, whatever their batches; and the same of aborts."""
    found = _only("record", _records(theirs), _records(ours))
    aborted = ([entry for s in segments for entry in s.aborted] for segments in (theirs, ours))
    return found + _only("aborted", *aborted)


def _records(segments: list[Segment]) -> list[tuple[object, ...]]:
    return [record for s in segments for batch in s.batches for record in batch.records]


def _only(what: str, theirs: Sequence[object], ours: Sequence[object]) -> list[str]:
    if theirs == ours:
        return []
    lost = [f"{what} only in Kafka's: {one}" for one in theirs if one not in ours]
    extra = [f"{what} only in ours: {one}" for one in ours if one not in theirs]
    return (lost + extra) or [f"{what}: the order differs"]
