"""The moment of a materialized table, and whether its log can still complete the table.

The files of a table have the latest record of each key as of one offset per partition. The log
completes them with what came since. It cannot do so in these cases, and each would give wrong rows
without an error:

- The topic was deleted and created again, or the log is another one, or an older copy was put back.
  Each refresh commits a mark to the log, after the moment of its files. A log that lacks the mark
  has not seen that moment, even if it goes beyond its offsets by now.
- A broker had the log since. It keeps none of our facts.
- Rows are gone: the log starts above the first row of a partition.
- A deletion is gone: a cleaning has removed a tombstone from beyond the moment, so nothing says
  that the row of its key is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from kafkalog.errors import IncompleteTableError
from kafkalog.storage_engine.metadata.state import State, TopicState

_MARK: Final = "materialized-table:"


class PartitionMoment(NamedTuple):
    """A partition of a table."""

    offset: int
    """The table has the latest records below it."""
    first: int | None
    """The offset of its first row; None if it has no rows."""


@dataclass(frozen=True, slots=True)
class TableMoment:
    """The moment of a table's files; plain data."""

    topic: str
    topic_id: str
    mark: str
    """The name under which the log keeps the number of the table's last refresh."""
    number: int
    partitions: Mapping[int, PartitionMoment]

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> Self:
        """Return what `as_json` gave. Raises ValueError and similar for anything else."""
        return cls(
            str(given["topic"]),
            str(given["topic_id"]),
            str(given["mark"]),
            int(given["number"]),
            {
                int(number): PartitionMoment(int(offset), None if first is None else int(first))
                for number, (offset, first) in given["partitions"].items()
            },
        )

    def as_json(self) -> dict[str, Any]:
        """Return the moment as plain JSON."""
        return {
            "topic": self.topic,
            "topic_id": self.topic_id,
            "mark": self.mark,
            "number": self.number,
            "partitions": {str(number): [*held] for number, held in self.partitions.items()},
        }

    def dumps(self) -> str:
        """Return the moment as text, for an option of the source."""
        return json.dumps(self.as_json())

    def start(self, partition: int, log_start: int) -> int:
        """Return the offset from which a partition's changes are read."""
        held = self.partitions.get(partition)
        return log_start if held is None else max(log_start, held.offset)

    def fault(self, state: State) -> str | None:
        """Return why a log in this state cannot complete the table; None if it can."""
        topic = state.topics.get(self.topic)
        if topic is None:
            return f"topic {self.topic!r} does not exist any more"
        if reason := self.fault_of_log(state):
            return reason
        faults = (self.fault_of_partition(topic, number) for number in self.partitions)
        return next(filter(None, faults), None)

    def fault_of_log(self, state: State) -> str | None:
        """Return why the log is not the one that the table was made of; None if it is."""
        known = state.writers.get(self.mark)
        if known is not None and known.batch_id >= self.number:
            return None
        found = "none" if known is None else f"number {known.batch_id}"
        return (
            "the log does not know the table's last refresh: it is another log, or an older copy "
            f"was put back (expected number {self.number}, found {found})"
        )

    def fault_of_partition(self, topic: TopicState, number: int) -> str | None:
        """Return why a partition cannot complete the table; None if it can."""
        if topic.topic_id != self.topic_id:
            return f"topic {self.topic!r} was deleted and created again"
        held = self.partitions.get(number)
        if held is None:  # added since, so all of its rows come from the log
            return None
        place, state = f"{self.topic}-{number}", topic.partitions[number]
        if state.high_watermark < held.offset:
            return f"{place} ends at offset {state.high_watermark}, below {held.offset}"
        if state.listed_from > held.offset:
            return f"{place} was a broker's after offset {held.offset}"
        if held.first is not None and state.log_start_offset > held.first:
            return f"{place} starts at {state.log_start_offset}, above the row at {held.first}"
        if state.deletions_gone_to > held.offset:
            gone_to = state.deletions_gone_to
            return f"{place}: deletions below {gone_to} are gone, the files are of {held.offset}"
        return None

    def check_log(self, state: State) -> None:
        """Raise IncompleteTableError if the log is not the one that the table was made of."""
        self._check(self.fault_of_log(state))

    def check_partition(self, topic: TopicState, number: int) -> None:
        """Raise IncompleteTableError if a partition cannot complete the table."""
        self._check(self.fault_of_partition(topic, number))

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            raise IncompleteTableError(
                f"{location_of(self.mark)}: the log can no longer complete the materialized table: "
                f"{fault}. Call refresh(), which makes its files again."
            )


def mark_of(location: str, lineage: str, topic: str) -> str:
    """Return a table's mark in the log. A table that is made again has another lineage."""
    return f"{_MARK}{lineage}:{location} {topic}"


def location_of(mark: str) -> str:
    """Return where the table of a mark is."""
    return mark.removeprefix(_MARK).partition(":")[2].rpartition(" ")[0]


def marks_of(state: State, topic: str) -> Iterator[str]:
    """Yield the marks of a topic's tables."""
    for name in state.writers:
        if name.startswith(_MARK) and name.rpartition(" ")[2] == topic:
            yield name
