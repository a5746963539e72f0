"""Read where the groups of consumers were, from Kafka's own topics.

`__consumer_offsets` has what classic, consumer and streams groups committed, and which groups there
are. `__share_group_state` has the start offsets of share groups. A group lies in one partition of
each, by the hash of its name. A partition that is not here, or is damaged, costs its own groups.

The tests compare the result with what kafka-consumer-groups prints.

Kafka: GroupCoordinatorService, GroupCoordinatorRecordSerde, ShareCoordinatorShard; KIP-848,
KIP-932, KIP-1071.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.errors import (
    CorruptLogError,
    CorruptRecordError,
    InvalidInputError,
    KafkaLogError,
    StorageError,
    UnknownGroupError,
)
from kafkalog.inspection.consumer_group import ConsumerGroup, GroupPosition, GroupType
from kafkalog.inspection.coordinator_records import CoordinatorRecord, CoordinatorReplay
from kafkalog.storage_engine.broker.broker_directory import derived_id
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.message import Message, read_key, read_value, record_name

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import TopicState

_LEGACY: Final = (0).to_bytes(2, "big")
_COMMIT: Final = (1).to_bytes(2, "big")
_SNAPSHOT: Final = (0).to_bytes(2, "big")
_UPDATE: Final = (1).to_bytes(2, "big")
_TYPES: Final = {
    "ConsumerGroupMetadata": GroupType.CONSUMER,
    "ShareGroupMetadata": GroupType.SHARE,
    "StreamsGroupMetadata": GroupType.STREAMS,
}
"""What the record says that each group of a type has."""
_MEMBERS: Final = (
    "ConsumerGroupMemberMetadata",
    "ShareGroupMemberMetadata",
    "StreamsGroupMemberMetadata",
)
_POSITIONS: Final = {"OffsetCommit", "ShareSnapshot", "ShareUpdate"}
"""The records without which a position is not known."""
_WANTED: Final = {
    "OffsetCommit",
    "LegacyOffsetCommit",
    "GroupMetadata",
    "ShareGroupStatePartitionMetadata",
    *_TYPES,
    *_MEMBERS,
}
"""The records that say something about positions, types and members."""
_EARLIEST: Final = -2
_NAMED: Final = 5
"""Groups that an error names."""


@dataclass(slots=True)
class Groups:
    """The groups of a log or a broker's disk, by name, and what could not be read of them."""

    by_name: dict[str, ConsumerGroup] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    """Records of types that this release does not know, by type and topic."""
    damage: list[KafkaLogError] = field(default_factory=list)
    """The partitions and the records that cannot be read."""
    unreadable: dict[str, KafkaLogError] = field(default_factory=dict)
    """The last one for each group whose positions are not all known."""
    notices: list[str] = field(default_factory=list)
    """Which partitions are not here."""

    def named(self, name: str, place: object) -> ConsumerGroup:
        """Return a group; raises UnknownGroupError, which says what may hide it."""
        found = self.by_name.get(name)
        if found is not None:
            return found
        names = sorted(self.by_name)
        shown = ", ".join(map(repr, names[:_NAMED]))
        shown += " and others" if len(names) > _NAMED else ""
        hidden = [*map(str, self.damage), *self.notices]
        raise UnknownGroupError(
            f"{place}: no group {name!r} (expected one of those here, found "
            f"{shown or 'none'}).{''.join(f' {text}.' for text in hidden)} "
            "List the groups: kafkalog groups PATH."
        )


def group_offsets(
    path: str | Path | Sequence[str | Path],
    group: str,
    *,
    options: Mapping[str, str] | None = None,
) -> dict[str, dict[int, int]]:
    """Return where a group stopped: `{topic: {partition: offset of the next record}}`.

    Written as JSON, it fits Spark's `startingOffsets`. If the group has no position in a partition
    of such a topic, the partition gets -2, the earliest offset: no record is missed. A committed
    offset below 0 doesn't count. As `path`, give a broker's directory or a list of those of a
    cluster, an adopted log, or a log with a copy of `__consumer_offsets`. The `options` are those
    of `kafkalog.open`. A commit in a transaction counts once the transaction is committed. Raises
    UnknownGroupError, and InvalidInputError for a share group, whose members acknowledge single
    records. Raises CorruptLogError or StorageError if a position of the group cannot be read.
    Kafka: Admin.listConsumerGroupOffsets.
    """
    from kafkalog.storage_engine.place import open_log

    with open_log(path, read_only=True, create=False, options=options) as log:
        groups = read_groups(log)
        topics = log.state().topics
        if group in groups.unreadable:
            raise groups.unreadable[group]
        found = groups.named(group, log.root)
        if found.type is GroupType.SHARE:
            raise InvalidInputError(
                f"{log.root}: {group!r} is a share group, which has no positions (expected a group "
                f"that commits offsets). Its start offsets: kafkalog groups {log.root} {group}."
            )
        offsets: dict[str, dict[int, int]] = {}
        for position in found.positions:
            if position.topic not in offsets:
                count = len(topics[position.topic].partitions) if position.topic in topics else 0
                offsets[position.topic] = dict.fromkeys(range(count), _EARLIEST)
            offsets[position.topic][position.partition] = position.offset
    return offsets


def read_groups(log: ReadableLog) -> Groups:
    """Return the groups of a log, and what is not known of them.

    Memory holds the latest record of each key of one partition. Raises InvalidInputError if none of
    the topics that have groups is here, and StorageError.
    """
    source = log.with_internal_topics()
    topics = source.state().topics
    if not {layout.GROUPS_TOPIC, layout.SHARE_STATE_TOPIC} & topics.keys():
        raise InvalidInputError(
            f"{log.root}: no topic {layout.GROUPS_TOPIC}, which has the groups' positions (found "
            f"the topics {', '.join(log.state().topics) or 'none'}). Give the directories of "
            "all the brokers, with commas between."
        )
    reading = _Reading(source, _Ends(log))
    for topic in (layout.GROUPS_TOPIC, layout.SHARE_STATE_TOPIC):
        if topic in topics:
            reading.read(topics[topic])
    reading.note_other_ids()
    found = reading.groups
    for group in found.by_name.values():
        group.positions.sort(key=lambda position: (position.topic, position.partition))
    found.by_name = dict(sorted(found.by_name.items()))
    found.damage += reading.ends.faults
    return found


class _Ends:
    """The ends of partitions, and the names of topics by id."""

    def __init__(self, log: ReadableLog) -> None:
        self._topics = log.state().topics
        self.ids = {topic.name: topic.topic_id for topic in self._topics.values()}
        self.names: Mapping[str, str] = {topic_id: name for name, topic_id in self.ids.items()}
        self.faults: list[KafkaLogError] = []
        self._known: dict[tuple[str, int], int | None] = {}

    def of(self, topic: str, partition: int) -> int | None:
        """Return the high watermark; None if the partition is not here, or cannot be read."""
        key = topic, partition
        if key not in self._known:
            self._known[key] = self._find(topic, partition)
        return self._known[key]

    def _find(self, topic: str, partition: int) -> int | None:
        known = self._topics.get(topic)
        if known is None or partition not in range(len(known.partitions)):
            return None
        if partition in known.absent:
            return None
        try:
            return known.partitions[partition].high_watermark
        except (CorruptLogError, StorageError) as fault:
            self.faults.append(fault)
            return None


class _Reading:
    """Read the groups of one place."""

    def __init__(self, source: ReadableLog, ends: _Ends) -> None:
        self.groups = Groups()
        self.ends = ends
        self._source = source
        self._sharing: dict[str, str] = {}
        """The names of topics by id that share groups know."""
        self._committed_ids: dict[str, set[str]] = {}
        """The ids of topics that commits name."""

    def read(self, topic: TopicState) -> None:
        absent = sorted(topic.absent)
        if absent:
            shown = ", ".join(map(str, absent[:_NAMED])) + (", ..." if absent[_NAMED:] else "")
            self.groups.notices.append(
                f"{self._source.root}: of {len(topic.partitions)} partitions of {topic.name} "
                f"{len(absent)} are not here ({shown}), nor are their groups"
            )
        for partition in range(len(topic.partitions)):
            if partition in topic.absent:
                continue
            replay = CoordinatorReplay(
                lambda number: record_name(topic.name, number) in _WANTED, _as_commit
            )
            if topic.name == layout.SHARE_STATE_TOPIC:
                replay = CoordinatorReplay(lambda number: True)
            try:
                with self._source.snapshot(topic.name, partition) as snapshot:
                    replay.replay(snapshot)
            except (CorruptLogError, StorageError) as fault:
                self._leave_out(topic.name, replay, fault)
                continue
            for number, count in replay.seen.items():
                if number is None or record_name(topic.name, number) is None:
                    what = "without a type" if number is None else f"of type {number}"
                    self.groups.unknown[f"{what} in {topic.name}"] += count
            place = f"{self._source.root}: {topic.name}-{partition}"
            if topic.name == layout.SHARE_STATE_TOPIC:
                self._share_states(place, replay.latest)
            else:
                for key, record in replay.latest.items():
                    self._record(place, key, record)

    def note_other_ids(self) -> None:
        """Note each topic whose commits name another id than the topic here has."""
        for topic, committed in sorted(self._committed_ids.items()):
            topic_id = self.ends.ids.get(topic)
            others = sorted(committed - {topic_id})
            if topic_id is not None and topic_id != derived_id(topic) and others:
                self.groups.notices.append(
                    f"{self._source.root}: commits name topic {topic!r} by the id "
                    f"{' and '.join(others)} (here it is {topic_id}): if it was deleted and "
                    "created again, these positions are those of the earlier topic"
                )

    def _leave_out(self, topic: str, replay: CoordinatorReplay, fault: KafkaLogError) -> None:
        """Note a damaged partition, and leave out its groups: later commits may be lost."""
        self.groups.damage.append(fault)
        for key in replay.latest:
            try:
                _, name, fields = read_key(topic, key)
            except ValueError:
                continue
            if name is not None:
                self.groups.unreadable[_group_name(fields)] = fault

    def _record(self, place: str, key: bytes, record: CoordinatorRecord) -> None:
        decoded = self._decoded(place, layout.GROUPS_TOPIC, key, record)
        if decoded is None:
            return
        name, fields, value = decoded
        group = self._group(_group_name(fields))
        if name == "OffsetCommit":
            if value["offset"] >= 0:  # else no position: OffsetFetchResponse.INVALID_OFFSET
                group.positions.append(self._position(fields, value))
        elif name == "GroupMetadata":
            group.protocol = value["protocolType"] or None
            group.members = len(value["members"])
            if group.protocol is not None:
                group.type = GroupType.CLASSIC
        elif name in _TYPES:
            group.type = _TYPES[name]
        elif name in _MEMBERS:
            group.members += 1
        else:
            for kind in ("initializingTopics", "initializedTopics"):
                self._sharing |= {each["topicId"]: each["topicName"] for each in value[kind]}

    def _position(self, key: Message, value: Message) -> GroupPosition:
        topic, partition = key["topic"], key["partition"]
        if "topicId" in value:
            self._committed_ids.setdefault(topic, set()).add(value["topicId"])
        return GroupPosition(
            topic,
            partition,
            value["offset"],
            self.ends.of(topic, partition),
            leader_epoch=_known(value.get("leaderEpoch")),
            commit_timestamp=_known(value["commitTimestamp"]),
            expire_timestamp=_known(value.get("expireTimestamp")),
            metadata=value["metadata"],
        )

    def _share_states(self, place: str, latest: Mapping[bytes, CoordinatorRecord]) -> None:
        """Add the start offsets: the snapshot's, or those of a later update.

        Kafka: ShareCoordinatorShard.handleShareSnapshot and handleShareUpdate.
        """
        for key, record in latest.items():
            if key[:2] != _SNAPSHOT:
                continue
            decoded = self._decoded(place, layout.SHARE_STATE_TOPIC, key, record)
            if decoded is None:
                continue
            _, fields, state = decoded
            update_key = _UPDATE + key[2:]
            update = latest.get(update_key)
            if update is not None and update.offset > record.offset:
                later = self._decoded(place, layout.SHARE_STATE_TOPIC, update_key, update)
                if later is None:
                    continue
                given = {name: later[2].get(name, -1) for name in (_START, _DELIVERED)}
                state = state | {name: number for name, number in given.items() if number >= 0}
            if state[_START] >= 0:
                self._group(fields["groupId"]).positions.append(self._share(fields, state))

    def _share(self, key: Message, state: Message) -> GroupPosition:
        topic_id: str = key["topicId"]
        partition = key["partition"]
        topic = self.ends.names.get(topic_id, self._sharing.get(topic_id, topic_id))
        return GroupPosition(
            topic,
            partition,
            state[_START],
            self.ends.of(topic, partition),
            leader_epoch=_known(state["leaderEpoch"]),
            commit_timestamp=_known(state["writeTimestamp"]),
            delivered=_known(state.get(_DELIVERED)),
        )

    def _decoded(
        self, place: str, topic: str, key: bytes, record: CoordinatorRecord
    ) -> tuple[str, Message, Message] | None:
        """Return a record's name, key and value; a damaged one is noted, and None."""
        name, what = None, "a key"
        fields: Message = {}
        try:
            _, name, fields = read_key(topic, key)
            if name is None:
                return None
            what = f"a value of {name}"
            # A member counts by its key.
            value = {} if name in _MEMBERS else read_value(name, record.value)[1]
            return name, fields, value
        except ValueError as fault:
            error = CorruptRecordError(
                place, record.offset, what, f"bytes that do not fit ({fault})"
            )
            self.groups.damage.append(error)
            if fields:
                group = self._group(_group_name(fields)).name
                if name in _POSITIONS:
                    self.groups.unreadable[group] = error
            return None

    def _group(self, name: str) -> ConsumerGroup:
        return self.groups.by_name.setdefault(name, ConsumerGroup(name))


_START: Final = "startOffset"
_DELIVERED: Final = "deliveryCompleteCount"


def _as_commit(key: bytes) -> bytes:
    """Return the key of a commit in its later form; Kafka 0.10 and older wrote another type."""
    return _COMMIT + key[2:] if key[:2] == _LEGACY else key


def _group_name(key: Message) -> str:
    """Return the name of the group that a key is about; each message calls it one of two names."""
    name: str = key["group"] if "group" in key else key["groupId"]
    return name


def _known(number: int | None) -> int | None:
    return None if number is None or number < 0 else number
