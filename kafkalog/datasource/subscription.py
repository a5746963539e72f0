"""The partitions of a read: `subscribe`, `subscribePattern` or `assign`.

Spark calls these its consumer strategies (ConsumerStrategy.scala).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kafkalog.datasource.offsets import TopicPartition, parse_object
from kafkalog.datasource.topic_pattern import topic_pattern
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.format.layout import INTERNAL_TOPICS, topic_name_fault
from kafkalog.storage_engine.metadata.state import State

STRATEGIES: Final = ("assign", "subscribe", "subscribePattern")
_EXAMPLE: Final = '{"topicA":[0,1],"topicB":[0,1]}'


@dataclass(frozen=True, slots=True)
class Subscription:
    """The selected topics or partitions, by one of the three fields; without any it selects none.

    `pattern` is a regular expression of `topic_pattern`.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Subscription:
        """Parse the one strategy among `options` (lower-case keys); raises InvalidInputError."""
        given = [name for name in STRATEGIES if name.lower() in options]
        names = ", ".join(STRATEGIES)
        if not given:
            raise InvalidInputError(
                f"One of the following options must be specified for Kafka source: {names}. "
                "See the docs for more details."
            )
        if len(given) > 1:
            raise InvalidInputError(
                f"Only one of the following options can be specified for Kafka source: {names}; "
                f"found {', '.join(given)}"
            )
        value = options[given[0].lower()]
        if given[0] == "subscribe":
            return cls(topics=_parse_topics(value))
        if given[0] == "subscribePattern":
            return cls(pattern=_parse_pattern(value))
        return cls(assigned=_parse_assign(value))

    def partitions(self, state: State) -> list[TopicPartition]:
        """Return the partitions that exist now, sorted.

        Assigned partitions that do not exist are left out, as Spark does. Raises UnknownTopicError
        for a topic, asked for by name, that does not exist.
        """
        fault = self.missing_fault(state)
        if fault is not None:
            raise fault
        found = [
            TopicPartition(name, partition)
            for name in self._names(state)
            for partition in state.topic(name).numbers()
        ]
        if self.assigned:
            wanted = set(self.assigned)
            found = [partition for partition in found if partition in wanted]
        return sorted(found)

    def missing_topics(self, state: State) -> list[str]:
        """Return the named topics that the log does not have, sorted."""
        names = set(self.topics) | {partition.topic for partition in self.assigned}
        return sorted(names - state.topics.keys())

    def missing_fault(self, state: State) -> UnknownTopicError | None:
        """Return the error for named topics that the log does not have."""
        missing = self.missing_topics(state)
        if not missing:
            return None
        option = "subscribe" if self.topics else "assign"
        try:
            state.topic(missing[0])
        except UnknownTopicError as fault:
            return UnknownTopicError(f"{option}: {fault}")
        raise AssertionError

    def without(self, topics: list[str]) -> Subscription:
        """Return the same subscription without some named topics."""
        return Subscription(
            topics=tuple(topic for topic in self.topics if topic not in topics),
            pattern=self.pattern,
            assigned=tuple(p for p in self.assigned if p.topic not in topics),
        )

    def _names(self, state: State) -> Iterable[str]:
        if self.pattern is not None:
            # A part of the name is enough, as in Spark's default offset reader.
            matches = topic_pattern(self.pattern).search
            return [n for n in state.topics if n not in INTERNAL_TOPICS and matches(n)]
        return self.topics or {partition.topic for partition in self.assigned}


def _parse_topics(value: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(name for part in value.split(",") if (name := part.strip())))
    if not topics:
        raise InvalidInputError(
            f"No topics to subscribe to as specified value for option 'subscribe' is {value!r}"
        )
    _check_names(topics)
    return topics


def _parse_pattern(value: str) -> str:
    pattern = value.strip()
    if not pattern:
        raise InvalidInputError(
            "Pattern to subscribe is empty as specified value for option "
            f"'subscribePattern' is {value!r}"
        )
    topic_pattern(pattern)
    return pattern


def _parse_assign(value: str) -> tuple[TopicPartition, ...]:
    if not value.strip().startswith("{"):
        raise InvalidInputError(
            "No topicpartitions to assign as specified value for option 'assign' is "
            f"{value!r}; expected e.g. {_EXAMPLE}"
        )
    document = parse_object(value)
    fault = InvalidInputError(f"assign: Expected e.g. {_EXAMPLE}, got {value}")
    if document is None:
        raise fault
    assigned: list[TopicPartition] = []
    for topic, partitions in document.items():
        if not isinstance(partitions, list):
            raise fault
        for partition in partitions:
            if type(partition) is not int or partition < 0:
                raise fault
            assigned.append(TopicPartition(topic, partition))
    if not assigned:
        raise InvalidInputError(
            f"No topicpartitions to assign as specified value for option 'assign' is {value!r}"
        )
    _check_names(tuple(document))
    return tuple(sorted(set(assigned)))


def _check_names(topics: tuple[str, ...]) -> None:
    for topic in topics:
        fault = topic_name_fault(topic)
        if fault is not None:
            raise InvalidInputError(fault)
