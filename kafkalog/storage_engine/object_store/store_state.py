"""The content of a log in an object store after one of its commits; immutable.

It is the state that a local log has too, with its topics, partitions and writers, and the objects
that hold the records. A commit's change is that of the local journal, with these objects added.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import EMPTY, Change, State, check_leader_epoch, numbers
from kafkalog.storage_engine.object_store.failure import SweptError
from kafkalog.storage_engine.object_store.layered_map import LayeredMap
from kafkalog.storage_engine.object_store.layered_sequence import LayeredSequence

SNAPSHOT_COMMITS: Final = 500
SNAPSHOT_BYTES: Final = 8 << 20
UNKNOWN: Final = -2
"""A timestamp that an early release did not record."""
NO_SEGMENT: Final = -1
"""The segment of an extent that is one of its own: an early release wrote it."""
_EARLY: Final = (-1, UNKNOWN, NO_SEGMENT, 0)
"""The numbers that early releases did not write: gaps, first timestamp, segment, skipped."""
_LEAST: Final = (0, 0, 0, 0, 0, -1, -1, *_EARLY)
"""The least number of each field of an extent."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive record batches of one partition in an object.

    Those of a mixed object keep offsets from 0, counted from the first batch of their run. A reader
    stamps the base offset and the leader epoch.
    """

    topic_id: str
    partition: int
    position: int
    size: int
    base_offset: int
    next_offset: int
    leader_epoch: int
    max_timestamp: int
    """The largest timestamp of its batches in epoch ms; -1 for none."""
    gaps: int = 0
    """How many gaps between its offsets the side object lists; -1 if an early release wrote it."""
    first_timestamp: int = UNKNOWN
    """The largest timestamp of its first batch (epoch ms); -1 for none, UNKNOWN if not recorded."""
    segment: int = NO_SEGMENT
    """The base offset of the segment that it is in, as in a directory; see `stored_segments`."""
    skipped: int = 0
    """How many offsets of its run an earlier extent has: a segment ended within the run."""

    @property
    def run_offset(self) -> int:
        """The offset that counts as 0 in its batches, in a mixed object."""
        return self.base_offset - self.skipped

    def has_end(self, offset: int) -> bool:
        """Return whether the offset before this one is here: it has the producers at `offset`."""
        return self.base_offset < offset <= self.next_offset


@dataclass(frozen=True, slots=True)
class DataObject:
    """An object with records: its size, the commit that added it, and its extents."""

    size: int
    added_at: int
    extents: Sequence[Extent]
    side_size: int = 0
    """The size of the object with the indexes of a segment object; 0 if there is none."""
    added_ms: int = 0
    """The time of the commit that added its records (epoch ms); -1 where an early release replaced
    empty ones."""


@dataclass(frozen=True, slots=True)
class DroppedObject:
    """An object that a commit has dropped; a collector deletes it some time later."""

    number: int
    """The commit that dropped it."""
    time_ms: int
    """The time of that commit."""
    side_size: int = 0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The notes of a partition's last cleaning for the next one."""

    first_dirty_offset: int
    """Where the dirty section begins."""
    time_ms: int
    """When the cleaning ended, or failed."""
    notes: Mapping[str, str]
    """What a local cleaner keeps in small files in the partition's directory: content by name."""


def stored_names(name: str, each: DataObject | DroppedObject) -> tuple[str, ...]:
    """Return the names of the objects that an entry of the state stands for."""
    return (name, layout.stored_side(name)) if each.side_size else (name,)


class PlacedExtent(NamedTuple):
    """An extent, and the name of its object."""

    object_name: str
    extent: Extent


_Extents: TypeAlias = dict[tuple[str, int], LayeredSequence[PlacedExtent]]


def covering(extents: Sequence[PlacedExtent], start: int, end: int) -> Sequence[PlacedExtent]:
    """Return the extents, ascending, that hold offsets of [start, end)."""
    first = bisect_right(extents, start, key=lambda placed: placed.extent.next_offset)
    stop = bisect_left(extents, end, lo=first, key=lambda placed: placed.extent.base_offset)
    return extents[first:stop]


class _ExtentIndex:
    """The extents of each partition, ascending; made at the first question.

    Later states derive theirs from it, so a reader that polls sorts no extent twice.
    """

    def __init__(self) -> None:
        self._found: _Extents | None = None

    def of(
        self, objects: Mapping[str, DataObject], topic_id: str, partition: int
    ) -> Sequence[PlacedExtent]:
        """Return the extents of a partition; `objects` are those of the state."""
        if self._found is None:
            self._found = _merged({}, objects)
        return self._found.get((topic_id, partition), ())

    def after(
        self, dropped: Mapping[str, DataObject], added: Mapping[str, DataObject]
    ) -> _ExtentIndex:
        """Return the index of the state in which some objects are dropped and some added."""
        index = _ExtentIndex()
        if self._found is not None:
            found = dict(self._found)
            for place in {(e.topic_id, e.partition) for o in dropped.values() for e in o.extents}:
                kept = [each for each in found[place] if each.object_name not in dropped]
                found[place] = LayeredSequence[PlacedExtent]().extended(kept)
            index._found = _merged(found, added)
        return index


def _merged(found: _Extents, added: Mapping[str, DataObject]) -> _Extents:
    """Add the extents of objects to those of each partition."""
    new: dict[tuple[str, int], list[PlacedExtent]] = {}
    for name, each in added.items():
        for extent in each.extents:
            place = extent.topic_id, extent.partition
            new.setdefault(place, []).append(PlacedExtent(name, extent))
    for place, extents in new.items():
        extents.sort(key=_base_offset)
        known = found.get(place) or LayeredSequence()
        if known and _base_offset(extents[0]) < _base_offset(known[-1]):
            together = sorted([*known, *extents], key=_base_offset)
            found[place] = LayeredSequence[PlacedExtent]().extended(together)
        else:
            found[place] = known.extended(extents)
    return found


def _base_offset(placed: PlacedExtent) -> int:
    return placed.extent.base_offset


class StoreChange(Change):
    """The changes of one commit, with the objects that it adds and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, list[Any]] = {}
        self.dropped: list[str] = []
        self.forgotten: list[str] = []
        self.cleanings: dict[str, list[Any]] = {}
        self.swept: int | None = None

    def __bool__(self) -> bool:
        of_objects = self.objects or self.dropped or self.forgotten or self.cleanings
        return super().__bool__() or bool(of_objects or self.swept is not None)

    def add(
        self,
        name: str,
        size: int,
        extents: Sequence[Extent],
        *,
        side_size: int = 0,
        added_ms: int = 0,
    ) -> None:
        """Add an object with records; `added_ms` is that of others, whose records it has."""
        values = [size, [_values(extent) for extent in extents]]
        more = [0, side_size, added_ms] if added_ms else [0, side_size] if side_size else []
        self.objects[name] = [*values, *more]

    def drop(self, name: str) -> None:
        """Drop an object: another one has its records, or they are gone."""
        self.dropped.append(name)

    def forget_dropped(self, name: str) -> None:
        """Forget an object that was dropped: it is deleted."""
        self.forgotten.append(name)

    def clean(self, topic_id: str, partition: int, cleaned: Cleaned) -> None:
        """Set what the last cleaning of a partition has left."""
        self.cleanings[_place(topic_id, partition)] = _cleaned_values(cleaned)

    def record(self, time_ms: int) -> dict[str, Any]:
        """Return the content of a commit."""
        content = super().record(time_ms)
        for name, changed in (
            ("objects", self.objects),
            ("dropped", self.dropped),
            ("forgotten", self.forgotten),
            ("cleaned", self.cleanings),
        ):
            if changed:
                content[name] = changed
        if self.swept is not None:
            content["swept"] = self.swept
        return content


def _values(extent: Extent) -> list[Any]:
    """Return the values of an extent; a time before 1970 is missing, as for Kafka's segments."""
    largest, first = extent.max_timestamp, extent.first_timestamp
    known = dataclasses.replace(
        extent,
        max_timestamp=max(largest, layout.NO_TIMESTAMP),
        first_timestamp=layout.NO_TIMESTAMP if first < UNKNOWN else first,
    )
    return [getattr(known, name) for name in Extent.__slots__]


def _object_values(each: DataObject) -> list[Any]:
    """Return the values of an object of a snapshot."""
    extents = [_values(extent) for extent in each.extents]
    return [each.size, extents, each.added_at, each.side_size, each.added_ms]


def _object(values: Sequence[Any], number: int, time_ms: int) -> DataObject:
    """Return an object of a commit, or one of a snapshot, whose values name its commit."""
    size, extents, *rest = values
    given = (size, *rest, *(0, 0, time_ms)[len(rest) :])
    size, added_at, side_size, added_ms = numbers(given, (0, 0, 0, -1))
    found = tuple(map(_extent, extents))
    end = max((extent.position + extent.size for extent in found), default=0)
    # Only a cleaned segment may be empty.
    if size < end or not (side_size or all(extent.size for extent in found)):
        raise ValueError(f"{values}: no object")
    return DataObject(size, added_at or number, found, side_size, added_ms)


def _cleaned_values(cleaned: Cleaned) -> list[Any]:
    return [cleaned.first_dirty_offset, cleaned.time_ms, dict(cleaned.notes)]


def _cleaned(values: Sequence[Any]) -> Cleaned:
    first_dirty_offset, time_ms, notes = values
    first_dirty_offset, time_ms = numbers((first_dirty_offset, time_ms), (0, 0))
    return Cleaned(first_dirty_offset, time_ms, dict(notes))


def _dropped(values: Any, time_ms: int) -> DroppedObject:
    """Return a dropped object of a snapshot; an early release knew no time, so it is the last."""
    given = (values, time_ms) if isinstance(values, int) else values
    return DroppedObject(*numbers(given, (0, 0, 0)))


def _place(topic_id: str, partition: int) -> str:
    return f"{topic_id}-{partition}"


def _extent(values: Sequence[Any]) -> Extent:
    topic_id, *given = values
    missing = len(_LEAST) - len(given)
    if missing not in (0, 1, len(_EARLY) - 1, len(_EARLY)):
        raise ValueError(f"{values}: no extent")
    found = Extent(str(topic_id), *numbers((*given, *_EARLY[len(_EARLY) - missing :]), _LEAST))
    check_leader_epoch(found.leader_epoch)
    ends = found.base_offset < found.next_offset
    if not ends or max(found.segment, found.skipped) > found.base_offset:
        raise ValueError(f"{values}: no extent")
    return found


def _check_partitions(log: State, added: Mapping[str, DataObject]) -> None:
    """Raise IndexError for an extent of a partition that its topic does not have.

    The topic may be gone: a commit that deletes it can precede the one that adds the object.
    """
    counts = {topic.topic_id: len(topic.partitions) for topic in log.topics.values()}
    for name, each in added.items():
        for extent in each.extents:
            if extent.partition >= counts.get(extent.topic_id, layout.PARTITIONS_MAX):
                raise IndexError(f"{name}: no partition {extent.partition} of {extent.topic_id}")


@dataclass(frozen=True, slots=True)
class StoreState:
    """The whole log after one commit."""

    log: State = field(default_factory=State)
    objects: LayeredMap[DataObject] = field(default_factory=LayeredMap)
    dropped: LayeredMap[DroppedObject] = field(default_factory=LayeredMap)
    """Objects that were dropped and may not be deleted yet."""
    cleaned: LayeredMap[Cleaned] = field(default_factory=LayeredMap)
    """See `cleaned_of`."""
    swept: int = -1
    """Unreferenced objects whose writers had seen this commit, or an earlier one, are dropped."""
    fresh: int = 0
    """How many of the objects are mixed ones, which no regrouping has replaced yet."""
    forgotten: int = -1
    """The writer of no forgotten object had seen a later commit than this one."""
    bytes_since: int = 0
    """The size of the commits since a snapshot was due."""
    is_snapshot_due: bool = False
    """The writer of this commit also writes a snapshot: every reader decides so alike."""
    index: _ExtentIndex = field(default_factory=_ExtentIndex, compare=False, repr=False)

    @property
    def number(self) -> int:
        """The number of the commit that led to this state."""
        return self.log.number

    def is_before(self, name: str) -> bool:
        """Return whether the writer of an object of records had seen a later commit than this one.

        If this is the newest commit, later ones were lost, and the object may have their records.
        """
        return layout.seen_by_stored(name) > self.number

    def extents(self, topic_id: str, partition: int) -> Sequence[PlacedExtent]:
        """Return the extents of a partition with the names of their objects, ascending."""
        return self.index.of(self.objects, topic_id, partition)

    def cleaned_of(self, topic_id: str, partition: int) -> Cleaned | None:
        """Return what the last cleaning of a partition has left; None before the first."""
        return self.cleaned.get(_place(topic_id, partition))

    def apply(self, number: int, change: Mapping[str, Any], size: int) -> StoreState:
        """Return the state after a commit of `size` bytes.

        Raises ValueError, TypeError, KeyError and similar for a change that no commit makes.
        """
        if number != self.number + 1:
            raise ValueError(f"commit {number} after {self.number}")
        state = self._changed(number, change)
        since = self.bytes_since + size
        is_due = number % SNAPSHOT_COMMITS == 0 or since >= SNAPSHOT_BYTES
        return dataclasses.replace(
            state, bytes_since=0 if is_due else since, is_snapshot_due=is_due
        )

    def _changed(self, number: int, change: Mapping[str, Any]) -> StoreState:
        log = self.log.apply(number, change)
        objects, gone_objects, index = self.objects, self.dropped, self.index
        dropped = change.get("dropped", ())
        added = {}
        for name, values in change.get("objects", EMPTY).items():
            layout.seen_by_stored(name)
            added[name] = _object(values, number, log.time_ms)
        _check_partitions(log, added)
        gone = {
            name: DroppedObject(number, log.time_ms, objects[name].side_size) for name in dropped
        }
        if dropped or added:
            index = index.after({name: objects[name] for name in dropped}, added)
            objects = objects.changed(added, dropped)
        gone |= {
            name: _dropped(each, log.time_ms) for name, each in change.get("dead", EMPTY).items()
        }
        forgotten = change.get("forgotten", ())
        if gone or forgotten:
            gone_objects = gone_objects.changed(gone, forgotten)
        fresh = self.fresh + sum(not layout.is_stored_segment(name) for name in added)
        fresh -= sum(not layout.is_stored_segment(name) for name in dropped)
        cleaned = self._cleaned_after(log, change)
        given = (change.get("swept", -1), change.get("forgotten_seen", -1))
        swept, last = numbers(given, (-1, -1))
        seen = max(map(layout.seen_by_stored, forgotten), default=-1)
        swept, last = max(self.swept, swept), max(self.forgotten, seen, last)
        return StoreState(log, objects, gone_objects, cleaned, swept, fresh, last, index=index)

    def _cleaned_after(self, log: State, change: Mapping[str, Any]) -> LayeredMap[Cleaned]:
        """Return what cleanings have left, without that of the topics that a change deletes."""
        found = {place: _cleaned(each) for place, each in change.get("cleaned", EMPTY).items()}
        ended: list[str] = []
        if change.get("deleting"):
            live = {topic.topic_id for topic in log.topics.values()}
            ended = [name for name in self.cleaned if name.rpartition("-")[0] not in live]
        return self.cleaned.changed(found, ended) if found or ended else self.cleaned

    def time_of(self, placed: PlacedExtent) -> int:
        """Return an extent's largest timestamp, or without one when its object was added (ms).

        A directory then takes the file's time, also for a segment without a batch.
        """
        largest = placed.extent.max_timestamp
        return largest if largest >= 0 else self.objects[placed.object_name].added_ms

    def check_unswept(self, change: Mapping[str, Any]) -> None:
        """Raise SweptError for a new object that a sweep has dropped."""
        for name in change.get("objects", EMPTY):
            if layout.seen_by_stored(name) <= self.swept:
                raise SweptError(
                    f"{name}: the object is older than a sweep, which may delete it (expected a "
                    f"writer that has seen commit {self.swept + 1}). Run the batch again."
                )

    def snapshot(self) -> dict[str, Any]:
        """Return the content of a snapshot, from which `of_snapshot` makes this state."""
        return {
            **self.log.snapshot(),
            "objects": {name: _object_values(each) for name, each in self.objects.items()},
            "dead": {
                name: [each.number, each.time_ms, each.side_size]
                for name, each in self.dropped.items()
            },
            "cleaned": {place: _cleaned_values(each) for place, each in self.cleaned.items()},
            "swept": self.swept,
            "forgotten_seen": self.forgotten,
        }

    @classmethod
    def of_snapshot(cls, number: int, content: Mapping[str, Any]) -> StoreState:
        """Return the state that a snapshot holds; raises as `apply` does."""
        return cls()._changed(number, content)
