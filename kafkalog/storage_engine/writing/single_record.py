"""Single records of a producer: normalize one, and convert many to columns.

Staging decides which rows a topic accepts, and words its errors. For most records a few comparisons
show that the topic accepts them. Only the others are staged alone to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import State, TopicState
from kafkalog.storage_engine.records.record_fields import (
    Headers,
    to_bytes,
    to_epoch_ms,
    to_headers,
    to_int64,
)

if TYPE_CHECKING:
    import pyarrow as pa

_OVERHEAD: Final = 36
_HEADER_OVERHEAD: Final = 10
"""The most bytes of a record besides its key, value and headers, and of a header besides its own.
Kafka: DefaultRecord.recordSizeUpperBound."""
_TIME_LIMITS: Final = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")


class SingleRecord(NamedTuple):
    """A future row: the time in epoch ms; partition None if the key decides."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    timestamp: int
    partition: int | None

    @classmethod
    def of(
        cls,
        key: bytes | str | None,
        value: bytes | str | None,
        headers: Headers | None,
        timestamp: int | datetime,
        partition: int | None,
    ) -> Self:
        """Return a record from a caller's arguments; raises InvalidInputError for other types."""
        try:
            return cls(
                to_bytes(key),
                to_bytes(value),
                to_headers(headers),
                to_epoch_ms(timestamp),
                None if partition is None else to_int64(partition),
            )
        except (TypeError, ValueError) as fault:
            raise InvalidInputError(
                "record: expected a key and a value of bytes or text, headers as (text, bytes) "
                f"pairs, a timestamp in epoch ms and a partition's number: {fault}. "
                'Give send("k1", "v1").'
            ) from None

    def size(self) -> int:
        """Return an upper bound of the record's bytes in a batch, before compression."""
        size = _OVERHEAD + len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers or ():
            size += _HEADER_OVERHEAD + len(name.encode()) + len(value or b"")
        return size


def record_batch(
    records: Sequence[SingleRecord], topic: TopicState, keyless: int
) -> pa.RecordBatch:
    """Return records (at least one) as columns, with the partition of each.

    Records without a key and a partition all go to one partition, which `keyless` decides, because
    a commit syncs every partition that it touches. Kafka: BuiltInPartitioner, with a commit for a
    batch.
    """
    import numpy as np
    import pyarrow as pa

    from kafkalog.schema import HEADERS
    from kafkalog.storage_engine.records.records import murmur2_partitions

    keys, values, headers, timestamps, given = zip(*records, strict=True)
    key = pa.array(keys, pa.binary())
    partitions = murmur2_partitions(key, len(topic.partitions)).astype(np.int64)
    present = [number for number, _ in topic.present()]
    partitions[partitions < 0] = present[keyless % len(present)]
    for row, partition in enumerate(given):
        if partition is not None:
            partitions[row] = partition
    columns = {
        "key": key,
        "value": pa.array(values, pa.binary()),
        "timestamp": pa.array(timestamps, pa.int64()),
        "partition": pa.array(partitions),
    }
    if any(headers):
        columns["headers"] = pa.array(headers, HEADERS)
    return pa.RecordBatch.from_pydict(columns)


def with_any_time(state: State, topic: str) -> State:
    """Return the state of a topic alone, without its limits of timestamps.

    The producer checks a record's time when it is sent. At its commit the record may be too old,
    and would stay so for ever while all others wait for it.
    """
    known = state.topic(topic)
    config = {**known.config, **dict.fromkeys(_TIME_LIMITS, str(layout.INT64_MAX))}
    return replace(state, topics={topic: replace(known, config=config)})


@dataclass(frozen=True, slots=True)
class TopicRules:
    """The rules of a topic for records, at one state of the log."""

    topic: TopicState
    needs_keys: bool
    size_max: int
    before_max_ms: int
    after_max_ms: int

    @classmethod
    def of(cls, topic: TopicState) -> Self:
        """Return the rules of a topic's configs."""
        config = TopicConfig.parse(topic.config)
        size_max = min(config.max_message_bytes, compression.SIZE_MAX) - layout.BATCH_OVERHEAD
        before, after = (
            config.message_timestamp_before_max_ms,
            config.message_timestamp_after_max_ms,
        )
        return cls(topic, config.needs_keys, size_max, before, after)

    def surely_takes(self, record: SingleRecord, size: int, now_ms: int) -> bool:
        """Return whether staging would surely accept the record; False if it must be tried."""
        earliest, latest = max(0, now_ms - self.before_max_ms), now_ms + self.after_max_ms
        return (
            size <= self.size_max
            and (record.key is not None or not self.needs_keys)
            and earliest <= record.timestamp <= min(latest, layout.INT64_MAX)
            and (record.partition is None or 0 <= record.partition < len(self.topic.partitions))
            and not self.topic.absent
        )
