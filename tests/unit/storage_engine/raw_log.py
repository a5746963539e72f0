"""A slow plain model of what a partition must say that has batches of many producers."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.builders.batch_builder import ABORT, BuiltBatch


def kind_of(marker: BuiltBatch) -> int:
    """Return ABORT or COMMIT."""
    return int(struct.unpack(">hh", marker.records[0].key or b"")[1])


@dataclass
class Model:
    """Every batch of a partition, our own ones as batches without producer."""

    batches: list[BuiltBatch] = field(default_factory=list)
    end: int = 0

    def add(self, batches: Iterable[BuiltBatch]) -> None:
        for batch in batches:
            assert batch.base_offset >= self.end
            self.batches.append(batch)
            self.end = batch.last_offset + 1

    def open_transactions(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for batch in self.batches:
            if batch.is_control:
                found.pop(batch.producer[0], None)
            elif batch.is_transactional:
                found.setdefault(batch.producer[0], batch.base_offset)
        return found

    @property
    def last_stable_offset(self) -> int:
        return min(self.open_transactions().values(), default=self.end)

    def aborted(self) -> list[tuple[int, int, int, int]]:
        """(producer, first offset, marker, last stable offset then) of aborted transactions."""
        found: list[tuple[int, int, int, int]] = []
        running: dict[int, int] = {}
        for batch in self.batches:
            producer = batch.producer[0]
            if not batch.is_control:
                if batch.is_transactional:
                    running.setdefault(producer, batch.base_offset)
                continue
            first = running.pop(producer, None)
            if kind_of(batch) == ABORT and first is not None:
                stable = min(running.values(), default=batch.base_offset + 1)
                found.append((producer, first, batch.base_offset, stable))
        return found

    def offsets(self, *, committed: bool) -> list[int]:
        """Offsets of the records that a reader of an isolation level gets."""
        found: list[int] = []
        for batch in self.batches:
            if batch.is_control:
                continue
            is_gone = batch.is_transactional and any(
                producer == batch.producer[0] and first <= batch.base_offset < last
                for producer, first, last, _ in self.aborted()
            )
            if committed and (is_gone or batch.base_offset >= self.last_stable_offset):
                continue
            found.extend(range(batch.base_offset, batch.last_offset + 1))
        return found

    def epochs(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for batch in self.batches:
            if batch.leader_epoch < 0 or (found and found[-1][0] == batch.leader_epoch):
                continue
            found = [entry for entry in found if entry[0] < batch.leader_epoch]
            found.append((batch.leader_epoch, batch.base_offset))
        return found

    def producers(self) -> dict[int, tuple[int, ...]]:
        """producer -> (epoch, last sequence, last offset, delta, time, coordinator, first)."""
        found: dict[int, list[int]] = {}
        for batch in self.batches:
            producer, epoch, sequence = batch.producer
            if producer < 0:
                continue
            entry = found.setdefault(producer, [-1, -1, -1, 0, -1, -1, -1])
            if entry[0] != epoch:
                entry[:4] = [epoch, -1, -1, 0]
            entry[4] = batch.max_timestamp
            if batch.is_control:
                entry[5] = struct.unpack(">hi", batch.records[0].value or b"")[1]
                entry[6] = -1
                continue
            delta = len(batch.records) - 1
            entry[1:4] = [sequence + delta, batch.last_offset, delta]
            if batch.is_transactional and entry[6] < 0:
                entry[6] = batch.base_offset
        return {producer: tuple(entry) for producer, entry in found.items()}

    def times(self) -> list[tuple[int, int]]:
        """(offset, timestamp) of every record, markers too."""
        return [
            (record.offset, record.timestamp) for batch in self.batches for record in batch.records
        ]
