"""Rewriting said slowly: batches as lists of records, merged by the rules as the design has them.

Nothing here calls the cleaner. `read_log` reads the bytes of a log back as the same lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kafkalog.storage_engine.format import compression
from tests.builders.batch_builder import Record, batch_data, sized, varint
from tests.unit.storage_engine import naive

CODEC, APPEND_TIME, TRANSACTIONAL, CONTROL, HORIZON = 7, 8, 16, 32, 64
OVERHEAD = 16
"""What a record counts for beside its key, value and headers."""


@dataclass(frozen=True)
class Batch:
    """A batch v2; `attributes` without the bit of the horizon."""

    base: int
    last: int
    records: tuple[Record, ...]
    attributes: int = 0
    epoch: int = 0
    horizon: int | None = None
    max_timestamp: int = -1
    producer: tuple[int, int, int] = (-1, -1, -1)

    @property
    def data(self) -> bytes:
        return batch_data(
            self.records,
            base_offset=self.base,
            last_offset=self.last,
            codec=self.attributes & CODEC,
            attributes=self.attributes,
            horizon=self.horizon,
            max_timestamp=self.max_timestamp,
            leader_epoch=self.epoch,
            producer=self.producer,
        )


@dataclass(frozen=True)
class Fate:
    """What was decided about one batch."""

    kept: frozenset[int]
    """Offsets of the records that stay."""
    stays_empty: bool = False
    gets_horizon: bool = False


def measured(record: Record) -> int:
    size = len(record.key or b"") + len(sized(record.value))
    size += len(varint(len(record.headers)))
    size += sum(len(sized(name) + sized(text)) for name, text in record.headers)
    return size + OVERHEAD


def tombstones(batch: Batch) -> bool:
    return any(record.value is None for record in batch.records)


def filtered(batch: Batch, fate: Fate, new_horizon: int) -> Batch | None:
    """The batch by itself, as Kafka would write it; None for nothing."""
    records = tuple(record for record in batch.records if record.offset in fate.kept)
    if not records:
        if not fate.stays_empty:
            return None
        attributes = batch.attributes & ~CODEC
        return replace(batch, records=(), horizon=None, attributes=attributes)
    top = batch.max_timestamp
    if not batch.attributes & APPEND_TIME:
        top = max(record.timestamp for record in records)
    horizon = new_horizon if fate.gets_horizon else batch.horizon
    return replace(batch, records=records, horizon=horizon, max_timestamp=top)


def may_join(a: Batch, b: Batch, target: int) -> bool:
    if (a.attributes, a.epoch) != (b.attributes, b.epoch):
        return False
    if a.attributes & APPEND_TIME and a.max_timestamp != b.max_timestamp:
        return False
    if b.last - a.base > 2**31 - 1:
        return False
    if sum(map(measured, a.records + b.records)) > target:
        return False
    if a.horizon == b.horizon:
        return True
    return any(side.horizon is None and not tombstones(side) for side in (a, b))


def merged(a: Batch, b: Batch) -> Batch:
    return replace(
        a,
        last=b.last,
        records=a.records + b.records,
        horizon=b.horizon if a.horizon is None else a.horizon,
        max_timestamp=max(a.max_timestamp, b.max_timestamp),
        producer=(-1, -1, -1),
    )


def rewritten(batches: list[tuple[Batch, Fate]], *, new_horizon: int, target: int) -> list[Batch]:
    """All that stays, merged up to `target` bytes (0 for not at all)."""
    written: list[Batch] = []
    is_open = False
    for source, fate in batches:
        batch = filtered(source, fate, new_horizon)
        if batch is None:
            continue
        size = sum(map(measured, batch.records))
        is_fixed = (
            not batch.records
            or target == 0
            or bool(batch.attributes & (TRANSACTIONAL | CONTROL))
            or (batch.producer[0] >= 0 and fate.stays_empty)
            or (batch == source and 2 * size >= target)
        )
        if is_open and not is_fixed and may_join(written[-1], batch, target):
            written[-1] = merged(written[-1], batch)
        else:
            written.append(batch)
        is_open = not is_fixed and sum(map(measured, written[-1].records)) < target
    return written


def read_log(data: bytes) -> list[Batch]:
    """The batches of a log, their checksums compared."""
    found = []
    position = 0
    while position < len(data):
        fields = naive.HEADER.unpack_from(data, position)
        base, length, epoch, magic, crc, attributes, delta, base_timestamp, top, *rest = fields
        end = position + 12 + length
        assert magic == 2
        assert naive.crc32c(data[position + 21 : end]) == crc
        section = data[position + 61 : end]
        records = naive.read_section(
            compression.decompress(attributes & CODEC, section, limit=1 << 24) if rest[3] else b"",
            count=rest[3],
            base_offset=base,
            last_offset_delta=delta,
            base_timestamp=base_timestamp,
            append_timestamp=top if attributes & APPEND_TIME else None,
        )
        found.append(
            Batch(
                base,
                base + delta,
                tuple(records),
                attributes & ~HORIZON,
                epoch,
                base_timestamp if attributes & HORIZON else None,
                top,
                (rest[0], rest[1], rest[2]),
            )
        )
        position = end
    return found
