"""What rules of several files do to a log: batches of producers one by one, and waiting."""

from __future__ import annotations

import contextlib
import errno
import struct
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kafkalog.cleaner import CleanerStats
from kafkalog.errors import CommitInDoubtError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem
from tests.builders.batch_builder import ABORT, COMMIT, CONTROL, TRANSACTIONAL, Record, end_marker
from tests.unit.cleaner.naive import Batch, dump, offsets
from tests.unit.rules.places import Place
from tests.unit.storage_engine.spoiled_client import Killed, Spoil

Entry = tuple[int, int, int]
"""Producer, first offset, offset of the marker."""
KAFKAS: dict[str, Any] = {"dedupe_buffer_size": 24 * 5_000, "merge_batches": False, "spill": False}
"""The settings that make batches and rounds Kafka's own."""


class BatchByBatch:
    """A log of one partition to which each append adds one batch, also of a transaction."""

    def __init__(self, end: int = 0) -> None:
        self.end = end
        self.sequences: dict[int, int] = {}
        self.running: dict[int, int] = {}
        """Producer -> where its transaction begins."""
        self.aborted: list[Entry] = []
        self.lasts: dict[int, tuple[int, int]] = {}
        """Producer -> (last offset of its data or -1, time of what it wrote last)."""

    @abstractmethod
    def batches(self) -> list[Batch]:
        """Return what the partition holds now, batch by batch."""

    @abstractmethod
    def _add(self, batch: Batch) -> None:
        """Append a batch."""

    def data(
        self,
        *keys: int | None,
        producer: int = -1,
        transactional: bool = False,
        tombstones: bool = False,
        time: int = 0,
    ) -> None:
        """Append a batch with a record of every key; its value tells its offset."""
        records = tuple(
            Record(
                self.end + i,
                time,
                None if key is None else b"%d" % key,
                None if tombstones else b"%d" % (self.end + i),
            )
            for i, key in enumerate(keys)
        )
        sequence = -1
        if producer >= 0:
            sequence = self.sequences.get(producer, 0)
            self.sequences[producer] = sequence + len(keys)
            self.lasts[producer] = self.end + len(keys) - 1, time
        if transactional:
            self.running.setdefault(producer, self.end)
        self._append(
            Batch(
                self.end,
                self.end + len(keys) - 1,
                records,
                producer=producer,
                sequence=sequence,
                attributes=TRANSACTIONAL if transactional else 0,
            )
        )

    def transact(self, producer: int, *keys: int, time: int = 0) -> None:
        """Append a batch to the transaction of a producer."""
        self.data(*keys, producer=producer, transactional=True, time=time)

    def mark(self, producer: int, kind: int, *, time: int = 0) -> None:
        """Append a marker."""
        first = self.running.pop(producer, None)
        if first is not None and kind == ABORT:
            self.aborted.append((producer, first, self.end))
        self.lasts[producer] = self.lasts.get(producer, (-1, 0))[0], time
        self._append(
            Batch(
                self.end,
                self.end,
                (Record(self.end, time, *end_marker(kind)),),
                producer=producer,
                attributes=TRANSACTIONAL | CONTROL,
            )
        )

    def commit(self, producer: int, *, time: int = 0) -> None:
        self.mark(producer, COMMIT, time=time)

    def abort(self, producer: int, *, time: int = 0) -> None:
        self.mark(producer, ABORT, time=time)

    def _append(self, batch: Batch) -> None:
        self._add(batch)
        self.end = batch.last + 1

    def offsets(self) -> list[int]:
        return offsets(self.batches())

    def last_offsets(self) -> list[int]:
        return [batch.last for batch in self.batches()]

    def keys(self) -> list[int]:
        return [
            int(record.key or b"-1")
            for batch in self.batches()
            if not batch.attributes & CONTROL
            for record in batch.records
        ]


class Written(BatchByBatch):
    """Such a log in any place; it is cleaned with Kafka's batches and rounds."""

    def __init__(self, place: Place, end: int = 0) -> None:
        super().__init__(end)
        self.place = place.settings(**KAFKAS)

    @classmethod
    def create(cls, place: Place, **config: object) -> Written:
        return cls(place.topic(**config))

    def _add(self, batch: Batch) -> None:
        self.place.append_raw(batch, now_ms=0)

    def batches(self) -> list[Batch]:
        return dump(self.place.engine)

    def roll(self) -> None:
        self.place.roll()

    def clean(
        self, now_ms: int = 0, *, from_offset: int | None = None, **settings: Any
    ) -> CleanerStats:
        """Clean one round, due or not; `from_offset` is the first dirty offset then."""
        if from_offset is not None:
            self.place.set_state(first_dirty_offset=from_offset)
        stats = self.clean_if_any(now_ms, **settings)
        assert stats is not None
        return stats

    def clean_if_any(self, now_ms: int = 0, **settings: Any) -> CleanerStats | None:
        """Clean one round, due or not; None if there is nothing to clean."""
        place = self.place.make_due(now_ms).settings(**{**KAFKAS, **settings})
        stats: CleanerStats | None = place.one_round(now_ms)
        assert stats is None or stats.error is None, stats
        return stats

    def clean_twice(self, now_ms: int = 0, **options: int) -> None:
        """Give horizons, then come back when they are over."""
        self.clean(now_ms, **options)
        self.clean(now_ms + 86_400_001)

    @property
    def first_dirty_offset(self) -> int:
        return self.place.state().first_dirty_offset

    def indexed(self) -> list[Entry]:
        """The entries of all transaction indexes, without their last stable offsets."""
        return [
            (producer, first, last)
            for section in self.place.sections(layout.TRANSACTION_INDEX)
            for _, producer, first, last, _ in struct.iter_unpack(">hqqqq", section)
        ]


class Dead(FileSystem):
    """From the n-th change on, the disk of a process that is dead changes no more."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    def _change(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise OSError(errno.EIO, "dead")

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        self._change()
        return super().pwrite(fd, data, position)

    def ftruncate(self, fd: int, size: int) -> None:
        self._change()
        super().ftruncate(fd, size)

    def replace(self, source: Any, target: Any) -> None:
        self._change()
        super().replace(source, target)

    def unlink(self, path: Any) -> None:
        self._change()
        super().unlink(path)

    def fsync(self, fd: int) -> None:
        self._change()
        super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self._change()
        super().fdatasync(fd)


def dies_at(place: Place, step: int, act: Callable[[Place], Any]) -> bool:
    """Let a process act, and die at a step; return whether it came so far.

    A store needs `SpoiledClient` in the place of its client.
    """
    client = getattr(place.engine, "client", None)
    if client is None:
        dead = Dead(step)
        with file_system.replaced(dead), contextlib.suppress(KafkaLogError, OSError):
            act(place)
        return dead.lives < 0
    client.is_spoiled = False
    client.spoil({step + 1: Spoil.KILLED_BEFORE if step % 2 else Spoil.KILLED_AFTER})
    with contextlib.suppress(Killed, KafkaLogError, CommitInDoubtError):
        act(place)
    client.spoil({})
    return bool(client.is_spoiled)


def utc(time_ms: int) -> str:
    """Return a time as the sentences of `explain` have it."""
    return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def eventually(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
