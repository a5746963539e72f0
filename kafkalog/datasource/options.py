"""The source's options, parsed and checked without reading the log."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kafkalog.datasource.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    StartOrEnd,
    TopicPartition,
    listed,
)
from kafkalog.datasource.option_names import INERT_INTEGERS, check_names
from kafkalog.datasource.start_or_end_time import StartOrEndTime
from kafkalog.datasource.subscription import STRATEGIES, Subscription
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.layout import INT32_MAX, INT64_MAX
from kafkalog.storage_engine.metadata.address import directories, log_directories
from kafkalog.storage_engine.metadata.state import PartitionState, State
from kafkalog.storage_engine.object_store.address import StoreAddress, store_address
from kafkalog.tables.table_moment import TableMoment

_CHANGELOG: Final = "changelog"
_LATEST_VIEW: Final = "latest"
_READ_COMMITTED: Final = "read_committed"
_ISOLATION_LEVELS: Final = (_READ_COMMITTED, "read_uncommitted")
_STRATEGIES: Final = ("error", "latest")
_PARTITIONERS: Final = ("any", "murmur2")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_TRIGGER_DELAY: Final = "15m"
_MICROSECONDS: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_SPAN: Final = re.compile(r"(-?[0-9]{1,19})([a-z]+)?")
_KEYS_EXAMPLE: Final = '["apple", {"base64": "AAE="}]'
_SHOWN: Final = 60
_OF_STREAMS: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
"""Options that Spark ignores in a batch query, with a warning."""
_NOT_IN_STREAMS: Final = {
    "endingOffsets": "ending offset not valid in streaming queries",
    "endingOffsetsByTimestamp": "ending timestamp not valid in streaming queries",
}
"""Spark's refusals. It lets `endingTimestamp` pass, and so do we."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a read as plain data, sent to the tasks.

    A start or end that is missing stays None, because its default differs between batch and
    streaming. The strongest one counts, as in Spark; the others are ignored and None. A time for
    all partitions is stronger than times per partition, and those than offsets.
    """

    directories: tuple[str, ...]
    """One directory, or all those of a Kafka broker; none if the log is in an object store."""
    store: StoreAddress | None
    """The address of a log in an object store."""
    subscription: Subscription
    starting_time: StartOrEndTime | None
    starting_offsets: StartOrEnd | None
    ending_time: StartOrEndTime | None
    ending_offsets: StartOrEnd | None
    non_matching: str
    """`error` or `latest`: the meaning of a starting time that is after the last record."""
    min_offsets_per_trigger: int | None
    max_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    isolation_level: str
    latest_view: bool
    keys: frozenset[bytes] | None
    """The keys whose records are read; None: all records, also those without a key."""
    partitioner: str
    """`murmur2`: a key is only where Kafka's default partitioner sends it; `any`: anywhere."""
    completes: TableMoment | None
    """The moment of a materialized table. The view then has the latest record of each key that has
    one since, also a tombstone."""
    with_obsolete: bool
    """Whether the view has all records and tombstones, for a table that has its own order."""
    ignored: tuple[str, ...]
    """Names of options without effect, as they were given."""
    warn_of_batch: tuple[str, ...]
    """Names that have no effect in a batch query."""
    stream_fault: str | None
    """The reason why a streaming query cannot have these options, in Spark's words."""

    @property
    def place(self) -> Sequence[Path] | StoreAddress:
        """The place of the log."""
        return directories(self.directories) if self.store is None else self.store

    @property
    def read_committed(self) -> bool:
        """Whether records of open and of aborted transactions are left out."""
        return self.isolation_level == _READ_COMMITTED

    @property
    def _of_a_table(self) -> str | None:
        """An option that a materialized table sets; None if it sets no option."""
        if self.completes is not None:
            return "completes"
        return "withObsolete" if self.with_obsolete else None

    @property
    def is_partitioned(self) -> bool:
        """Whether only those partitions are read to which the partitioner sends the keys."""
        return self.keys is not None and self.partitioner == "murmur2"

    @property
    def batch_start(self) -> StartOrEnd:
        """The start of a batch read if no time gives it."""
        return self.starting_offsets or StartOrEnd(everywhere=EARLIEST)

    @property
    def batch_end(self) -> StartOrEnd:
        """The end of a batch read if no time gives it."""
        return self.ending_offsets or StartOrEnd(everywhere=LATEST)

    def starts_at_earliest(self, partition: TopicPartition) -> bool:
        """Return whether a batch read of a partition, which may be new, begins at the earliest."""
        named = self.batch_start.named([partition])
        return self.starting_time is None and named.get(partition) == EARLIEST

    def ends_at_latest(self, partition: TopicPartition) -> bool:
        """Return whether a batch read of a partition, which may be new, ends at the latest."""
        named = self.batch_end.named([partition])
        return self.ending_time is None and named.get(partition) == LATEST

    def latest_offset(self, held: PartitionState) -> int:
        """Return the offset at which reading a partition ends by this isolation level."""
        return held.last_stable_offset if self.read_committed else held.high_watermark

    def latest_offsets(self, subscription: Subscription, state: State) -> Offsets:
        """Return `latest_offset` of each partition of a subscription; raises UnknownTopicError."""
        return {
            partition: self.latest_offset(
                state.topic(partition.topic).partitions[partition.partition]
            )
            for partition in subscription.partitions(state)
        }

    @staticmethod
    def are_reading(options: Mapping[str, str]) -> bool:
        """Return whether the options select topics to read; a sink's options never do."""
        return not {key.lower() for key in options}.isdisjoint(name.lower() for name in STRATEGIES)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse options with keys of any letter case.

        Checks what holds for batch and streaming alike; raises InvalidInputError, with Spark's
        wording where Spark has one.
        """
        given = {key.lower(): value for key, value in options.items()}
        ignored = check_names(given)
        _check_inert(given)
        starting_time, starting_offsets = _limit(given, "starting")
        ending_time, ending_offsets = _limit(given, "ending")
        store = store_address(given)
        refused = [fault for name, fault in _NOT_IN_STREAMS.items() if name.lower() in given]
        parsed = cls(
            directories=() if store else tuple(map(str, log_directories(given))),
            store=store,
            subscription=Subscription.parse(given),
            starting_time=starting_time,
            starting_offsets=starting_offsets,
            ending_time=ending_time,
            ending_offsets=ending_offsets,
            non_matching=_choice(given, "startingOffsetsByTimestampStrategy", _STRATEGIES),
            min_offsets_per_trigger=_positive(given, "minOffsetsPerTrigger"),
            max_offsets_per_trigger=_positive(given, "maxOffsetsPerTrigger"),
            max_trigger_delay_ms=_milliseconds(given.get("maxtriggerdelay", _MAX_TRIGGER_DELAY)),
            min_partitions=_positive(given, "minPartitions", largest=INT32_MAX),
            max_records_per_partition=_positive(given, "maxRecordsPerPartition"),
            fail_on_data_loss=_choice(given, "failOnDataLoss", ("true", "false")) == "true",
            include_headers=_choice(given, "includeHeaders", ("false", "true")) == "true",
            isolation_level=_choice(given, "kafka.isolation.level", _ISOLATION_LEVELS),
            latest_view=_choice(given, "view", (_CHANGELOG, _LATEST_VIEW)) == _LATEST_VIEW,
            keys=_parse_keys(given["keys"]) if "keys" in given else None,
            partitioner=_choice(given, "partitioner", _PARTITIONERS),
            completes=_parse_moment(given["completes"]) if "completes" in given else None,
            with_obsolete=_choice(given, "withObsolete", ("false", "true")) == "true",
            ignored=tuple(ignored),
            warn_of_batch=tuple(name for name in _OF_STREAMS if name.lower() in given),
            stream_fault=next(iter(refused), None),
        )
        _check_order(parsed.starting_offsets, parsed.ending_offsets, "offset", "Offsets")
        _check_order(parsed.starting_time, parsed.ending_time, "timestamp", "OffsetsByTimestamp")
        _check_limits(parsed)
        if parsed.latest_view:
            _check_latest_view(parsed)
        elif name := parsed._of_a_table:
            raise InvalidInputError(f"option {name}: it needs view=latest. Leave it out.")
        return parsed

    def check_batch(self) -> None:
        """Raise InvalidInputError, in Spark's words, for options that a batch query refuses."""
        start, end = self.starting_offsets, self.ending_offsets
        if start is not None:
            _refuse(start, LATEST, "starting offset", "startingOffsets", "latest")
        if end is not None:
            _refuse(end, EARLIEST, "ending offset", "ending offset", "earliest")

    def check_stream(self) -> None:
        """Raise InvalidInputError for options that only a streaming query refuses."""
        if self.stream_fault is not None:
            raise InvalidInputError(self.stream_fault)
        if name := self._of_a_table:
            raise InvalidInputError(f"option {name}: a streaming query has none. Leave it out.")
        if self.starting_time is not None:
            self.starting_time.check_stream()
        if self.latest_view and not self.read_committed:
            raise InvalidInputError(
                "kafka.isolation.level=read_uncommitted cannot be set with view=latest in a "
                "stream: a view has committed records alone, and the changes after it would lack "
                "the others"
            )


def _limit(
    options: Mapping[str, str], side: str
) -> tuple[StartOrEndTime | None, StartOrEnd | None]:
    """Return the strongest start or end that is given (`side`: starting, ending)."""
    everywhere, by_time, offsets = (
        f"{side}Timestamp",
        f"{side}OffsetsByTimestamp",
        f"{side}Offsets",
    )
    if (text := options.get(everywhere.lower())) is not None:
        return StartOrEndTime.parse_everywhere(text, option=everywhere), None
    if (text := options.get(by_time.lower())) is not None:
        return StartOrEndTime.parse_partitions(text, option=by_time), None
    if (text := options.get(offsets.lower())) is not None:
        return None, StartOrEnd.parse(text, option=offsets)
    return None, None


def _positive(options: Mapping[str, str], name: str, *, largest: int = INT64_MAX) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not _INTEGER.fullmatch(text.strip()) or int(text) > largest:
        raise InvalidInputError(f"{name} must be an integer of at most {largest}, got {text!r}")
    if int(text) <= 0:
        raise InvalidInputError(f"{name} must be positive, got {text!r}")
    return int(text)


def _milliseconds(text: str) -> int:
    """Return the whole milliseconds of a span such as `15m`, at most INT64_MAX.

    A number alone is in milliseconds. Raises InvalidInputError. Spark: JavaUtils.timeStringAs.
    """
    match = _SPAN.fullmatch(text.strip().lower())
    unit = None if match is None else _MICROSECONDS.get(match[2] or "ms")
    if match is None or unit is None or not -INT64_MAX - 1 <= int(match[1]) <= INT64_MAX:
        raise InvalidInputError(
            "maxTriggerDelay: Time must be specified as seconds (s), milliseconds (ms), "
            "microseconds (us), minutes (m or min), hour (h), or day (d). E.g. 50s, 100ms, or "
            "250us. "
            f"Failed to parse time string: {text}"
        )
    span = int(match[1]) * unit
    whole = abs(span) // 1_000
    return min(whole, INT64_MAX) if span >= 0 else -min(whole, INT64_MAX)


def _parse_keys(text: str) -> frozenset[bytes]:
    """Return the keys of a JSON array of texts or {"base64": ...}; raises InvalidInputError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise _keys_fault("no JSON array", text)
    if not found:
        raise InvalidInputError(
            "option keys: the array is empty (expected one key or more, found none). "
            "Leave the option out to read the records of all keys."
        )
    return frozenset(_key_bytes(key) for key in found)


def _key_bytes(key: Any) -> bytes:
    try:
        if isinstance(key, str):
            return key.encode()
        if isinstance(key, dict) and key.keys() == {"base64"}:
            return base64.b64decode(key["base64"], validate=True)
    except (ValueError, TypeError):  # half of a surrogate pair; no base64
        pass
    raise _keys_fault("no key", json.dumps(key))


def _parse_moment(text: str) -> TableMoment:
    """Return the moment that a materialized table gives; raises InvalidInputError."""
    try:
        return TableMoment.of_json(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as fault:
        raise InvalidInputError(
            f"option completes: this is not the moment of a materialized table ({fault!r}). Leave "
            "the option out; MaterializedTable.df() sets it."
        ) from fault


def _keys_fault(problem: str, found: str) -> InvalidInputError:
    shown = found if len(found) <= _SHOWN else found[:_SHOWN] + "..."
    return InvalidInputError(
        f"option keys: {problem} (expected an array such as {_KEYS_EXAMPLE}, found {shown}). "
        "Write a key as text, or its bytes in base64."
    )


def _check_inert(options: Mapping[str, str]) -> None:
    """Refuse malformed values of options that tune Spark's Kafka client, as Spark does."""
    for name in INERT_INTEGERS:
        text = options.get(name.lower(), "0").strip()
        if not _INTEGER.fullmatch(text) or abs(int(text)) > INT64_MAX:
            raise InvalidInputError(f"{name} must be an integer, got {text!r}")


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return the option's value, the first choice when it is not given."""
    text = options.get(name.lower(), choices[0]).strip().lower()
    if text not in choices:
        raise InvalidInputError(f"{name} must be {' or '.join(choices)}, got {text!r}")
    return text


def _refuse(offsets: StartOrEnd, refused: int, all_: str, one: str, name: str) -> None:
    if offsets.everywhere == refused:
        raise InvalidInputError(f"{all_} can't be {name} for batch queries on Kafka")
    for place, offset in (*offsets.partitions.items(), *offsets.topics.items()):
        if offset == refused:
            raise InvalidInputError(f"{one} for {place} can't be {name} for batch queries on Kafka")


def _check_order(
    start: StartOrEnd | StartOrEndTime | None,
    end: StartOrEnd | StartOrEndTime | None,
    noun: str,
    name: str,
) -> None:
    """Check start against end where both name partitions (Spark: checkOffsetLimitValidity)."""
    if start is None or end is None or not start.is_specific or not end.is_specific:
        return
    has_topics = any(isinstance(given, StartOrEnd) and given.topics for given in (start, end))
    if not has_topics and start.partitions.keys() != end.partitions.keys():
        raise InvalidInputError(
            "[MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET] The specified start "
            "offset and end offset should have the same topic-partitions. "
            f"starting{name}: {listed(start.partitions)}; ending{name}: {listed(end.partitions)}"
        )
    for partition, first in start.partitions.items():
        last = end.partitions.get(partition, LATEST)
        if first > last >= 0:
            raise InvalidInputError(
                f"[UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET] The specified start {noun} "
                f"{first} is greater than the end {noun} {last} for topic {partition.topic} "
                f"partition {partition.partition}: starting{name}, ending{name}"
            )


def _check_limits(options: SourceOptions) -> None:
    least, most = options.min_offsets_per_trigger, options.max_offsets_per_trigger
    if least is not None and most is not None and least > most:
        raise InvalidInputError(
            f"The value of minOffsetPerTrigger({least}) is higher than the "
            f"maxOffsetsPerTrigger({most})."
        )


def _check_latest_view(options: SourceOptions) -> None:
    """Refuse a start and smaller pieces: a view reads all records below its end."""
    start = options.starting_offsets
    if options.starting_time is not None or (start is not None and start.everywhere != EARLIEST):
        raise InvalidInputError(
            "startingOffsets, startingOffsetsByTimestamp and startingTimestamp cannot be set with "
            "view=latest: the latest record of a key is looked for from the earliest offset; "
            "endingOffsets says as of which offset"
        )
    for name, given in (
        ("minPartitions", options.min_partitions),
        ("maxRecordsPerPartition", options.max_records_per_partition),
    ):
        if given is not None:
            raise InvalidInputError(
                f"{name} cannot be set with view=latest: it reads one task per log partition"
            )
