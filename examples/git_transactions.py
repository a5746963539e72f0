"""Transactions of two other producers of the topic; one of them writes wrong values and aborts.

Between two runs of the stream the producers append batches as a broker would store them. The honest
one writes the latest values of paths once more, and commits. The lying one writes wrong records
(another blob, a deletion, a path that never existed), and aborts. It aborts at once in some
partitions, and after the next micro-batches in others. No reader may ever see its records.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from crc32c import crc32c

if TYPE_CHECKING:
    from kafkalog.log import KafkaLog

__all__ = ["Transactions"]

RECORDS_PER_PARTITION: Final = 200
HONEST, LYING = 7, 8
"""The producers' ids."""
ABORT, COMMIT = 0, 1
WRONG: Final = b'{"mode":"000000","blob":"wrong","commit":"wrong","time":0}'
NO_PATH: Final = b"a path that no commit has ever had"
Row = tuple[bytes, bytes | None]


class Transactions:
    """Writes transactions into a topic, and counts them."""

    def __init__(self, log: KafkaLog, topic: str) -> None:
        self.offsets = 0
        """Offsets taken: of records, and one for each marker."""
        self.ended = {"committed": 0, "aborted": 0}
        self._log, self._topic = log, topic
        self._running: set[int] = set()
        """Partitions in which the lying producer has not ended its transaction."""
        self._sequences: Counter[tuple[int, int]] = Counter()

    def run(self, *, is_last: bool) -> None:
        """End open transactions, then repeat and lie; with `is_last` no transaction stays open.

        No other writer may run meanwhile, or the repeated values would be older than those they
        follow.
        """
        self._abort()
        for partition, rows in self._latest().items():
            lies: list[Row] = [
                (key, None if number % 3 == 0 else WRONG) for number, (key, _) in enumerate(rows)
            ]
            self._write(LYING, partition, [*lies, (NO_PATH, WRONG)])
            self._running.add(partition)
            self._write(HONEST, partition, rows)
            self._mark(HONEST, partition, COMMIT)
        self._abort([p for p in self._running if is_last or p % 2 == 0])

    def figures(self) -> dict[str, int]:
        """Return the counts, for the report."""
        return {**self.ended, "offsets": self.offsets}

    def _latest(self) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = {}
        for batch in self._log.latest(self._topic):
            columns = (batch[name].to_pylist() for name in ("partition", "key", "value"))
            for partition, key, value in zip(*columns, strict=True):
                rows = found.setdefault(partition, [])
                if len(rows) < RECORDS_PER_PARTITION:
                    rows.append((key, value))
        return found

    def _abort(self, partitions: list[int] | None = None) -> None:
        for partition in sorted(self._running if partitions is None else partitions):
            self._mark(LYING, partition, ABORT)
            self._running.remove(partition)

    def _write(self, producer: int, partition: int, rows: list[Row]) -> None:
        sequence = self._sequences[producer, partition]
        self._sequences[producer, partition] += len(rows)
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=0,
            is_transactional=1,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequence,
            batch_size=1 << 20,
        )
        for number, (key, value) in enumerate(rows):
            assert builder.append(number, _now_ms(), key, value, [])
        self._append(partition, bytes(builder.build()), len(rows))

    def _mark(self, producer: int, partition: int, kind: int) -> None:
        self._append(partition, marker(producer, kind, _now_ms()), 1)
        self.ended["committed" if kind == COMMIT else "aborted"] += 1

    def _append(self, partition: int, batch: bytes, count: int) -> None:
        """Append a batch with its base offset and leader epoch, which lie outside its checksum."""
        _, end = self._log.offsets(self._topic)[partition]
        placed = struct.pack(">q", end) + batch[8:12] + struct.pack(">i", 0) + batch[16:]
        self._log.append_raw(self._topic, partition, placed)
        self.offsets += count


def marker(producer: int, kind: int, now_ms: int) -> bytes:
    """Return a control batch that ends a producer's transaction; only brokers write these."""
    key, value = struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0)
    body = b"\0\0\0" + _sized(key) + _sized(value) + b"\0"
    transactional_and_control = 0x30
    checked = struct.pack(
        ">hiqqqhii", transactional_and_control, 0, now_ms, now_ms, producer, 0, -1, 1
    )
    checked += _sized(body)
    return struct.pack(">qiibI", 0, len(checked) + 9, 0, 2, crc32c(checked)) + checked


def _sized(data: bytes) -> bytes:
    return bytes([2 * len(data)]) + data  # a varint of the small size, then the bytes


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
