"""Random logs to copy, and what a log holds for a comparison: batches, records, producers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.transactions.producers import ProducerEntry
from tests.builders.batch_builder import ABORT, COMMIT, BatchBuilder, BuiltBatch, marker

NOW_MS = 1_700_000_000_000
CONFIG = {"segment.bytes": "3000", "index.interval.bytes": "200", "file.delete.delay.ms": "0"}


@dataclass
class RandomBatches:
    """Batches of one partition: gaps, producers, transactions, headers, epochs, every codec."""

    draw: random.Random
    end: int = 0
    epoch: int = 0
    running: set[int] = field(default_factory=set)
    sequences: dict[int, int] = field(default_factory=dict)
    gaps: Sequence[int] = (0, 0, 0, 1, 5, 700)

    def next(self, now_ms: int) -> BuiltBatch:
        draw = self.draw
        self.end += draw.choice(self.gaps)
        self.epoch += draw.random() < 0.1
        if self.running and draw.random() < 0.4:
            producer = draw.choice(sorted(self.running))
            self.running.remove(producer)
            built = marker(
                self.end,
                draw.choice([ABORT, COMMIT]),
                producer,
                timestamp=now_ms,
                leader_epoch=self.epoch,
            )
        else:
            built = self._data(now_ms)
        self.end = built.last_offset + 1
        return built

    def _data(self, now_ms: int) -> BuiltBatch:
        draw, count = self.draw, self.draw.choice([1, 3, 30])
        producer = draw.choice([-1, -1, 1, 2, 3])
        is_transactional = producer >= 2
        sequence = -1
        if producer >= 0:
            sequence = self.sequences.get(producer, 0)
            self.sequences[producer] = sequence + count
        if is_transactional:
            self.running.add(producer)
        builder = BatchBuilder(
            base_offset=self.end,
            codec=draw.randrange(5),
            transactional=is_transactional,
            producer=(producer, 0, sequence) if producer >= 0 else (-1, -1, -1),
            leader_epoch=self.epoch,
        )
        for _ in range(count):
            builder.add(
                b"%d" % (int(draw.paretovariate(0.5)) % 300),
                None if draw.random() < 0.1 else draw.randbytes(draw.choice([0, 8, 90])),
                timestamp=now_ms - draw.randrange(1000),
                headers=[(b"h", draw.randbytes(2))] if draw.random() < 0.1 else [],
            )
        return builder.build()


def fill(
    engine: DirectoryLog, batches: RandomBatches, count: int, now_ms: int, partition: int = 0
) -> None:
    """Append some batches, several in a commit."""
    for _ in range(count):
        data = b"".join(batches.next(now_ms).data for _ in range(batches.draw.choice([1, 4])))
        engine.append_raw("t", partition, data, now_ms=now_ms)


def batches(log: Log, partition: int = 0, topic: str = "t") -> list[bytes]:
    """Return the bytes of every batch, with its offset and epoch."""
    found = []
    with log.snapshot(topic, partition) as snapshot:
        state = snapshot.state
        for chunk in snapshot.chunks(state.log_start_offset, state.high_watermark):
            for start, size in zip(chunk.table.positions, chunk.table.sizes, strict=True):
                found.append(bytes(chunk.buffer[start : start + size]))
    return found


def records(log: Log, level: str, partition: int = 0) -> dict[int, dict[str, Any]]:
    """Return all records by offset, with headers and timestamps."""
    found = log.read("t", partition, include_headers=True, isolation_level=level)
    return {row["offset"]: row for rows in found for row in rows.to_pylist()}


def latest(log: Log, partition: int = 0) -> dict[bytes, dict[str, Any]]:
    """Return the latest record of each key; a deleted key has none."""
    found: dict[bytes, dict[str, Any]] = {}
    for row in records(log, "read_committed", partition).values():
        found[row["key"]] = row
    return {key: row for key, row in found.items() if row["value"] is not None}


def producers(log: Log, partition: int = 0) -> dict[int, ProducerEntry]:
    """Return the producers at the log end."""
    found = log.producers("t", partition)
    assert found is not None
    assert found.end_offset == ends(log, partition)[2]
    return found.entries


def ends(log: Log, partition: int = 0) -> tuple[int, int, int]:
    """Return log start, last stable offset and high watermark."""
    state = log.describe("t").partitions[partition]
    return state.log_start_offset, state.last_stable_offset, state.high_watermark
