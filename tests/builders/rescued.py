"""A directory with `orders-<n>/*.log` alone, as it is rescued from a disk; aiokafka encodes it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp

TOPIC: Final = "orders"
BASE_MS: Final = 1_700_000_000_000
BATCH: Final = 10
"""Records in a batch."""


def rescued(root: Path) -> list[tuple[int, int, bytes, bytes | None]]:
    """Write a partition of two segments per codec; return (partition, offset, key, value)."""
    written = []
    for partition, codec in enumerate(layout.CODECS.values()):
        directory = root / f"{TOPIC}-{partition}"
        directory.mkdir(parents=True)
        rows = [
            (offset, b"key-%d" % (offset % 7), None if offset % 5 == 4 else b"value %d" % offset)
            for offset in range(4 * BATCH)
        ]
        for base in (0, 2 * BATCH):
            batches = (_batch(rows[start : start + BATCH], codec) for start in (base, base + BATCH))
            (directory / f"{base:020}.log").write_bytes(b"".join(batches))
        written += [(partition, *row) for row in rows]
    return written


def _batch(rows: list[tuple[int, bytes, bytes | None]], codec: int) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    first = rows[0][0]
    for offset, key, value in rows:
        assert builder.append(offset - first, BASE_MS + offset, key, value, [])
    batch = bytearray(builder.build())
    stamp(batch, 0, first, 0)
    return bytes(batch)
