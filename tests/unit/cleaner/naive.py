"""The cleaner said slowly: SipHash on Python integers, a dict for the offset map, lists for a log.

Nothing here calls the cleaner. `dump` reads a log back as the same lists, batch by batch, and
`foreign_log` gives an engine a log that none of our writers would write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
from kafkalog.storage_engine.records.tables import RecordTable
from tests.builders.batch_builder import Record, batch_data
from tests.builders.segment_files import producer_snapshot

MASK = 2**64 - 1


def siphash_128(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with 128 bits of output, as its paper has it."""

    def turn(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) & MASK

    def rounds(v: list[int], count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[1] = turn(v[1], 13) ^ v[0]
            v[0] = turn(v[0], 32)
            v[2] = (v[2] + v[3]) & MASK
            v[3] = turn(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & MASK
            v[3] = turn(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & MASK
            v[1] = turn(v[1], 17) ^ v[2]
            v[2] = turn(v[2], 32)

    k0, k1 = struct.unpack("<QQ", key)
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(v, 4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(v, 4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])


# --- a log as lists ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    base: int
    last: int
    records: tuple[Record, ...]
    horizon: int | None = None
    producer: int = -1
    sequence: int = -1
    attributes: int = 0
    max_timestamp: int = -1

    @property
    def data(self) -> bytes:
        """The bytes of the batch, uncompressed."""
        return batch_data(
            self.records,
            base_offset=self.base,
            last_offset=self.last,
            attributes=self.attributes,
            horizon=self.horizon,
            producer=(self.producer, 0 if self.producer >= 0 else -1, self.sequence),
            leader_epoch=0,
            max_timestamp=None if self.records else self.max_timestamp,
        )


def batch(base: int, pairs: Sequence[tuple[str, str | None]], **fields: int | None) -> Batch:
    """A batch of (key, value) pairs at offsets from `base`, each its offset's thousand ms old."""
    records = tuple(
        Record(
            base + i,
            1000 * (base + i),
            None if key == "" else key.encode(),
            None if value is None else value.encode(),
        )
        for i, (key, value) in enumerate(pairs)
    )
    return Batch(base, base + len(pairs) - 1, records, **fields)


def singles(first: int, *keys: str) -> list[Batch]:
    """One batch per record, as a producer without batching writes."""
    return [batch(first + i, [(key, f"v{first + i}")]) for i, key in enumerate(keys)]


def naive_clean(
    batches: Iterable[Batch],
    first_dirty: int,
    end: int,
    *,
    now: int,
    retention: int,
    high_watermark: int,
) -> list[Batch]:
    """One round over `batches` with a map that takes in all of [first_dirty, end)."""
    batches = list(batches)
    latest: dict[bytes | None, int] = {}
    for item in batches:
        for record in item.records:
            if first_dirty <= record.offset < end and record.key is not None:
                latest[record.key] = record.offset
    lasts = {item.producer: item.last for item in batches}
    result = []
    for item in batches:
        kept = []
        for record in item.records:
            if record.offset < end:
                if record.key is None or latest.get(record.key, -1) > record.offset:
                    continue
                if record.value is None and item.horizon is not None and now >= item.horizon:
                    continue
            kept.append(record)
        horizon = item.horizon
        if horizon is None and any(record.value is None for record in kept):
            horizon = now + retention
        if kept:
            result.append(replace(item, records=tuple(kept), horizon=horizon))
        elif item.last + 1 == high_watermark or (
            item.producer >= 0 and lasts[item.producer] == item.last
        ):
            result.append(replace(item, records=(), horizon=None))
    return result


# --- a log on disk -------------------------------------------------------------------------------


def runs(snapshot: PartitionSnapshot, start: int, end: int) -> Iterator[tuple[Chunk, RecordTable]]:
    for chunk in snapshot.chunks(start, end):
        yield from chunk.runs(np.ones(len(chunk.table), dtype=np.bool_))


def dump_snapshot(
    snapshot: PartitionSnapshot, start: int = 0, end: int | None = None
) -> list[Batch]:
    """What a view holds, batch by batch, empty ones too."""
    found = []
    end = snapshot.state.high_watermark if end is None else end
    for run, records in runs(snapshot, start, end):
        table = run.table
        rows = list(
            zip(
                records.batch_index.tolist(),
                records.offsets.tolist(),
                records.timestamps.tolist(),
                _cells(records.arena, records.key_positions, records.key_sizes),
                _cells(records.arena, records.value_positions, records.value_sizes),
                strict=True,
            )
        )
        for b in range(len(table.sizes)):
            has_horizon = bool(table.attributes[b] & 0x40)
            found.append(
                Batch(
                    base=int(table.base_offsets[b]),
                    last=int(table.last_offsets[b]),
                    records=tuple(
                        Record(offset, timestamp, key, value)
                        for batch_index, offset, timestamp, key, value in rows
                        if batch_index == b
                    ),
                    horizon=int(table.base_timestamps[b]) if has_horizon else None,
                    producer=int(table.producer_ids[b]),
                    sequence=int(table.base_sequences[b]),
                    attributes=int(table.attributes[b]) & 0x30,
                )
            )
    return found


def dump(engine: DirectoryLog, topic: str = "t", partition: int = 0) -> list[Batch]:
    """What a partition holds now, batch by batch."""
    with engine.snapshot(topic, partition, whole=True) as snapshot:
        return dump_snapshot(snapshot)


def records_of(batches: Iterable[Batch]) -> list[Record]:
    return [record for item in batches for record in item.records]


def offsets(batches: Iterable[Batch]) -> list[int]:
    return [record.offset for record in records_of(batches)]


def latest_values(records: Iterable[Record]) -> dict[bytes | None, tuple[int, bytes | None]]:
    return {record.key: (record.offset, record.value) for record in records}


def _cells(arena: np.ndarray, positions: np.ndarray, sizes: np.ndarray) -> list[bytes | None]:
    return [
        None if size < 0 else arena[position : position + size].tobytes()
        for position, size in zip(positions.tolist(), sizes.tolist(), strict=True)
    ]


def write_producers(directory: Path, logs: Iterable[Iterable[Batch]], end: int) -> int:
    """Write the snapshot at `end` of who wrote what last; returns `end`, or -1 for nobody."""
    lasts: dict[int, tuple[int, int, int]] = {}
    for item in (item for batches in logs for item in batches):
        if item.producer >= 0:
            time = max((record.timestamp for record in item.records), default=item.max_timestamp)
            last, delta, _ = lasts.get(item.producer, (-1, 0, -1))
            if not item.attributes & 0x20:
                last, delta = item.last, item.last - item.base
            lasts[item.producer] = last, delta, time
    entries = [
        (producer, 0, 0, last, delta, time, -1, -1)
        for producer, (last, delta, time) in lasts.items()
    ]
    if entries:
        (directory / f"{end:020d}.snapshot").write_bytes(producer_snapshot(entries))
    return end if entries else -1


def foreign_log(
    root: Path,
    segments: Mapping[int, Sequence[Batch]],
    *,
    config: dict[str, str] | None = None,
    high_watermark: int | None = None,
    first_dirty: int = 0,
) -> DirectoryLog:
    """An engine on a log of the given segments (base offset -> batches), the last one active."""
    engine = DirectoryLog(root)
    engine.create_topic("t", 1, config or {})
    directory = engine.partition_directory("t", 0)
    end = 0
    for base, batches in segments.items():
        data = b"".join(item.data for item in batches)
        (directory / f"{base:020d}.log").write_bytes(data)
        times = [(*struct.unpack_from(">q", item.data, 35), item.last - base) for item in batches]
        entry = max((each for each in times if each[1] < 2**31), default=(-1, 0))
        times_file = directory / f"{base:020d}.timeindex"
        times_file.write_bytes(struct.pack(">qi", *entry) if entry[0] > 0 else b"")
        end = max([end, base] + [item.last + 1 for item in batches])
    high_watermark = end if high_watermark is None else high_watermark
    producer_snapshot = write_producers(directory, segments.values(), high_watermark)
    with engine.transaction() as transaction:
        transaction.change_partition(
            "t",
            0,
            high_watermark=high_watermark,
            last_stable_offset=high_watermark,
            active_base=base,
            active_size=len(data),
            first_dirty_offset=first_dirty,
            producer_snapshot=producer_snapshot,
            listed_from=high_watermark,
        )
        transaction.publish(1)
    return engine
