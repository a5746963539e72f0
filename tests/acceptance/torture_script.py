"""What is written to a log under torture: the same for a seed in every process, offset by offset.

A step is a commit over all partitions, a batch of a transaction, or a transaction's end. Whether a
transaction will be aborted is drawn when it begins, and what it writes then begins with `WRONG`:
whoever knows the seed knows what every offset must hold, and who must never see it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from aiokafka.partitioner import murmur2

from tests.builders.batch_builder import ABORT, COMMIT, BatchBuilder, BuiltBatch, marker

TOPIC = "torture"
PARTITIONS = 3
KEYS = 300
TOMBSTONES = 0.15
PRODUCERS = 3
WRONG = b"WRONG"

Record = tuple[bytes, bytes | None]


@dataclass
class Commit:
    """Records for `append`, which places each by its key."""

    records: list[Record]


@dataclass
class Raw:
    """A batch for `append_raw`."""

    partition: int
    batch: BuiltBatch


@dataclass
class Partition:
    """What every offset was given; None for what no reader may see."""

    visible: list[Record | None] = field(default_factory=list)
    stable: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Last stable offset at each high watermark."""
    open: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Producer -> first offset of its transaction, and whether that will be aborted."""
    sequences: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return len(self.visible)

    def settle(self) -> None:
        self.stable[self.end] = min((first for first, _ in self.open.values()), default=self.end)


class Script:
    """The steps of a seed, one after the other, and what the partitions hold after them."""

    def __init__(self, seed: int) -> None:
        self.partitions = [Partition() for _ in range(PARTITIONS)]
        self.steps = 0
        self._seed = seed

    def next(self) -> Commit | Raw:
        """Draw the next step."""
        draw = random.Random(f"{self._seed} {self.steps}")
        self.steps += 1
        if draw.random() < 0.55:
            return self._commit(draw)
        number, producer = draw.randrange(PARTITIONS), draw.randrange(PRODUCERS)
        if producer in self.partitions[number].open and draw.random() < 0.6:
            return self._end(number, producer)
        return self._transact(draw, number, producer)

    def end(self) -> list[Raw]:
        """End every transaction; nothing follows."""
        return [
            self._end(number, producer)
            for number, partition in enumerate(self.partitions)
            for producer in sorted(partition.open)
        ]

    def extend_to(self, number: int, high_watermark: int) -> Partition:
        """Take the steps until a partition is as long; the end of all is that of the log."""
        partition = self.partitions[number]
        while partition.end < high_watermark:
            self.next()
        return partition

    def _records(self, draw: random.Random, count: int) -> list[Record]:
        return [
            (
                b"key-%d" % draw.randrange(KEYS),
                None
                if draw.random() < TOMBSTONES
                else b"%d-%d " % (self.steps, n) * draw.randrange(1, 12),
            )
            for n in range(count)
        ]

    def _commit(self, draw: random.Random) -> Commit:
        step = Commit(self._records(draw, draw.randrange(1, 40)))
        for key, value in step.records:
            number = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
            self.partitions[number].visible.append((key, value))
        for partition in self.partitions:
            partition.settle()
        return step

    def _transact(self, draw: random.Random, number: int, producer: int) -> Raw:
        partition = self.partitions[number]
        base = partition.end
        _, is_aborted = partition.open.setdefault(producer, (base, draw.random() < 0.5))
        records = self._records(draw, draw.randrange(1, 9))
        if is_aborted:
            records = [(key, None if value is None else WRONG + value) for key, value in records]
        sequence = partition.sequences.get(producer, 0)
        partition.sequences[producer] = sequence + len(records)
        partition.visible += [None if is_aborted else record for record in records]
        partition.settle()
        batch = BatchBuilder(
            base_offset=base,
            transactional=True,
            producer=(producer, 0, sequence),
            leader_epoch=0,
        )
        for record in records:
            batch.add(*record, timestamp=1_000)
        return Raw(number, batch.build())

    def _end(self, number: int, producer: int) -> Raw:
        partition = self.partitions[number]
        _, is_aborted = partition.open.pop(producer)
        offset = partition.end
        partition.visible.append(None)
        partition.settle()
        kind = ABORT if is_aborted else COMMIT
        return Raw(number, marker(offset, kind, producer, timestamp=1_000))
