"""What a log consists of at one point of its journal: immutable, and cheap to derive from the last.

A journal record is a change; `State.apply` gives the state after it. The invariants:

- a partition's readers see `[log_start_offset, high_watermark)` and nothing else;
- its active segment is the one with base `active_base`, and is valid up to byte `active_size`;
- `log_start_offset <= first_dirty_offset`, `last_stable_offset <= high_watermark`;
- a topic that was deleted is remembered by its id until its directories are gone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.format import layout

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition, as the journal has it."""

    high_watermark: int = 0
    """The end of what is committed; the next append begins here."""
    active_base: int = 0
    """Base offset of the segment that is appended to."""
    active_size: int = 0
    """Bytes of it that are committed."""
    log_start_offset: int = 0
    last_stable_offset: int = 0
    """The end of what no open transaction holds back."""
    first_dirty_offset: int = 0
    """The cleaner has brought everything below this offset to its latest records."""
    cleaning_offset: int = 0
    """End of the last cleaning that may have been swapped in; above `first_dirty_offset` only
    while one is, or was when a process died."""
    leader_epoch: int = 0
    producer_snapshot: int = -1
    """Offset in the name of the `.snapshot` file that tells the state of the partition's producers
    at its high watermark; -1 when it has none. Appends without producer ids leave it as it is."""
    listed_from: int = 0
    """Below it a broker wrote the log, and nobody has listed where offsets have gaps."""
    swapped_at: int = 0
    """Number of the journal record that announced the last swap of cleaned segments. A changelog
    that was read at an older record may have had records that are gone."""

    @property
    def cleaned_to(self) -> int:
        """A view must not end below this offset: records under it may be gone for newer ones."""
        return max(self.first_dirty_offset, self.cleaning_offset)


_PARTITION_FIELDS = tuple(f.name for f in dataclasses.fields(PartitionState))


def _partition_state(values: Sequence[int]) -> PartitionState:
    """Return what a record says of a partition; raises ValueError for what is no offset."""
    fields = [int(value) for value in values[: len(_PARTITION_FIELDS)]]
    if fields and not -1 <= min(fields) <= max(fields) <= layout.INT64_MAX:
        raise ValueError(f"{fields}: expected numbers from -1 to {layout.INT64_MAX}")
    found = PartitionState(*fields)
    if found.leader_epoch > layout.INT32_MAX:
        raise ValueError(f"{found.leader_epoch}: expected a leader epoch of 32 bits")
    return found


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic: its id, its overrides of Kafka's topic configs, and its partitions."""

    name: str
    topic_id: str
    config: Mapping[str, str]
    partitions: Sequence[PartitionState]
    absent: frozenset[int] = frozenset()
    """Partitions that another broker has: their number counts, nothing else of them is here."""

    def present(self) -> Iterator[tuple[int, PartitionState]]:
        """Yield (number, state) of the partitions that are here, ascending."""
        for number, state in enumerate(self.partitions):
            if number not in self.absent:
                yield number, state

    def check_is_here(self, number: int) -> None:
        """Raise InvalidInputError for a partition that another broker has."""
        if number in self.absent:
            raise InvalidInputError(
                f"{self.name}-{number}: the partition is not in this log, another broker has it; "
                "write to those that are here"
            )


@dataclass(frozen=True, slots=True)
class WriterState:
    """The last batch that a writer committed."""

    batch_id: int
    rows: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class DeletedTopic:
    """A topic that is gone, and whose directories are not yet: see `topic_deletion`."""

    name: str
    topic_id: str
    partitions: int
    remove_at_ms: int
    """When its directories may be removed."""


@dataclass(frozen=True, slots=True)
class State:
    """The whole log at one point of the journal."""

    number: int = 0
    """Number of the journal record this state follows."""
    time_ms: int = 0
    """When that record was written."""
    topics: Mapping[str, TopicState] = field(default_factory=dict)
    writers: Mapping[str, WriterState] = field(default_factory=dict)
    unsynced: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Partitions with bytes that a power cut could take (relaxed `flush.messages`), each with where
    these begin: the base offset of the segment, and the byte."""
    unsynced_rows: int = 0
    synced_ms: int = 0
    """When the last synced record was written."""
    deleting: Mapping[str, DeletedTopic] = field(default_factory=dict)
    """By topic id: deleted topics whose directories are not removed yet."""

    def topic(self, name: str) -> TopicState:
        """Return a topic; raises UnknownTopicError, which lists the topics there are."""
        try:
            return self.topics[name]
        except KeyError:
            known = ", ".join(sorted(self.topics)[:20]) or "none"
            raise UnknownTopicError(
                f"topic {name!r} does not exist; the topics of this log are: {known}"
            ) from None

    def apply(self, number: int, change: Mapping[str, Any]) -> State:
        """Return the state after a journal record: see `Change` for its form.

        Raises ValueError, TypeError, KeyError and their like for a record that no commit writes.
        """
        topics = dict(self.topics)
        deleting = dict(self.deleting) if change.get("deleting") else self.deleting
        for topic_id, deleted in change.get("deleting", EMPTY).items():
            assert isinstance(deleting, dict)
            if deleted is None:
                deleting.pop(topic_id, None)
                continue
            name, count, remove_at_ms = deleted
            _check_topic(name, topic_id, int(count))
            deleting[topic_id] = DeletedTopic(name, topic_id, int(count), int(remove_at_ms))
            if name in topics and topics[name].topic_id == topic_id:
                del topics[name]
        for name, entry in change.get("topics", EMPTY).items():
            known = topics.get(name)
            partitions = tuple(known.partitions) if known else ()
            _check_topic(name, str(entry["id"]), int(entry["partitions"]))
            missing = int(entry["partitions"]) - len(partitions)
            topics[name] = TopicState(
                name,
                str(entry["id"]),
                MappingProxyType(dict(entry["config"])),
                partitions + (PartitionState(),) * missing,
                frozenset(map(int, entry.get("absent", ()))),
            )
        for name, entries in change.get("partitions", EMPTY).items():
            known = topics[name]
            changed = list(known.partitions)
            for partition, values in entries.items():
                if not 0 <= int(partition) < len(changed):
                    raise IndexError(f"partition {partition} of {len(changed)} of topic {name!r}")
                changed[int(partition)] = _partition_state(values)
            topics[name] = TopicState(
                name, known.topic_id, known.config, tuple(changed), known.absent
            )
        writers = dict(self.writers) if change.get("writers") else self.writers
        for writer, fields in change.get("writers", EMPTY).items():
            assert isinstance(writers, dict)
            if fields is None:
                writers.pop(writer, None)
            else:
                writers[writer] = WriterState(*map(int, fields))
        time_ms = int(change.get("time_ms", self.time_ms))
        if "unsynced" not in change:
            return State(number, time_ms, topics, writers, synced_ms=time_ms, deleting=deleting)
        unsynced = dict(self.unsynced)
        for name, entries in change.get("partitions", EMPTY).items():
            for partition in map(int, entries):
                before = self.topics[name].partitions[partition]
                start = before.active_base, before.active_size
                unsynced.setdefault((name, partition), start)
        rows = self.unsynced_rows + int(change.get("rows", 0))
        return State(number, time_ms, topics, writers, unsynced, rows, self.synced_ms, deleting)

    def snapshot(self) -> dict[str, Any]:
        """Return the one change that leads from an empty log to this state."""
        change = Change()
        for topic in self.topics.values():
            count = len(topic.partitions)
            change.topic(topic.name, topic.topic_id, count, topic.config, topic.absent)
            for partition, state in enumerate(topic.partitions):
                if state != PartitionState():
                    change.partition(topic.name, partition, state)
        for writer, entry in self.writers.items():
            change.writers[writer] = [entry.batch_id, entry.rows, entry.time_ms]
        for deleted in self.deleting.values():
            change.deleted(deleted)
        return change.record(self.time_ms)


def _check_topic(name: str, topic_id: str, partitions: int) -> None:
    """Raise ValueError for an id that is no topic's, and for more directories than are made."""
    if not _TOPIC_ID.fullmatch(topic_id):
        raise ValueError(f"topic {name!r}: {topic_id!r} is no topic id")
    if not 0 < partitions <= layout.PARTITIONS_MAX:
        raise ValueError(f"topic {name!r}: {partitions} partitions")


_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{22}")
_MERGED = frozenset({"time_ms", "rows", "partitions", "writers"})


def merge_change(change: dict[str, Any], later: Mapping[str, Any]) -> bool:
    """Add to a change the one that follows it; False, and nothing done, where that is no sum.

    `State.apply` of the sum gives what applying both gives, at a fraction of the time. Only changes
    of partitions and writers have one.
    """
    if not (_MERGED.issuperset(change) and _MERGED.issuperset(later)):
        return False
    for name, entries in later.get("partitions", EMPTY).items():
        change.setdefault("partitions", {}).setdefault(name, {}).update(entries)
    if "writers" in later:
        change.setdefault("writers", {}).update(later["writers"])
    if "time_ms" in later:
        change["time_ms"] = later["time_ms"]
    return True


class Change:
    """What one commit changes, gathered while it is prepared; the journal keeps its `record`."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.partitions: dict[str, dict[str, list[int]]] = {}
        self.writers: dict[str, list[int] | None] = {}
        self.deleting: dict[str, list[Any] | None] = {}

    def __bool__(self) -> bool:
        return bool(self.topics or self.partitions or self.writers or self.deleting)

    def topic(
        self,
        name: str,
        topic_id: str,
        partitions: int,
        config: Mapping[str, str],
        absent: Iterable[int] = (),
    ) -> None:
        """Create a topic, or change its config."""
        self.topics[name] = {"id": topic_id, "partitions": partitions, "config": dict(config)}
        if absent:
            self.topics[name]["absent"] = sorted(absent)

    def partition(self, topic: str, partition: int, state: PartitionState) -> None:
        """Give a partition a new state."""
        values = [int(getattr(state, name)) for name in _PARTITION_FIELDS]
        self.partitions.setdefault(topic, {})[str(partition)] = values

    def deleted(self, topic: DeletedTopic) -> None:
        """Delete a topic; its directories are still there."""
        self.deleting[topic.topic_id] = [topic.name, topic.partitions, topic.remove_at_ms]

    def forget(self, topic_id: str) -> None:
        """Say that the directories of a deleted topic are gone."""
        self.deleting[topic_id] = None

    def record(self, time_ms: int) -> dict[str, Any]:
        """Return the payload of a journal record."""
        content: dict[str, Any] = {"time_ms": time_ms}
        for name in ("topics", "partitions", "writers", "deleting"):
            if getattr(self, name):
                content[name] = getattr(self, name)
        return content
