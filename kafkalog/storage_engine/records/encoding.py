"""Encode Arrow columns as finished record batches.

Batches are filled in the order of the rows, up to a size. Each is complete, with its checksum. Only
its place in the log is missing, which the checksum does not cover (`stamping`).

Kafka: RecordAccumulator, MemoryRecordsBuilder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import seal_batches
from kafkalog.storage_engine.records import codes
from kafkalog.storage_engine.records.kernels import encode as encode_kernels

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(slots=True)
class Encoded:
    """Finished batches, one after the other in `data`, which is writable.

    Base offsets count from 0 in each group and the leader epoch is -1, to be stamped.

    - positions, counts: byte position and number of records of each batch
    - ends: for each group, the number of batches up to its end
    """

    data: memoryview
    positions: list[int]
    counts: list[int]
    ends: list[int]


def encode(
    key: pa.Array | None,
    value: pa.Array | None,
    headers: pa.Array | None,
    timestamps: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    *,
    batch_size: int,
    codec: int,
    level: int | None,
    timestamp_type: int,
    max_message_bytes: int,
    groups: npt.NDArray[np.int64] | None = None,
) -> Encoded:
    """Encode `rows` (indexes into the columns, in the order to write) into batches.

    - key, value: binary or string; None is a column of nulls. headers: a list of key and value.
    - timestamps: int64 (m,) ms, one for each row of the columns; with LogAppendTime the clock's
    - batch_size: bytes before compression; only a single larger record exceeds it
    - level: None is the codec's default
    - groups: int64 (g,), the first index into `rows` of each group, ascending from 0; None is one
      group. A batch never spans two groups, and the offsets of each group begin at 0.

    Raises InvalidInputError for a record that no batch of `max_message_bytes` can hold (with row
    and size). A header without a key, columns of other types or lengths, and an unknown codec or
    level raise it too.
    """
    from kafkalog.storage_engine.records import columns

    count = len(timestamps)
    keys = columns.binary_column(key, count, "key")
    values = columns.binary_column(value, count, "value")
    header = columns.header_column(headers, count)
    timestamps = np.ascontiguousarray(timestamps, dtype=np.int64)
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    groups = np.zeros(1, dtype=np.int64) if groups is None else groups
    body_sizes = np.empty(len(rows), dtype=np.int64)
    # A large record may fit once compressed, but a reader refuses one above SIZE_MAX as a bomb.
    limit = max_message_bytes if codec == layout.CODEC_NONE else compression.SIZE_MAX
    plan = np.empty((codes.PLAN_FIELDS, len(rows)), dtype=np.int64)
    status, result, row = encode_kernels.plan_batches(
        keys.places,
        keys.data.size,
        values.places,
        values.data.size,
        header.lists,
        header.keys.places,
        header.keys.data.size,
        header.values.places,
        header.values.data.size,
        timestamps,
        rows,
        groups,
        min(batch_size, max_message_bytes),
        limit,
        body_sizes,
        plan,
    )
    if status == codes.TOO_LARGE and codec != layout.CODEC_NONE:
        _too_large(
            row,
            result,
            limit,
            f"set compression.type=uncompressed and max.message.bytes to at least {result}, "
            "because no compressed batch has more",
        )
    if status != codes.OK:
        _report(status, result, row, limit)
    batches = np.ascontiguousarray(plan[:, :result])
    sizes = batches[2]
    target = columns.allocate(int(sizes.sum()))
    written = encode_kernels.write_records(
        target,
        keys.data,
        keys.places,
        values.data,
        values.places,
        header.lists,
        header.keys.data,
        header.keys.places,
        header.values.data,
        header.values.places,
        timestamps,
        rows,
        body_sizes,
        batches,
    )
    if written != len(target):
        raise InvalidInputError("the columns were changed while they were written")
    data = target.data
    timestamp_bit = layout.TIMESTAMP_TYPE_BIT if timestamp_type else 0
    if codec == layout.CODEC_NONE:
        return _sealed(data, batches, groups, [timestamp_bit] * len(sizes))
    return _compressed(
        data,
        batches,
        groups,
        rows,
        codec=codec,
        level=level,
        timestamp_bit=timestamp_bit,
        max_message_bytes=max_message_bytes,
    )


def _compressed(
    data: memoryview,
    batches: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    *,
    codec: int,
    level: int | None,
    timestamp_bit: int,
    max_message_bytes: int,
) -> Encoded:
    """Compress the records of each batch. batches: int64 (5, b); their sizes change."""
    attributes = []
    parts: list[bytes] = []
    start = 0
    for batch, size in enumerate(batches[2].tolist()):
        section = data[start + layout.BATCH_OVERHEAD : start + size]
        part = compression.compress(codec, section, level)
        attributes.append(timestamp_bit | codec)
        if layout.BATCH_OVERHEAD + len(part) > max_message_bytes:
            # If compression enlarges a batch past the limit, write it uncompressed, if that fits.
            if size > max_message_bytes:
                packed = layout.BATCH_OVERHEAD + len(part)
                _too_large(int(rows[batches[0, batch]]), packed, max_message_bytes)
            part = bytes(section)
            attributes[-1] = timestamp_bit
        parts += (bytes(layout.BATCH_OVERHEAD), part)
        batches[2, batch] = layout.BATCH_OVERHEAD + len(part)
        start += size
    return _sealed(memoryview(bytearray().join(parts)), batches, groups, attributes)


def _sealed(
    data: memoryview,
    batches: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    attributes: Sequence[int],
) -> Encoded:
    """Write the headers. batches: int64 (5, b) as `encode.plan_batches` leaves it."""
    if batches.shape[1] == 1:  # few rows; the same, faster
        first, end, size, *times = batches[:, 0].tolist()
        seal_batches(data, [(0, size, 0, end - first, *times, attributes[0])])
        return Encoded(data, [0], [end - first], [1])
    ends = np.cumsum(batches[2])
    positions = (ends - batches[2]).tolist()
    counts = (batches[1] - batches[0]).tolist()
    group_ends = [len(counts)]
    if len(groups) > 1:
        group_of = np.searchsorted(groups, batches[0], side="right") - 1
        batches[0] -= groups[group_of]
        group_ends = np.searchsorted(group_of, np.arange(len(groups)), side="right").tolist()
    first, _, sizes, base_timestamps, max_timestamps = batches.tolist()
    times = base_timestamps, max_timestamps
    seal_batches(data, zip(positions, sizes, first, counts, *times, attributes, strict=True))
    return Encoded(data, positions, counts, group_ends)


def _too_large(
    row: int, size: int, limit: int, advice: str = "raise max.message.bytes"
) -> NoReturn:
    if size > layout.INT32_MAX:
        advice = "no batch of Kafka's holds it, so store the value elsewhere"
    raise InvalidInputError(
        f"row {row}: the record is too large for a batch (expected at most {limit} bytes, found "
        f"{size}); {advice}"
    )


def _report(status: int, size: int, row: int, limit: int) -> NoReturn:
    if status == codes.TOO_LARGE:
        _too_large(row, size, limit)
    if status == codes.BAD_HEADER_KEY:
        raise InvalidInputError(f"row {row}: a header's key was expected, found null")
    raise InvalidInputError(f"row {row}: the columns have no such row, or it lies outside its data")
