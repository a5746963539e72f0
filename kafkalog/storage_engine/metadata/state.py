"""The content of a log at one point of its journal; immutable, and cheap to derive.

A journal record is a change; `State.apply` returns the state after it. The invariants:

- Readers of a partition see `[log_start_offset, high_watermark)` and nothing else.
- The active segment of a partition has base `active_base` and is valid up to byte `active_size`.
- `log_start_offset <= first_dirty_offset`, `last_stable_offset <= high_watermark`.
- A deleted topic is kept by its id until its directories are gone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, lt
from types import MappingProxyType
from typing import Any, NamedTuple

from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError, UnknownTopicError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig, as_texts

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition, as the journal records it."""

    high_watermark: int = 0
    """The end of the committed records; the next append begins here."""
    active_base: int = 0
    """Base offset of the active segment."""
    active_size: int = 0
    """Its committed bytes."""
    log_start_offset: int = 0
    last_stable_offset: int = 0
    """The first offset of the first open transaction, or else the high watermark."""
    first_dirty_offset: int = 0
    """Below this offset the cleaner has left only the latest records."""
    cleaning_offset: int = 0
    """End of the last cleaning that may have been swapped in. It exceeds `first_dirty_offset` only
    during a swap, or if a process died in one."""
    leader_epoch: int = 0
    producer_snapshot: int = -1
    """Offset in the name of the `.snapshot` file with the producers at the high watermark; -1: no
    file. Appends without producer ids do not change it."""
    listed_from: int = 0
    """Below this offset, gaps are not listed: a broker wrote it, or a build of before the lists."""
    swapped_at: int = 0
    """Number of the journal record that announced the last swap of cleaned segments. A changelog
    read at an earlier record may have had records that are gone."""
    deletions_gone_to: int = 0
    """The offset after the last deletion that is gone though no later record of its key came: a
    cleaning has removed its tombstone. Where a release of before wrote the state, or a broker, it
    is not known; it is then as far as the log may have been cleaned."""

    def grown_to(
        self, high_watermark: int, last_stable_offset: int, active_base: int, active_size: int
    ) -> PartitionState:
        """Return the state after an append; `dataclasses.replace` takes three times as long."""
        return PartitionState(
            high_watermark,
            active_base,
            active_size,
            self.log_start_offset,
            last_stable_offset,
            *_rest_of(self),
        )

    def lacks_deletions_after(self, offset: int) -> bool:
        """Return whether who has followed the log up to an offset may have missed a deletion."""
        return self.deletions_gone_to > offset

    @property
    def cleaned_to(self) -> int:
        """A snapshot must not end below: the cleaner may have removed records under this offset."""
        return max(self.first_dirty_offset, self.cleaning_offset)

    def is_cleaned_beyond(self, end: int) -> bool:
        """Return whether a cleaning has gone beyond an offset, and the log start has not."""
        return self.log_start_offset <= end < self.cleaned_to


_PARTITION_FIELDS = tuple(f.name for f in dataclasses.fields(PartitionState))
_rest_of = attrgetter(*_PARTITION_FIELDS[5:])
_all_of = attrgetter(*_PARTITION_FIELDS)
_MAY_BE_NONE = {"leader_epoch", "producer_snapshot"}  # -1
_LEAST = tuple(-1 if name in _MAY_BE_NONE else 0 for name in _PARTITION_FIELDS)


def numbers(values: Iterable[Any], least: Sequence[int]) -> list[int]:
    """Return numbers of a change; raises ValueError below the least, or for more than 64 bits."""
    found = [*map(int, values)]
    if any(map(lt, found, least)) or max(found, default=0) > layout.INT64_MAX:
        raise ValueError(f"{found}: expected numbers from {[*least]} to {layout.INT64_MAX}")
    return found


def check_log_end(place: object, next_offset: int) -> None:
    """Raise StorageError if the log of a partition cannot end there: offsets have 64 bits."""
    if next_offset > layout.INT64_MAX:
        raise StorageError(
            f"{place}: expected a log end of at most {layout.INT64_MAX}, found {next_offset}: "
            "no more offsets are left; write to another partition"
        )


def check_leader_epoch(epoch: int) -> None:
    """Raise ValueError for a leader epoch that a batch cannot have."""
    if epoch > layout.INT32_MAX:
        raise ValueError(f"{epoch}: expected a leader epoch of 32 bits")


def _partition_state(values: Sequence[int]) -> PartitionState:
    found = PartitionState(*numbers(values[: len(_PARTITION_FIELDS)], _LEAST))
    check_leader_epoch(found.leader_epoch)
    if len(values) <= _PARTITION_FIELDS.index("listed_from"):  # gaps were not listed yet
        found = dataclasses.replace(found, listed_from=found.high_watermark)
    if len(values) <= _PARTITION_FIELDS.index("deletions_gone_to"):
        # A broker may have cleaned below `listed_from`, whatever its checkpoint says.
        gone_to = min(max(found.cleaned_to, found.listed_from), found.high_watermark)
        found = dataclasses.replace(found, deletions_gone_to=gone_to)
    return found


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic: its id, its overrides of Kafka's topic configs, and its partitions."""

    name: str
    topic_id: str
    config: Mapping[str, str]
    partitions: Sequence[PartitionState]
    absent: frozenset[int] = frozenset()
    """Partitions that another broker has; only their numbers exist here."""
    knows_defaults: bool = True
    """Whether a config that is not set has its default. It is False for a broker's topic: the
    broker's own defaults are in no log directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A user may send what `describe` returns to a task; partitions may be loaded on demand.
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        plain = {"config": dict(self.config), "partitions": tuple(self.partitions)}
        return _topic_of, (given | plain,)

    @property
    def delete_retention_ms(self) -> int | None:
        """How long a tombstone stays after its first cleaning; None if that is not known.

        An adoption that does not know it keeps them for ever, and the broker may have done less.
        """
        if not self.knows_defaults and "delete.retention.ms" not in self.config:
            return None
        found = TopicConfig.parse(self.config).delete_retention_ms
        if found == layout.INT64_MAX and self.knows_defaults:
            return None if any(state.listed_from for state in self.partitions) else found
        return found

    def present(self) -> Iterator[tuple[int, PartitionState]]:
        """Yield (number, state) of the partitions in this log, ascending."""
        for number, state in enumerate(self.partitions):
            if number not in self.absent:
                yield number, state

    def numbers(self) -> list[int]:
        """Return the partitions in this log, ascending; none of a broker's is loaded for it."""
        return [n for n in range(len(self.partitions)) if n not in self.absent]

    def state_or_empty(self, number: int) -> PartitionState:
        """Return a partition's state; an empty one if it is a broker's that cannot be loaded."""
        found = PartitionState()
        with files.ignoring(KafkaLogError):
            found = self.partitions[number]
        return found

    def is_here(self, number: object) -> bool:
        """Return whether the topic has a partition in this log."""
        return number in range(len(self.partitions)) and number not in self.absent

    def check_has(self, number: object) -> None:
        """Raise InvalidInputError for a partition that the topic does not have anywhere."""
        if not 0 <= whole_number("partition", number) < len(self.partitions):
            raise InvalidInputError(
                f"topic {self.name!r} has partitions 0 to {len(self.partitions) - 1}, there is no "
                f"{number}"
            )

    def check_is_here(self, number: int) -> None:
        """Raise InvalidInputError for a partition that another broker has."""
        if number in self.absent:
            raise InvalidInputError(
                f"{self.name}-{number}: the partition is not in this log, another broker has it; "
                "write to the partitions of this log"
            )


def _topic_of(given: Mapping[str, Any]) -> TopicState:
    """Return a topic that was pickled or copied, from its fields."""
    return TopicState(**{**given, "config": MappingProxyType(given["config"])})


class WriterState(NamedTuple):
    """The last batch that a writer committed."""

    batch_id: int
    rows: int
    time_ms: int
    ends: str | None = None
    """Where the sources of a query's micro-batch end (`OffsetLogEntry.ends`); None: unknown."""


class DeletedTopic(NamedTuple):
    """A deleted topic whose directories still exist; see `topic_deletion`."""

    name: str
    topic_id: str
    partitions: int
    remove_at_ms: int
    """The earliest time to remove its directories."""


@dataclass(frozen=True, slots=True)
class State:
    """The whole log at one point of the journal."""

    number: int = 0
    """Number of the journal record that led to this state."""
    time_ms: int = 0
    """The time of that record."""
    topics: Mapping[str, TopicState] = field(default_factory=dict)
    writers: Mapping[str, WriterState] = field(default_factory=dict)
    unsynced: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Partitions with bytes that a power cut could take (relaxed `flush.messages`). The value is
    the start of these bytes: base offset of the segment, and byte."""
    unsynced_rows: int = 0
    synced_ms: int = 0
    """The time of the last synced record."""
    deleting: Mapping[str, DeletedTopic] = field(default_factory=dict)
    """By topic id: deleted topics whose directories still exist."""
    forgotten_writers: Mapping[str, int] = field(default_factory=dict)
    """Writers that a user made the log forget, or whose topic was deleted, and when (epoch ms)."""

    def topic(self, name: str) -> TopicState:
        """Return a topic; raises UnknownTopicError, which lists the existing topics."""
        try:
            return self.topics[name]
        except (KeyError, TypeError):  # such as a list of names
            raise UnknownTopicError(
                f"topic {name!r} does not exist; the topics of this log are: {self.known_topics}"
            ) from None

    @property
    def known_topics(self) -> str:
        """The names of the topics, as messages list them."""
        return ", ".join(sorted(self.topics)[:20]) or "none"

    def apply(self, number: int, change: Mapping[str, Any]) -> State:
        """Return the state after a journal record; see `Change` for its form.

        Raises ValueError, TypeError, KeyError and similar for a record that no commit writes.
        """
        topics = dict(self.topics)
        deleting = dict(self.deleting) if change.get("deleting") else self.deleting
        for topic_id, deleted in change.get("deleting", EMPTY).items():
            assert isinstance(deleting, dict)
            if deleted is None:
                deleting.pop(topic_id, None)
                continue
            name, count, remove_at_ms = deleted
            topic = DeletedTopic(name, topic_id, *numbers((count, remove_at_ms), (0, 0)))
            _check_topic(name, topic_id, topic.partitions)
            deleting[topic_id] = topic
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
                MappingProxyType(as_texts(entry["config"])),
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
        forgotten = self.forgotten_writers
        if marks := change.get("forgotten_writers"):
            times = numbers(marks.values(), (0,) * len(marks))
            forgotten = {**forgotten, **dict(zip(marks, times, strict=True))}
        ends = change.get("ends", EMPTY)
        for writer, fields in change.get("writers", EMPTY).items():
            assert isinstance(writers, dict)
            if fields is None:
                writers.pop(writer, None)
            else:
                batch_id, count, at_ms = numbers(fields, (0, 0, 0))
                writers[writer] = WriterState(batch_id, count, at_ms, _ends(ends.get(writer)))
                if writer in forgotten:
                    forgotten = {name: at for name, at in forgotten.items() if name != writer}
        given = change.get("time_ms", self.time_ms), change.get("rows", 0)
        time_ms, rows = numbers(given, (0, 0))
        if "unsynced" not in change:
            return State(
                number,
                time_ms,
                topics,
                writers,
                synced_ms=time_ms,
                deleting=deleting,
                forgotten_writers=forgotten,
            )
        unsynced = dict(self.unsynced)
        for name, entries in change.get("partitions", EMPTY).items():
            for partition in map(int, entries):
                before = self.topics[name].partitions[partition]
                start = before.active_base, before.active_size
                unsynced.setdefault((name, partition), start)
        rows += self.unsynced_rows
        since = unsynced, rows, self.synced_ms
        return State(number, time_ms, topics, writers, *since, deleting, forgotten)

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
            change.writer(writer, entry)
        change.forgotten_writers.update(self.forgotten_writers)
        for deleted in self.deleting.values():
            change.deleted(deleted)
        return change.record(self.time_ms)


def _check_topic(name: str, topic_id: str, partitions: int) -> None:
    if fault := layout.topic_name_fault(name):
        raise ValueError(fault)
    if not _TOPIC_ID.fullmatch(topic_id):
        raise ValueError(f"topic {name!r}: {topic_id!r} is not a topic id")
    if not 0 < partitions <= layout.PARTITIONS_MAX:
        raise ValueError(f"topic {name!r}: {partitions} partitions")


def _ends(text: Any) -> str | None:
    if text is not None and not (isinstance(text, str) and _ENDS.fullmatch(text)):
        raise ValueError(f"{text!r}: no ends of a micro-batch")
    return text


_ENDS = re.compile(r"[0-9]{1,9}-[0-9a-f]{32}")
_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{22}")
_MERGED = frozenset({"time_ms", "rows", "partitions", "writers", "ends"})


def merge_change(change: dict[str, Any], later: Mapping[str, Any]) -> bool:
    """Merge the following change into `change`; return False, unchanged, if that is not possible.

    Applying the merged change gives the same state as applying both, and takes far less time. Only
    changes of partitions and writers can be merged.
    """
    if not (_MERGED.issuperset(change) and _MERGED.issuperset(later)):
        return False
    for name, entries in later.get("partitions", EMPTY).items():
        change.setdefault("partitions", {}).setdefault(name, {}).update(entries)
    if "writers" in later:
        change.setdefault("writers", {}).update(later["writers"])
        ends = {n: e for n, e in change.get("ends", EMPTY).items() if n not in later["writers"]}
        change["ends"] = {**ends, **later.get("ends", EMPTY)}
    if "time_ms" in later:
        change["time_ms"] = later["time_ms"]
    return True


_OF_A_CHANGE = ("topics", "partitions", "writers", "ends", "forgotten_writers", "deleting")


class Change:
    """The changes of one commit, collected while it is prepared; the journal keeps its `record`."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.partitions: dict[str, dict[str, list[int]]] = {}
        self.writers: dict[str, list[int] | None] = {}
        self.ends: dict[str, str] = {}
        self.forgotten_writers: dict[str, int] = {}
        self.deleting: dict[str, list[Any] | None] = {}

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in _OF_A_CHANGE)

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
        """Set a partition's state."""
        values = [*map(int, _all_of(state))]
        self.partitions.setdefault(topic, {})[str(partition)] = values

    def writer(self, name: str, last: WriterState) -> None:
        """Set a writer's last batch."""
        self.writers[name] = [last.batch_id, last.rows, last.time_ms]
        self.ends.pop(name, None)
        if last.ends is not None:
            self.ends[name] = last.ends

    def forget_writer(self, name: str, time_ms: int) -> None:
        """Forget a writer's last batch, and remember since when: its next one is expected."""
        self.writers[name] = None
        self.forgotten_writers[name] = time_ms

    def deleted(self, topic: DeletedTopic) -> None:
        """Delete a topic whose directories still exist."""
        self.deleting[topic.topic_id] = [topic.name, topic.partitions, topic.remove_at_ms]

    def forget(self, topic_id: str) -> None:
        """Note that the directories of a deleted topic are gone."""
        self.deleting[topic_id] = None

    def record(self, time_ms: int) -> dict[str, Any]:
        """Return the payload of a journal record."""
        content: dict[str, Any] = {"time_ms": time_ms}
        for name in _OF_A_CHANGE:
            if getattr(self, name):
                content[name] = getattr(self, name)
        return content
