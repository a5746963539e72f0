"""Batches of many producers, and a slow plain model of what a partition that has them must say."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.unit.storage_engine import naive

TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = 0, 1


@dataclass(frozen=True)
class RawBatch:
    """A batch as a broker would have it; `marker` is ABORT or COMMIT for a control batch."""

    base: int
    values: tuple[int, ...] = (0,)
    """Timestamps of its records; the offset deltas are 0, 1, ..."""
    producer: int = -1
    epoch: int = 0
    sequence: int = 0
    transactional: bool = False
    marker: int | None = None
    leader_epoch: int = 0
    coordinator_epoch: int = 7
    value_size: int = 1
    keyless: bool = False

    @property
    def last(self) -> int:
        return self.base + len(self.values) - 1

    def data(self) -> bytes:
        attributes = (TRANSACTIONAL * self.transactional) | (CONTROL * (self.marker is not None))
        if self.marker is None:
            records = [
                naive.Record(
                    self.base + i,
                    time,
                    None if self.keyless else b"%d" % (i % 3),
                    b"v" * self.value_size,
                )
                for i, time in enumerate(self.values)
            ]
        else:
            value = struct.pack(">hi", 0, self.coordinator_epoch)
            key = struct.pack(">hh", 0, self.marker)
            records = [naive.Record(self.base, self.values[0], key, value)]
        has_producer = self.producer >= 0
        sequence = self.sequence if has_producer and self.marker is None else -1
        return naive.batch(
            records,
            base_offset=self.base,
            attributes=attributes,
            leader_epoch=self.leader_epoch,
            producer=(self.producer, self.epoch if has_producer else -1, sequence),
        )


def marker(base: int, kind: int, producer: int, *, time: int = 0, epoch: int = 0) -> RawBatch:
    return RawBatch(base, (time,), producer=producer, epoch=epoch, transactional=True, marker=kind)


def joined(batches: Iterable[RawBatch]) -> bytes:
    return b"".join(batch.data() for batch in batches)


@dataclass
class Model:
    """Every batch of a partition, our own ones as batches without producer."""

    batches: list[RawBatch] = field(default_factory=list)
    end: int = 0

    def add(self, batches: Iterable[RawBatch]) -> None:
        for batch in batches:
            assert batch.base >= self.end
            self.batches.append(batch)
            self.end = batch.last + 1

    def open_transactions(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for batch in self.batches:
            if batch.marker is not None:
                found.pop(batch.producer, None)
            elif batch.transactional:
                found.setdefault(batch.producer, batch.base)
        return found

    @property
    def last_stable_offset(self) -> int:
        return min(self.open_transactions().values(), default=self.end)

    def aborted(self) -> list[tuple[int, int, int, int]]:
        """(producer, first offset, marker, last stable offset then) of aborted transactions."""
        found: list[tuple[int, int, int, int]] = []
        running: dict[int, int] = {}
        for batch in self.batches:
            if batch.marker is None:
                if batch.transactional:
                    running.setdefault(batch.producer, batch.base)
                continue
            first = running.pop(batch.producer, None)
            if batch.marker == ABORT and first is not None:
                stable = min(running.values(), default=batch.base + 1)
                found.append((batch.producer, first, batch.base, stable))
        return found

    def offsets(self, *, committed: bool) -> list[int]:
        """Offsets of the records that a reader of an isolation level gets."""
        found: list[int] = []
        for batch in self.batches:
            if batch.marker is not None:
                continue
            is_gone = batch.transactional and any(
                producer == batch.producer and first <= batch.base < last
                for producer, first, last, _ in self.aborted()
            )
            if committed and (is_gone or batch.base >= self.last_stable_offset):
                continue
            found.extend(range(batch.base, batch.last + 1))
        return found

    def epochs(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for batch in self.batches:
            if batch.leader_epoch < 0 or (found and found[-1][0] == batch.leader_epoch):
                continue
            found = [entry for entry in found if entry[0] < batch.leader_epoch]
            found.append((batch.leader_epoch, batch.base))
        return found

    def producers(self) -> dict[int, tuple[int, ...]]:
        """producer -> (epoch, last sequence, last offset, delta, time, coordinator, first)."""
        found: dict[int, list[int]] = {}
        for batch in self.batches:
            if batch.producer < 0:
                continue
            entry = found.setdefault(batch.producer, [-1, -1, -1, 0, -1, -1, -1])
            if entry[0] != batch.epoch:
                entry[:4] = [batch.epoch, -1, -1, 0]
            entry[4] = max(batch.values)
            if batch.marker is not None:
                entry[5] = batch.coordinator_epoch
                entry[6] = -1
                continue
            delta = len(batch.values) - 1
            entry[1:4] = [batch.sequence + delta, batch.last, delta]
            if batch.transactional and entry[6] < 0:
                entry[6] = batch.base
        return {producer: tuple(entry) for producer, entry in found.items()}

    def times(self) -> list[tuple[int, int]]:
        """(offset, timestamp) of every record, markers too."""
        return [
            (batch.base + i, time) for batch in self.batches for i, time in enumerate(batch.values)
        ]
