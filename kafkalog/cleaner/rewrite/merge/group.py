"""Encode records of several batches as one, and hold records that may still be merged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.rewrite.merge import kernels
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.records.codes import RECORD_FIELDS
from kafkalog.storage_engine.records.tables import BatchTable, RecordTable

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.config import TopicConfig
    from kafkalog.storage_engine.records.tables import Integers

_POSITIONS: Final = [0, 1, 4, 6, 8]
"""Rows of `RecordTable.fields` that are positions in the arena."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """An encoded batch, and its figures for the indexes."""

    data: bytes
    base_offset: int
    last_offset: int
    max_timestamp: int


class Group:
    """A copy of records that become one batch, kept after their runs are released.

    An open group has fewer bytes than the size of merged batches.
    """

    def __init__(self) -> None:
        self.original: bytes | None = None
        """The bytes of the only batch, if it may still stay unchanged."""
        self._tables: list[BatchTable] = []
        self._parts: list[RecordTable] = []

    def add(
        self, records: RecordTable, table: BatchTable, batches: Integers, rows: Integers
    ) -> None:
        """Copy the records `rows` of `batches`, with the headers.

        Raises InvalidInputError if the rows lie outside their arena.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        gathered = np.empty((RECORD_FIELDS, len(rows)), dtype=np.int64)
        place = (records.arena, records.fields, rows)
        size = kernels.gather_records(*place, np.empty(0, dtype=np.uint8), gathered)
        arena = np.empty(max(size, 0), dtype=np.uint8)
        if size < 0 or (size and kernels.gather_records(*place, arena, gathered) != size):
            raise InvalidInputError("a record table does not fit its records")
        places = np.searchsorted(batches, records.batch_index[rows]).astype(np.int32)
        if self._tables:
            places += sum(len(part) for part in self._tables)
        self._tables.append(table.select(batches))
        self._parts.append(RecordTable(arena, places, gathered, len(batches)))

    def encode(self, config: TopicConfig) -> list[NewBatch]:
        """Return the group as one batch, or as few as max.message.bytes allows."""
        table, records = self._tables[0], self._parts[0]
        if len(self._parts) > 1:
            table = _joined_tables(self._tables)
            records = _joined_records(self._parts)
        return encode(records, table, np.arange(len(table)), np.arange(len(records)), config)


def encode(
    records: RecordTable,
    table: BatchTable,
    batches: Integers,
    rows: Integers,
    config: TopicConfig,
) -> list[NewBatch]:
    """Encode the records `rows` of `batches` (at least one, all v2) as one batch.

    It has the first base offset, the last offset, and any delete horizon of the batches. It keeps a
    producer only if it is of one batch. Several batches that exceed max.message.bytes are halved
    until none does; a single one may exceed it (C97).
    """
    from kafkalog.storage_engine.records.records import rebuild_batch

    first = int(batches[0])
    level = compression_level(config, int(table.attributes[first]) & layout.CODEC_MASK)
    if len(batches) == 1:
        data = rebuild_batch(records, table, first, rows, level=level)
    else:
        header = _merged_header(table, batches)
        no_index = np.zeros(len(records), dtype=np.int32)
        alike = RecordTable(records.arena, no_index, records.fields, 1)
        data = rebuild_batch(alike, header, 0, rows, level=level)
    if len(data) > config.max_message_bytes and len(batches) > 1:
        middle = len(batches) // 2
        cut = int(np.searchsorted(records.batch_index[rows], batches[middle]))
        return [
            *encode(records, table, batches[:middle], rows[:cut], config),
            *encode(records, table, batches[middle:], rows[cut:], config),
        ]
    last = int(table.last_offsets[batches[-1]])
    max_timestamp = parse_header(data).max_timestamp
    return [NewBatch(data, int(table.base_offsets[first]), last, max_timestamp)]


def compression_level(config: TopicConfig, codec: int) -> int | None:
    """Return the topic's level of a codec; None for the default, or if the codec has no levels."""
    levels = {
        layout.CODEC_GZIP: config.compression_gzip_level,
        layout.CODEC_LZ4: config.compression_lz4_level,
        layout.CODEC_ZSTD: config.compression_zstd_level,
    }
    return levels.get(codec)


def _merged_header(table: BatchTable, batches: Integers) -> BatchTable:
    """Return the common header of merged batches (see `plan`)."""
    header = table.select(batches[:1])
    header.last_offsets[:] = table.last_offsets[batches[-1]]
    has_horizon = (table.attributes[batches] & layout.DELETE_HORIZON_BIT) != 0
    if has_horizon.any():
        header.attributes |= layout.DELETE_HORIZON_BIT
        header.base_timestamps[:] = table.base_timestamps[batches[has_horizon.argmax()]]
    for column in (header.producer_ids, header.producer_epochs, header.base_sequences):
        column[:] = -1
    return header


def _joined_tables(tables: list[BatchTable]) -> BatchTable:
    columns = ([getattr(table, field.name) for table in tables] for field in fields(BatchTable))
    return BatchTable(*(np.concatenate(column) for column in columns))


def _joined_records(parts: list[RecordTable]) -> RecordTable:
    """Return the records of all parts, in order, in one arena."""
    ends = np.cumsum([len(part.arena) for part in parts])
    moved = []
    for part, end in zip(parts, ends.tolist(), strict=True):
        columns = part.fields.copy()
        columns[_POSITIONS] += end - len(part.arena)
        moved.append(columns)
    return RecordTable(
        np.concatenate([part.arena for part in parts]),
        np.concatenate([part.batch_index for part in parts]),
        np.concatenate(moved, axis=1),
        sum(part.batch_count for part in parts),
    )
