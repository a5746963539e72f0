"""The change of one commit, drafted upon the state that it is made for; the same for every log.

A directory's `Transaction` adds files and locks to it. In an object store a change is drafted again
when another commit comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.metadata.config import TopicConfig, as_texts, check_mapping
from kafkalog.storage_engine.metadata.new_topic import NewTopic, new_topic_id
from kafkalog.storage_engine.metadata.state import (
    Change,
    DeletedTopic,
    PartitionState,
    State,
    TopicState,
    WriterState,
)

HIGH_WATERMARK = -1
"""Means the high watermark in `delete_records`, as in Kafka's DeleteRecords."""


class WrittenTopics(Protocol):
    """The topics that a task wrote to."""

    @property
    def topic_ids(self) -> Mapping[str, str]:
        """The topics, each with the id that the task saw; '' for a topic to create."""

    @property
    def keyless(self) -> Collection[str]:
        """The topics that got rows with a null key."""


class LogChange:
    """Changes of topics, partitions and writers; `state` is the one before them."""

    def __init__(self, state: State, change: Change) -> None:
        self.state = state
        self._change = change
        self._created: dict[str, TopicState] = {}
        self._drafted: dict[tuple[str, int], PartitionState] = {}

    @property
    def is_changed(self) -> bool:
        """Whether anything is drafted."""
        return bool(self._change)

    def topic(self, name: str) -> TopicState:
        """Return a topic, including one created by this change."""
        return self._created.get(name) or self.state.topic(name)

    def create_topic(self, name: str, new: NewTopic) -> TopicState:
        """Create a topic; it exists once the change is committed.

        Raises InvalidInputError for a topic that `NewTopic.check` refuses, or that exists already.
        """
        self.check_new(name, new)
        return self.add_topic(name, new_topic_id(), new)

    def check_new(self, name: str, new: NewTopic) -> None:
        """Raise InvalidInputError unless a topic of that name can be created so."""
        new.check(name)
        if name in self.state.topics or name in self._created:
            raise InvalidInputError(
                f"topic {name!r} exists already. Choose another name, or leave the topic as it is: "
                "exist_ok=True, on the command line --if-not-exists."
            )

    def add_topic(
        self, name: str, topic_id: str, new: NewTopic, absent: Iterable[int] = ()
    ) -> TopicState:
        """Add a checked topic under an id, without the partitions that are `absent`."""
        self._change.topic(name, topic_id, new.partitions, new.config, absent)
        state = State().apply(1, self._change.record(0)).topics[name]
        self._created[name] = state
        return state

    def check_copied(self, topic: TopicState) -> None:
        """Raise StorageError if a topic of another log cannot be added."""
        if topic.name in self.state.topics or topic.name in self._created:
            raise StorageError(f"topic {topic.name!r} was created meanwhile. Copy again.")
        if self.is_left(topic.topic_id):
            raise StorageError(
                f"topic {topic.name!r}: its deletion here is not finished (expected nothing of the "
                f"topic of id {topic.topic_id}). Copy again later, or to a new destination."
            )

    def is_left(self, topic_id: str) -> bool:
        """Return whether something of a deleted topic is left."""
        return topic_id in self.state.deleting

    def copy_topic(self, topic: TopicState, starts: Mapping[int, int]) -> None:
        """Add a topic of another log under its id, without its records.

        Its partitions are those of `starts`, which says where the log of each begins and ends.
        """
        self.check_copied(topic)
        absent = {*range(len(topic.partitions))} - {*starts}
        new = NewTopic(len(topic.partitions), dict(topic.config))
        self.add_topic(topic.name, topic.topic_id, new, absent)
        for number, start in starts.items():
            self.change_partition(
                topic.name,
                number,
                high_watermark=start,
                active_base=start,
                log_start_offset=start,
                last_stable_offset=start,
                first_dirty_offset=start,
                leader_epoch=topic.partitions[number].leader_epoch,
            )

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, str | None],
        partitions: int | None = None,
        *,
        keys_may_move: bool = False,
    ) -> TopicState:
        """Set configs, delete those with None as their new value, and add partitions.

        `check_grows` says when partitions are refused. Raises InvalidInputError.
        """
        topic = self.topic(name)
        altered = _with_configs(topic, config)
        parsed = TopicConfig.parse(altered)
        count = len(topic.partitions)
        if partitions is not None:
            partitions = whole_number("partitions", partitions)
            check_grows(topic, partitions, is_compacted=parsed.is_compacted and not keys_may_move)
            self.add_partitions(topic, partitions)
            count = partitions
        self._change.topic(name, topic.topic_id, count, altered, topic.absent)
        added = (PartitionState(),) * (count - len(topic.partitions))
        return dataclasses.replace(
            topic,
            config=MappingProxyType(altered),
            partitions=(*topic.partitions, *added) if added else topic.partitions,
        )

    def add_partitions(self, topic: TopicState, count: int) -> None:
        """Prepare the places of a topic's new partitions, up to `count`; here this does nothing."""

    def delete_topic(self, name: str, now_ms: int) -> None:
        """Delete a topic; what it had may be removed after its `file.delete.delay.ms`."""
        topic = self.state.topic(name)
        remove_at_ms = now_ms + TopicConfig.parse(topic.config).file_delete_delay_ms
        count = len(topic.partitions)
        remove_at_ms = min(remove_at_ms, layout.INT64_MAX)
        self._change.deleted(DeletedTopic(name, topic.topic_id, count, remove_at_ms))
        for writer in self.state.writers:
            if writer.rpartition(" ")[2] == name:  # its records are gone with the topic
                self._change.forget_writer(writer, now_ms)

    def forget_deleted(self, topic_id: str) -> None:
        """Note that nothing is left of a deleted topic."""
        self._change.forget(topic_id)

    def change_partition(self, topic: str, number: int, **fields: int) -> None:
        """Set fields of a partition's state, and keep those that this change has set before."""
        state = dataclasses.replace(self.drafted(topic, number), **fields)
        self._drafted[topic, number] = state
        self._change.partition(topic, number, state)

    def drafted(self, topic: str, number: int) -> PartitionState:
        """Return a partition's state with the fields that this change has set so far."""
        return self._drafted.get((topic, number)) or self.topic(topic).partitions[number]

    def raise_log_start(self, topic: str, number: int, offset: int) -> None:
        """Raise a partition's log start, and with it the first dirty and last stable offsets."""
        fields = self.fields_of_start(self.drafted(topic, number), offset)
        self.change_partition(topic, number, **fields)

    def fields_of_start(self, state: PartitionState, offset: int) -> dict[str, int]:
        """Return the fields of a partition's state that change if its log begins at `offset`."""
        return {
            "log_start_offset": offset,
            "first_dirty_offset": max(state.first_dirty_offset, offset),
            "last_stable_offset": max(state.last_stable_offset, offset),
        }

    def delete_records(self, topic: str, number: int, before: int) -> int:
        """Let a partition begin at `before`, or later (rule P7); return where it begins.

        Raises InvalidInputError unless `cleanup.policy` has delete, and OffsetOutOfRangeError.
        """
        known = self.topic(topic)
        state, before = known.partitions[number], whole_number("before", before)
        if not TopicConfig.parse(known.config).is_deleted:
            policy = known.config.get("cleanup.policy", "delete")
            raise InvalidInputError(
                f"topic {topic!r}: records are deleted only if cleanup.policy has delete, it is "
                f"{policy!r}: write tombstones, or alter the topic to compact,delete"
            )
        offset = state.high_watermark if before == HIGH_WATERMARK else before
        if not 0 <= offset <= state.high_watermark:
            raise OffsetOutOfRangeError(
                topic, number, before, state.log_start_offset, state.high_watermark
            )
        if offset > state.log_start_offset:
            self.raise_log_start(topic, number, offset)
        return max(offset, state.log_start_offset)

    def record_writer(
        self, name: str, batch_id: int, rows: int, time_ms: int, ends: str | None = None
    ) -> None:
        """Record a writer's last batch with the latest time of all, in case the clock went back."""
        known = (entry.time_ms for entry in self.state.writers.values())
        latest_ms = max(time_ms, self.state.time_ms, *known)
        self._change.writer(name, WriterState(batch_id, rows, latest_ms, ends))

    def end_writer(self, name: str) -> None:
        """Drop the last batch of a writer that writes no more."""
        self._change.writers[name] = None

    def forget_writer(self, name: str, time_ms: int) -> None:
        """Forget a writer's last batch, on a user's demand: its next one is always appended."""
        self._change.forget_writer(name, time_ms)

    def refuse_gone_topics(self, written: Iterable[WrittenTopics]) -> None:
        """Check the ids of the topics that tasks saw: what they wrote may have gone with one.

        Raises StorageError.
        """
        for each in written:
            for name, topic_id in each.topic_ids.items():
                known = self.state.topics.get(name)
                if topic_id and (known is None or known.topic_id != topic_id):
                    raise StorageError(
                        f"topic {name!r} was deleted or created again while the batch was written: "
                        f"the task saw id {topic_id}; run the batch again"
                    )

    def match_topics(self, written: Iterable[WrittenTopics], create: NewTopic | None) -> None:
        """Check the keys of what goes into the topics, and create those to be created.

        Raises InvalidInputError, StorageError.
        """
        for each in written:
            for name, topic_id in each.topic_ids.items():
                known = self.state.topics.get(name)
                if topic_id:
                    assert known is not None
                    _refuse_keyless(known, each)
                    continue
                if create is None:
                    raise InvalidInputError(
                        f"topic {name!r} does not exist and is not to be created"
                    )
                if known is not None:
                    if len(known.partitions) != create.partitions:
                        raise StorageError(
                            f"topic {name!r} was created meanwhile with {len(known.partitions)} "
                            f"partitions, the task expected {create.partitions}; run the batch "
                            "again"
                        )
                    _refuse_keyless(known, each)
                elif name not in self._created:
                    self.create_topic(name, create)


def check_grows(topic: TopicState, partitions: int, *, is_compacted: bool) -> None:
    """Raise InvalidInputError unless a topic can get this many partitions.

    Kafka: ReplicationControlManager.createPartitions. `is_compacted` refuses what Kafka permits: a
    key of a compacted topic would have a latest record in its old partition and in its new one.
    """
    name, count = topic.name, len(topic.partitions)
    if not count < partitions <= layout.PARTITIONS_MAX:
        raise InvalidInputError(
            f"topic {name!r}: it has {count} partitions, and their number can only grow (expected "
            f"{count + 1} to {layout.PARTITIONS_MAX}, found {partitions})"
        )
    if topic.absent:
        raise InvalidInputError(
            f"topic {name!r}: some of its partitions are in another log, so only there more can be "
            "added. Add them there, and copy the topic again, or release the directory to its "
            "broker."
        )
    if is_compacted:
        raise InvalidInputError(
            f"topic {name!r} is compacted, and with {partitions} partitions instead of {count} its "
            "keys go elsewhere: a key's old record stays in the old partition, next to the new one."
            " Copy the topic to one with more partitions, or permit it with keys_may_move=True "
            "(--keys-may-move)."
        )


def _with_configs(topic: TopicState, config: Mapping[str, str | None]) -> dict[str, str]:
    """Return a topic's configs after a change. Kafka: Admin.incrementalAlterConfigs."""
    check_mapping(config)
    altered = dict(topic.config)
    for name, value in config.items():
        if value is not None:
            altered.update(as_texts({name: value}))
        elif name == "cleanup.policy":
            raise InvalidInputError(
                f"topic {topic.name!r}: cleanup.policy is not deleted, because Kafka's default "
                "deletes old records. Set the policy that you mean."
            )
        elif altered.pop(name, None) is None:
            known = ", ".join(sorted(topic.config)) or "none"
            raise InvalidInputError(
                f"topic {topic.name!r}: config {name!r} is not set (expected one of: {known})"
            )
    return altered


def _refuse_keyless(topic: TopicState, written: WrittenTopics) -> None:
    """Refuse rows without a key if the topic has become a compacted one meanwhile."""
    if topic.name in written.keyless and TopicConfig.parse(topic.config).needs_keys:
        raise InvalidInputError(
            f"topic {topic.name!r} was made compacted while the batch was written, and the cleaner "
            "would delete its rows that have a null key; give every row a key"
        )
