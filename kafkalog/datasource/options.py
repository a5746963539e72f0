"""The source's options, parsed and checked as far as they go without looking at the log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kafkalog.datasource.offsets import EARLIEST, LATEST, StartOrEnd
from kafkalog.datasource.option_names import check_names
from kafkalog.datasource.subscription import STRATEGIES, Subscription
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.address import log_directories
from kafkalog.storage_engine.layout import INT64_MAX
from kafkalog.storage_engine.state import PartitionState

__all__ = ["SourceOptions"]

_CHANGELOG: Final = "changelog"
_LATEST_VIEW: Final = "latest"
_READ_COMMITTED: Final = "read_committed"
_ISOLATION_LEVELS: Final = (_READ_COMMITTED, "read_uncommitted")
_INTEGER: Final = re.compile(r"^[+-]?[0-9]{1,19}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What the options of a read say; plain data, sent to the tasks.

    An offset option that was not given is None: its default differs between batch and streaming.
    """

    directories: tuple[str, ...]
    """One, or all those of a Kafka broker."""
    subscription: Subscription
    starting_offsets: StartOrEnd | None
    ending_offsets: StartOrEnd | None
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    include_headers: bool
    isolation_level: str
    latest_view: bool
    ignored: tuple[str, ...]

    @property
    def read_committed(self) -> bool:
        """Whether records of open and of aborted transactions are left out."""
        return self.isolation_level == _READ_COMMITTED

    def latest_offset(self, held: PartitionState) -> int:
        """Return where reading a partition ends by this isolation level, as -1 means it."""
        return held.last_stable_offset if self.read_committed else held.high_watermark

    @staticmethod
    def are_reading(options: Mapping[str, str]) -> bool:
        """Tell whether the options select topics to read; a sink's options never do."""
        return not {key.lower() for key in options}.isdisjoint(name.lower() for name in STRATEGIES)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse options with keys of any letter case.

        Checks what holds for batch and streaming alike; raises InvalidInputError, with Spark's
        wording where Spark has one.
        """
        given = {key.lower(): value for key, value in options.items()}
        ignored = check_names(given)
        parsed = cls(
            directories=tuple(map(str, log_directories(given))),
            subscription=Subscription.parse(given),
            starting_offsets=_offsets(given, "startingOffsets"),
            ending_offsets=_offsets(given, "endingOffsets"),
            max_offsets_per_trigger=_positive(given, "maxOffsetsPerTrigger"),
            min_partitions=_positive(given, "minPartitions"),
            fail_on_data_loss=_boolean(given, "failOnDataLoss", default=True),
            include_headers=_boolean(given, "includeHeaders", default=False),
            isolation_level=_choice(given, "kafka.isolation.level", _ISOLATION_LEVELS),
            latest_view=_choice(given, "view", (_CHANGELOG, _LATEST_VIEW)) == _LATEST_VIEW,
            ignored=tuple(ignored),
        )
        _check_specific(parsed.starting_offsets, parsed.ending_offsets)
        if parsed.latest_view:
            _check_latest_view(parsed)
        return parsed


def _offsets(options: Mapping[str, str], name: str) -> StartOrEnd | None:
    text = options.get(name.lower())
    return None if text is None else StartOrEnd.parse(text)


def _positive(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not _INTEGER.match(text.strip()) or int(text) > INT64_MAX:
        raise InvalidInputError(f"{name} must be an integer, got {text!r}")
    if int(text) <= 0:
        raise InvalidInputError(f"{name} must be positive, got {text!r}")
    return int(text)


def _boolean(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in {"true", "false"}:
        raise InvalidInputError(f"{name} must be true or false, got {text!r}")
    return text == "true"


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return the option's value, the first choice when it is not given."""
    text = options.get(name.lower(), choices[0]).strip().lower()
    if text not in choices:
        raise InvalidInputError(f"{name} must be {' or '.join(choices)}, got {text!r}")
    return text


def _check_specific(start: StartOrEnd | None, end: StartOrEnd | None) -> None:
    """Check start against end where both name partitions (Spark: KafkaRelation's checks)."""
    if start is None or end is None or not start.is_specific or not end.is_specific:
        return
    if not start.topics and not end.topics and start.partitions.keys() != end.partitions.keys():
        raise InvalidInputError(
            "[MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET] startingOffsets "
            f"names {_join(start)}, endingOffsets names {_join(end)}; name the same partitions"
        )
    for partition, first in start.partitions.items():
        last = end.partitions.get(partition, LATEST)
        if first > last >= 0:
            raise InvalidInputError(
                f"[UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET] {partition}: "
                f"the start offset {first} is greater than the end offset {last}"
            )


def _join(offsets: StartOrEnd) -> str:
    return ", ".join(str(partition) for partition in sorted(offsets.partitions)) or "none"


def _check_latest_view(options: SourceOptions) -> None:
    """A view takes all records below its end: it has no start, and no smaller pieces."""
    start = options.starting_offsets
    if start is not None and start.everywhere != EARLIEST:
        raise InvalidInputError(
            "startingOffsets cannot be set with view=latest: the newest record of a key is looked "
            "for from the earliest offset; endingOffsets says as of which offset"
        )
    if options.min_partitions is not None:
        raise InvalidInputError(
            "minPartitions cannot be set with view=latest: it reads one task per log partition"
        )
