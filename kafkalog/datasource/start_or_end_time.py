"""Times at which a read starts or ends: `startingTimestamp`, `endingOffsetsByTimestamp` etc.

A time is in epoch milliseconds and means the first record at or after it. Negative numbers are
Kafka's (ListOffsetsRequest): -1 is the latest offset, -2 the earliest, -3 the record with the
largest timestamp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kafkalog.datasource.offsets import (
    Offsets,
    TopicPartition,
    add_partitions,
    listed,
    parse_object,
)
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.layout import INT64_MAX

_EXAMPLE: Final = (
    '{"topicA": {"0": 123456789, "1": 123456789}, "topicB": {"0": 123456789, "1": 123456789}}'
)
_LONG: Final = re.compile(r"[+-]?[0-9]{1,19}")
_LEAST: Final = -INT64_MAX - 1
_LARGEST_TIMESTAMP: Final = -3


@dataclass(frozen=True, slots=True)
class StartOrEndTime:
    """The time (ms) at which a read starts or ends: `everywhere`, or for each named partition.

    Spark: GlobalTimestampRangeLimit, SpecificTimestampRangeLimit.
    """

    everywhere: int | None = None
    partitions: Mapping[TopicPartition, int] = field(default_factory=dict)

    @classmethod
    def parse_everywhere(cls, text: str, *, option: str) -> StartOrEndTime:
        """Parse one number for all partitions; raises InvalidInputError, which names the option."""
        word = text.strip()
        if not _LONG.fullmatch(word) or not _LEAST <= int(word) <= INT64_MAX:
            raise InvalidInputError(f"{option}: Expected a single long value, got {text!r}")
        return cls(everywhere=_checked(int(word), option))

    @classmethod
    def parse_partitions(cls, text: str, *, option: str) -> StartOrEndTime:
        """Parse a JSON of times by topic and partition; raises InvalidInputError."""
        fault = InvalidInputError(f"{option}: Expected e.g. {_EXAMPLE}, got {text}")
        document = parse_object(text)
        if document is None:
            raise fault
        times: Offsets = {}
        for topic, partitions in document.items():
            if not add_partitions(times, topic, partitions, option=option, least=_LEAST):
                raise fault
        return cls(partitions={named: _checked(time, option) for named, time in times.items()})

    @property
    def is_specific(self) -> bool:
        """Whether the option was JSON."""
        return self.everywhere is None

    def named(self, assigned: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the times of the assigned partitions that have one."""
        if self.everywhere is not None:
            return dict.fromkeys(assigned, self.everywhere)
        return {p: time for p in assigned if (time := self.partitions.get(p)) is not None}

    def check_stream(self) -> None:
        """Raise InvalidInputError for a stream from the largest timestamp, which moves."""
        if _LARGEST_TIMESTAMP in (self.everywhere, *self.partitions.values()):
            option = "startingOffsetsByTimestamp" if self.is_specific else "startingTimestamp"
            raise InvalidInputError(
                f"{option}: {_LARGEST_TIMESTAMP} (the record with the largest timestamp) is no "
                "start of a streaming query, since it moves; give epoch milliseconds, -1 (latest) "
                "or -2 (earliest)"
            )

    def times(
        self, assigned: Iterable[TopicPartition], *, option: str
    ) -> dict[TopicPartition, int]:
        """Return a time for each assigned partition, sorted.

        Raises InvalidInputError, which names the option, if its JSON does not name exactly these
        partitions.
        """
        wanted = sorted(assigned)
        if self.everywhere is not None:
            return dict.fromkeys(wanted, self.everywhere)
        if self.partitions.keys() != set(wanted):
            position = "start" if option.startswith("starting") else "end"
            raise InvalidInputError(
                "[KAFKA_TIMESTAMP_OFFSET_DOES_NOT_MATCH_ASSIGNED] Partitions specified for Kafka "
                f"timestamp based {position} offsets ({option}) don't match what are assigned: "
                "partitions were created or deleted, or you didn't specify all of them. "
                f"Specified: {listed(self.partitions)} Assigned: {listed(wanted)}"
            )
        return {partition: self.partitions[partition] for partition in wanted}


def _checked(time: int, option: str) -> int:
    if time < _LARGEST_TIMESTAMP:
        raise InvalidInputError(
            f"{option}: expected epoch milliseconds, or -1 (latest), -2 (earliest) or "
            f"{_LARGEST_TIMESTAMP} (the largest timestamp), got {time}"
        )
    return time
