"""Plan what happens to the batches of a run: copy, empty, rebuild, or merge with neighbours.

Kafka filters each batch alone, which leaves many small batches. Here neighbouring batches are
merged up to a size, if one header is true for all records. They need equal codec, timestamp type,
leader epoch and delete horizon, and with LogAppendTime equal times. A batch without a horizon may
join if it has no tombstone. Control and transactional batches, and a producer's last batch, are not
merged.
A merged batch has the first base offset, the last offset, and no producer.

A batch that fills half of the size is copied. Sizes are counted before compression, so that the
next round does not merge the same records again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.rewrite.merge import codes, kernels
from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.retention_rules import Retained
    from kafkalog.storage_engine.metadata.config import TopicConfig
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.tables import BatchTable, Integers, RecordTable

MERGE_SIZE: Final = 1 << 16
"""Bytes of records in a merged batch, before compression; our writers use the same size.

Twice the size saved 0.4 % more bytes, half of it took 2.5 % more (measured, lz4).
"""


def merge_size(config: TopicConfig) -> int:
    """Return the bytes of records to merge, so that no batch exceeds max.message.bytes.

    Records may take half as much again, and compression may enlarge them.
    """
    return max(1, min(MERGE_SIZE, config.max_message_bytes // 2))


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The plan for the b batches of a run, of whose records r stay."""

    table: BatchTable
    """Their headers for those that are rebuilt, all v2."""
    batches: Integers
    """(9, b) for `kernels.plan_outputs`, which documents the rows."""
    rows: Integers
    """(r) indexes of the records that stay."""
    bounds: Integers
    """(b + 1) the range of each batch in `rows`."""


def plan_run(
    run: Chunk,
    records: RecordTable,
    retained: Retained,
    *,
    config: TopicConfig,
    new_delete_horizon_ms: int | None,
    merges: bool,
) -> MergePlan:
    """Plan each batch of a run, given which records stay.

    Batches that get a horizon get `new_delete_horizon_ms`. Rebuilt batches get the codec that
    `compression.type` names. Raises CorruptBatchError if the records do not match their batches.
    """
    source = run.table
    measured = np.empty((3, len(source)), dtype=np.int64)
    keep = np.ascontiguousarray(retained.keep)
    if kernels.measure_kept(records.fields, records.batch_index, keep, measured):
        position = run.file_position + int(source.positions[0])
        raise CorruptBatchError(run.path, position, "records within their batches", "others")
    table = _rewritten(source, retained, measured, config, new_delete_horizon_ms)
    actions = _actions(source, retained, merges=merges)
    attributes = table.attributes
    has_horizon = (attributes & layout.DELETE_HORIZON_BIT) != 0
    is_append_time = (attributes & layout.TIMESTAMP_TYPE_BIT) != 0
    rows = np.flatnonzero(keep)
    batches = np.stack(
        (
            actions,
            attributes & (layout.CODEC_MASK | layout.TIMESTAMP_TYPE_BIT),
            table.leader_epochs,
            np.where(is_append_time, table.max_timestamps, -1),
            np.where(has_horizon, table.base_timestamps, -1),
            retained.tombstones,
            table.base_offsets,
            table.last_offsets,
            measured[0],
        )
    ).astype(np.int64, copy=False)
    bounds = np.searchsorted(records.batch_index[rows], np.arange(len(source) + 1))
    return MergePlan(table, batches, rows, bounds.astype(np.int64, copy=False))


def _rewritten(
    source: BatchTable,
    retained: Retained,
    measured: Integers,
    config: TopicConfig,
    new_delete_horizon_ms: int | None,
) -> BatchTable:
    """Return the headers of rebuilt batches; `measured` (3, b) is of `kernels.measure_kept`."""
    table = _converted(source, measured[1], measured[2]) if source.has_messages else source
    attributes = np.where(
        source.is_control, source.attributes, rebuilt_attributes(source.attributes, config)
    )
    base_timestamps = source.base_timestamps
    if new_delete_horizon_ms is not None and retained.gets_horizon.any():
        attributes |= np.where(retained.gets_horizon, layout.DELETE_HORIZON_BIT, 0)
        base_timestamps = np.where(retained.gets_horizon, new_delete_horizon_ms, base_timestamps)
    return replace(table, attributes=attributes, base_timestamps=base_timestamps)


def _converted(table: BatchTable, first_offsets: Integers, last_offsets: Integers) -> BatchTable:
    """Return v2 headers for messages v0 and v1; rows of batches v2 stay unchanged.

    A message becomes a batch of one record. A wrapper becomes one batch, from its first remaining
    record to its last. A message without remaining records leaves no empty batch (C93), because a
    wrapper does not have its first offset. Records of v0 become CreateTime with timestamp -1. The
    codec stays. Kafka: MemoryRecords.filterTo (KAFKA-13093), which never copies an old message.

    first_offsets, last_offsets: int64 (b,), of the records that each row keeps.
    """
    is_message = table.is_message
    return replace(
        table,
        base_offsets=np.where(is_message, first_offsets, table.base_offsets),
        last_offsets=np.where(is_message, last_offsets, table.last_offsets),
        magics=np.full_like(table.magics, layout.MAGIC),
    )


def _actions(source: BatchTable, retained: Retained, *, merges: bool) -> Integers:
    """Return the action for each batch (b), a constant of `codes`."""
    is_message = source.is_message
    holds = retained.kept > 0
    stays = ~is_message & ~retained.gets_horizon & (retained.kept == source.counts)
    is_single = (source.attributes & (layout.CONTROL_BIT | layout.TRANSACTIONAL_BIT)) != 0
    is_single |= (source.producer_ids >= 0) & retained.stays_empty  # its producer's last
    is_single |= not merges
    return np.select(
        [
            holds & is_single & stays,
            holds & is_single,
            holds & stays,
            holds,
            retained.stays_empty & ~is_message,
        ],
        [
            codes.COPY,
            codes.REBUILD,
            codes.WHOLE,
            codes.CHANGED,
            codes.EMPTY,
        ],
        codes.DROP,
    )


def rebuilt_attributes(attributes: Integers, config: TopicConfig) -> Integers:
    """Return the attributes of data batches (b) with the codec of the topic."""
    if config.compression_type == "producer":
        return attributes.copy()
    name = config.compression_type
    codec = layout.CODEC_NONE if name == "uncompressed" else layout.CODECS[name]
    return (attributes & ~layout.CODEC_MASK) | codec
