"""What becomes of the batches of a run: copied, emptied, rebuilt, or one with their neighbours.

Kafka filters each batch by itself, so survivors end up in crumbs, each with its header and
compressed alone. Here batches are refilled from their neighbours, in offset order, up to a size,
wherever the one header that they get says of every record what its own said: neither control nor
transactional ones; of the same codec, timestamp type and leader epoch; with LogAppendTime only of
the same time, since every record reads it; of the same delete horizon, but that a batch without one
may join if it holds no tombstone. The first base offset and the last offset are kept. A producer's
last batch stays by itself; any other loses its producer's id when it becomes part of another.

What still fills half of the size is copied as it is. Sizes are those of the records themselves,
before compression, and the same whatever batch they are in: so what was merged once is found full,
and not encoded again by the next round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kafkalog.cleaner.rewrite.conversion import converted
from kafkalog.cleaner.rewrite.merge import codes, kernels
from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.retention_rules import Retained
    from kafkalog.storage_engine.metadata.config import TopicConfig
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.tables import BatchTable, Integers, RecordTable

__all__ = ["MERGE_SIZE", "Plan", "merge_size", "plan_run"]

MERGE_SIZE: Final = 1 << 16
"""Bytes of records that batches are refilled up to, before compression: what our writers fill too.

Twice as many saved 0.4 % more bytes, half as many took 2.5 % more (measured, lz4)."""


def merge_size(config: TopicConfig) -> int:
    """Return the bytes of records to refill batches up to, so that none exceeds max.message.bytes.

    Records take up to half as much again beside what is counted of them, and compression may
    enlarge what it cannot compress.
    """
    return max(1, min(MERGE_SIZE, config.max_message_bytes // 2))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done with the b batches of a run, of whose records r stay."""

    table: BatchTable
    """Their headers as they are to be written, where they are written anew: all of them v2."""
    batches: Integers
    """(9, b) for `kernels.plan_outputs`, which says what the rows are."""
    rows: Integers
    """(r) the records that stay, as indexes into the run's."""
    bounds: Integers
    """(b + 1) where the rows of each batch begin, and end."""


def plan_run(
    run: Chunk,
    records: RecordTable,
    retained: Retained,
    *,
    config: TopicConfig,
    new_delete_horizon_ms: int | None,
    merges: bool,
) -> Plan:
    """Say what becomes of each batch, given what was decided about its records.

    `new_delete_horizon_ms` is for batches that get one. A batch that is written anew takes the
    codec that the topic's `compression.type` names, if it names one. Raises CorruptBatchError where
    the records are not what the batches say.
    """
    source = run.table
    measured = np.empty((3, len(source)), dtype=np.int64)
    keep = np.ascontiguousarray(retained.keep)
    if kernels.measure_kept(records.fields, records.batch_index, keep, measured):
        position = run.file_position + int(source.positions[0])
        raise CorruptBatchError(run.path, position, "records within their batches", "others")
    table = _rewritten(source, retained, measured, config, new_delete_horizon_ms)
    actions = _actions(kernels, source, retained, merges=merges)
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
    return Plan(table, batches, rows, bounds.astype(np.int64, copy=False))


def _rewritten(
    source: BatchTable,
    retained: Retained,
    measured: Integers,
    config: TopicConfig,
    new_delete_horizon_ms: int | None,
) -> BatchTable:
    """Return the headers as they are where batches are written anew.

    `measured` (3, b) is of `kernels.measure_kept`.
    """
    is_control = (source.attributes & layout.CONTROL_BIT) != 0
    has_messages = source.is_message.any()
    table = converted(source, measured[1], measured[2]) if has_messages else source
    attributes = np.where(
        is_control, source.attributes, rebuilt_attributes(source.attributes, config)
    )
    base_timestamps = source.base_timestamps
    if new_delete_horizon_ms is not None and retained.gets_horizon.any():
        attributes |= np.where(retained.gets_horizon, layout.DELETE_HORIZON_BIT, 0)
        base_timestamps = np.where(retained.gets_horizon, new_delete_horizon_ms, base_timestamps)
    return replace(table, attributes=attributes, base_timestamps=base_timestamps)


def _actions(kernels: Any, source: BatchTable, retained: Retained, *, merges: bool) -> Integers:
    """Say what is to be done with each batch (b), in the constants of the kernels."""
    is_message = source.is_message
    holds = retained.kept > 0
    stays = ~is_message & ~retained.gets_horizon & (retained.kept == source.counts)
    is_single = (source.attributes & (layout.CONTROL_BIT | layout.TRANSACTIONAL_BIT)) != 0
    is_single |= (source.producer_ids >= 0) & retained.stays_empty  # its producer's last
    is_single |= not merges
    return np.select(
        [
            retained.is_opaque,
            holds & is_single & stays,
            holds & is_single,
            holds & stays,
            holds,
            retained.stays_empty & ~is_message,
        ],
        [
            codes.COPY,
            codes.COPY,
            codes.REBUILD,
            codes.WHOLE,
            codes.CHANGED,
            codes.EMPTY,
        ],
        codes.DROP,
    )


def rebuilt_attributes(attributes: Integers, config: TopicConfig) -> Integers:
    """Return the attributes of data batches (b) with the codec they are written anew with."""
    if config.compression_type == "producer":
        return attributes.copy()
    name = config.compression_type
    codec = layout.CODEC_NONE if name == "uncompressed" else layout.CODECS[name]
    return (attributes & ~layout.CODEC_MASK) | codec
