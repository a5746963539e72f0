"""The two places of a log: a directory, and an object store. A rule holds in both.

What differs by nature is a named `Property` of the place, which a test asks for. The table of them
is the class `Place`. Nothing is skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

import kafkalog
from kafkalog.cleaner import CleanerConfig, PartitionStatus
from kafkalog.errors import KafkaLogError
from kafkalog.inspection.verify import verify
from kafkalog.inspection.verify_store import verify_store
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.regroup import fresh_objects, regroup
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import Cleaned, PlacedExtent
from kafkalog.storage_engine.object_store.stored_segments import segment_of, stored_segments
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.writing.copied_run import CopiedRun
from tests.builders.log_builder import NOW_MS, LogBuilder
from tests.unit.storage_engine.store_log import WithoutProbe, memory_address

DIRECTORY, OBJECTS = "directory", "objects"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Property:
    """What one place has by its nature and the other has not, and why."""

    def __init__(self, *, directory: bool, objects: bool, reason: str) -> None:
        self.has = {DIRECTORY: directory, OBJECTS: objects}
        self.reason = reason

    def __get__(self, place: Place | None, _: type[Place]) -> Any:
        return self if place is None else self.has[place.kind]


class Segment(NamedTuple):
    base_offset: int
    size: int
    """Its committed bytes."""


class Place(LogBuilder):
    """A log in a directory or in an object store, and what a test of a rule does to it."""

    def __init__(self, kind: str, where: Path | str, *, now_ms: int = NOW_MS) -> None:
        super().__init__(where, now_ms=now_ms)
        self.kind = kind
        self.where = where
        self._held = contextlib.ExitStack()

    has_pins = Property(
        directory=True,
        objects=False,
        reason="objects are immutable and stay for a while, so no reader holds a cleaning back",
    )
    has_a_lock_for_each_cleaning = Property(
        directory=True,
        objects=False,
        reason="a lock keeps also a forced cleaning away; a claim spares double work alone, and the"
        " commit log decides which of two cleanings counts",
    )
    gets_key_indexes_beside_what_stays = Property(
        directory=True,
        objects=False,
        reason="a file can be added beside a segment; an object and its side are created together",
    )
    repairs_the_first_dirty_offset = Property(
        directory=True,
        objects=False,
        reason="Kafka's checkpoint file is put right and that is told; a store has no such file",
    )
    can_be_paused = Property(
        directory=True,
        objects=False,
        reason="a pause is a lock that ends with its process, and a store has no locks",
    )
    knows_its_cleaners = Property(
        directory=True,
        objects=False,
        reason="a cleaner that runs holds a lock, and a store has no locks",
    )
    shows_who_is_at_work = Property(
        directory=True,
        objects=False,
        reason="a claim may be of a process that has died, so it proves nothing; a lock does",
    )
    keeps_what_lies_below_the_log_start = Property(
        directory=True,
        objects=False,
        reason="a segment file waits for retention; an object goes with the commit that ends it",
    )

    tells_of_commits = Property(
        directory=True,
        objects=False,
        reason="the system tells who waits that a file was written; a store has to be asked",
    )

    # --- what acts on it -------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """The engine of the log, a directory's or an object store's."""
        return self.log._log

    def other(self, *, read_only: bool = False) -> KafkaLog:
        """Open the log as another process does; it is closed with this one."""
        return self._held.enter_context(kafkalog.open(self.where, read_only=read_only))

    def anew(self, directory: Path) -> Place:
        """Return a new log of the same kind; `directory` is one that does not exist."""
        return new_place(self.kind, directory)

    def reopen(self) -> Self:
        """Close the log, and open it again."""
        self.log.close()
        self._opened = kafkalog.open(self.where)
        return self

    def settings(self, **fields: Any) -> Self:
        """Let cleanings on demand have other settings than the default ones."""
        self.log._config = CleanerConfig(**fields)
        return self

    def turn(self, now_ms: int) -> Self:
        """Do what the background cleaner does: clean what is due, then apply retention."""
        self.log.clean(now_ms=now_ms)
        return self

    def one_round(self, now_ms: int | None = None, *_: Any, **options: Any) -> Any:
        return super().one_round(now_ms, self.log._config, **options)

    def roll(self, partition: int = 0) -> Self:
        if isinstance(self.engine, ObjectLog):
            self.engine.change(
                lambda draft: draft.roll(self._topic, partition), now_ms=self._now_ms
            )
            return self
        return super().roll(partition)

    def set_state(self, *, partition: int = 0, **fields: int) -> Self:
        """Set fields of what the log's state has of a partition."""
        self.engine.change(
            lambda change: change.change_partition(self._topic, partition, **fields),
            now_ms=self._now_ms,
        )
        return self

    def append_raw(
        self, *batches: Any, partition: int = 0, end: int | None = None, now_ms: int | None = None
    ) -> Self:
        """Append finished batches v2 as a copy does; the log ends at `end`, or after the last."""
        return self.append_bytes(
            b"".join(batch.data for batch in batches), partition=partition, end=end, now_ms=now_ms
        )

    def append_bytes(
        self, data: bytes, *, partition: int = 0, end: int | None = None, now_ms: int | None = None
    ) -> Self:
        """Append the bytes of batches, as `append_raw` does."""
        found = self.engine.describe(self._topic)
        held = found.partitions[partition]
        for _, header in iterate_headers(data):
            last = header.last_offset + 1
        run = CopiedRun(
            self._topic,
            found.topic_id,
            partition,
            held.high_watermark,
            last if end is None else end,
            held.log_start_offset,
            data,
        )
        self.engine.append_copied([run], now_ms=self._time(now_ms))
        return self

    def segments_of(self, contents: dict[int, Iterable[Any]], **config: object) -> Self:
        """Create the topic with these segments (base offset -> batches), the last one active."""
        self.topic(**config)
        ends = [*contents][1:]
        for batches, end in zip(contents.values(), [*ends, None], strict=True):
            given = [*batches]
            if given:
                self.append_raw(*given, end=end, now_ms=0)
            elif end is not None:
                self.set_state(high_watermark=end, last_stable_offset=end)
            if end is not None and self.state().active_size:
                self.roll()
        assert self.bases() == [*contents]
        return self

    def regroup(self) -> Self:
        """In an object store: put what was appended into segment objects."""
        log = self.engine
        if isinstance(log, ObjectLog) and (names := fresh_objects(log.store_state())):
            regroup(log, names, now_ms=self._now_ms)
        return self

    @contextlib.contextmanager
    def at_work(self, topic: str = "t", partition: int = 0, *, now_ms: int) -> Iterator[None]:
        """Do as another cleaner that works on a partition."""
        if isinstance(self.engine, ObjectLog):
            work = f"{self.engine.describe(topic).topic_id}-{partition}"
            with ObjectLog(self.engine.address).claim(work, now_ms=now_ms) as is_mine:
                assert is_mine
                yield
        else:
            lock = self.engine.partition_directory(topic, partition) / layout.CLEANER_LOCK
            with locks.FileLock(lock).exclusive():
                yield

    # --- notes and damage ------------------------------------------------------------------------

    def note(self, name: str, topic: str = "t", partition: int = 0) -> str | None:
        """Return what a cleaner has noted of a partition: a file's content, or a commit's."""
        if isinstance(self.engine, ObjectLog):
            topic_id = self.engine.describe(topic).topic_id
            cleaned = self.engine.store_state().cleaned_of(topic_id, partition)
            return None if cleaned is None else cleaned.notes.get(name)
        path = self.engine.partition_directory(topic, partition) / name
        return path.read_text() if path.exists() else None

    def put_note(self, name: str, text: str, topic: str = "t", partition: int = 0) -> Self:
        """Note something of a partition, as a cleaner does."""
        if isinstance(self.engine, ObjectLog):
            topic_id = self.engine.describe(topic).topic_id
            held = self.engine.store_state().cleaned_of(topic_id, partition)
            held = held or Cleaned(0, self._now_ms, {})
            changed = dataclasses.replace(held, notes={**held.notes, name: text})
            self.engine.change(
                lambda draft: draft.set_cleaned(topic_id, partition, changed), now_ms=self._now_ms
            )
        else:
            (self.engine.partition_directory(topic, partition) / name).write_text(text)
        return self

    def remove_note(self, name: str, topic: str = "t", partition: int = 0) -> Self:
        """Remove what a cleaner has noted of a partition."""
        if isinstance(self.engine, ObjectLog):
            topic_id = self.engine.describe(topic).topic_id
            held = self.engine.store_state().cleaned_of(topic_id, partition)
            notes = {known: text for known, text in held.notes.items() if known != name}
            changed = dataclasses.replace(held, notes=notes)
            self.engine.change(
                lambda draft: draft.set_cleaned(topic_id, partition, changed), now_ms=self._now_ms
            )
        else:
            (self.engine.partition_directory(topic, partition) / name).unlink()
        return self

    def mark(self, reason: str = "why", topic: str = "t", *, now_ms: int, failures: int = 1) -> int:
        """Mark partition 0 as uncleanable, as a cleaner that failed; return when it is retried."""
        retry_at_ms = now_ms + (60_000 << (failures - 1))
        content = {
            "version": 1,
            "reason": reason,
            "since_ms": now_ms,
            "failures": failures,
            "retry_at_ms": retry_at_ms,
            "config": dict(self.engine.describe(topic).config),
        }
        self.put_note(layout.UNCLEANABLE, json.dumps(content), topic)
        return retry_at_ms

    def make_due(self, now_ms: int) -> Self:
        """Note that a tombstone may go now, so that a cleaning comes though nothing is dirty."""
        first_dirty = self.state().first_dirty_offset
        content = {
            "version": 1,
            "first_dirty_offset": first_dirty,
            "earliest_delete_horizon_ms": now_ms,
        }
        return self.put_note(layout.DELETE_HORIZON, json.dumps(content))

    def spoil(self, segment: int, position: int = -2, topic: str = "t") -> Callable[[], None]:
        """Flip a bit of a closed segment's bytes; return what flips it back.

        By default it is one of the last record's value. In an object store it is regrouped first.
        """
        self.regroup()
        name, data = [*self.content(topic).items()][segment]
        changed = bytearray(data)
        changed[position] ^= 1
        self.put_content(name, bytes(changed))
        return lambda: self.put_content(name, data)

    # --- what it holds ---------------------------------------------------------------------------

    def state(self, topic: str = "t", partition: int = 0) -> PartitionState:
        """Return what the log's state says of a partition."""
        found: PartitionState = self.engine.describe(topic).partitions[partition]
        return found

    def status(self, now_ms: int, topic: str = "t", partition: int = 0) -> PartitionStatus:
        """Return the status of a partition."""
        (found,) = (
            one
            for one in self.log.status(now_ms=now_ms)
            if (one.topic, one.partition) == (topic, partition)
        )
        return found

    def latest_offsets(self, topic: str = "t") -> list[int]:
        """Return the offsets of the latest records, partition by partition."""
        return [o for rows in self.log.latest(topic) for o in rows["offset"].to_pylist()]

    def findings(self) -> list[str]:
        """Return what `kafkalog verify --deep` finds."""
        if isinstance(self.engine, ObjectLog):
            return [str(found) for found in verify_store(self.engine, deep=True)]
        return [str(found) for found in verify(self.log.root, deep=True)]

    def segments(self, topic: str = "t", partition: int = 0) -> list[Segment]:
        """Return the segments of a partition, ascending, the active one last."""
        held = self.state(topic, partition)
        if isinstance(self.engine, ObjectLog):
            found = stored_segments(
                self.engine.store_state(), self.engine.describe(topic), partition
            )
            return [Segment(each.base_offset, each.size) for each in found]
        directory = self.engine.partition_directory(topic, partition)
        return [
            Segment(
                s.base_offset, held.active_size if s.base_offset == held.active_base else s.size
            )
            for s in list_segments(directory)
        ]

    def bases(self, topic: str = "t", partition: int = 0) -> list[int]:
        """Return the base offsets of the segments."""
        return [segment.base_offset for segment in self.segments(topic, partition)]

    def sizes(self, topic: str = "t", partition: int = 0) -> list[int]:
        """Return the bytes of the segments."""
        return [segment.size for segment in self.segments(topic, partition)]

    def content(self, topic: str = "t", partition: int = 0) -> dict[str, bytes]:
        """Return the bytes of the records of a partition, by the name of a file or an object."""
        if isinstance(self.engine, ObjectLog):
            names = dict.fromkeys(placed.object_name for placed in self._extents(topic, partition))
            return {name: self._object(name) for name in names}
        directory = self.engine.partition_directory(topic, partition)
        return {str(path): path.read_bytes() for path in sorted(directory.glob(f"*{layout.LOG}"))}

    def put_content(self, name: str, data: bytes) -> None:
        """Write other bytes under such a name."""
        if isinstance(self.engine, ObjectLog):
            self.engine.client.put_unique(name, data)
        else:
            Path(name).write_bytes(data)

    def remove_content(self, name: str) -> None:
        """Remove such a file or object."""
        if isinstance(self.engine, ObjectLog):
            self.engine.client.delete([name])
        else:
            Path(name).unlink()

    def everything(self) -> dict[str, bytes]:
        """Return all bytes of the log: each file or object by its name, also what is dropped."""
        if isinstance(self.engine, ObjectLog):
            return {each.name: self._object(each.name) for each in self.engine.client.list("")}
        return {str(p): p.read_bytes() for p in sorted(self.log.root.rglob("*")) if p.is_file()}

    def batches_of(self, name: str, data: bytes) -> bytes:
        """Return the batches of a file or object, without what follows them in a mixed object."""
        if not name.endswith(".mixed"):
            return data
        end = 0
        with contextlib.suppress(KafkaLogError):
            for position, header in iterate_headers(data):
                end = position + header.size
        return data[:end]

    def sections(self, suffix: str, topic: str = "t", partition: int = 0) -> list[bytes]:
        """Return an index of each segment that has it: of its file, or of the object beside it."""
        if isinstance(self.engine, ObjectLog):
            names = dict.fromkeys(
                layout.stored_side(placed.object_name)
                for placed in self._extents(topic, partition)
                if layout.is_stored_segment(placed.object_name)
            )
            return [bytes(SideObject(self.engine.client, name).section(suffix)) for name in names]
        directory = self.engine.partition_directory(topic, partition)
        return [path.read_bytes() for path in sorted(directory.glob(f"*{suffix}"))]

    def set_age(self, base_offset: int, time_ms: int) -> Self:
        """Let the file of a segment be as old as an object of that time is."""
        if not isinstance(self.engine, ObjectLog):
            directory = self.engine.partition_directory("t", 0)
            path = directory / layout.segment_file(base_offset, layout.LOG)
            files.set_times(path, time_ms * 1_000_000)
        return self

    def _extents(self, topic: str, partition: int) -> list[PlacedExtent]:
        state = self.engine.store_state()
        found = state.extents(state.log.topic(topic).topic_id, partition)
        return sorted(found, key=segment_of)

    def _object(self, name: str) -> bytes:
        found = self.engine.client.get(name)
        assert found is not None
        return bytes(found.data)

    def close(self) -> Any:
        self._held.close()
        return super().close()


def new_place(kind: str, directory: Path, **options: Any) -> Place:
    """Return a new log in a place of that kind; `directory` is one that does not exist."""
    return Place(kind, new_log(kind, directory), **options)


def new_log(kind: str, directory: Path) -> Path | str:
    """Return where a new log may be opened; in an object store it is created, unprobed."""
    if kind == DIRECTORY:
        return directory
    address = memory_address()
    CommitLog.create(WithoutProbe(address))
    return str(address)


@pytest.fixture(params=[DIRECTORY, OBJECTS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield a new log in each of both places."""
    found = new_place(request.param, tmp_path / "log")
    yield found
    found.close()


@pytest.fixture
def log(place: Place) -> KafkaLog:
    """Return what `kafkalog.open` gives for the place."""
    return place.log
