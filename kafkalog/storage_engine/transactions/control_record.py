"""Read the record of a control batch: the end of a transaction, or a message of a quorum.

A *control batch* has one record, which consumers do not see. Its key is a version and a type. The
types ABORT and COMMIT (the *markers*) end a transaction; their value is a version and the epoch of
the coordinator that wrote it. A control batch without records is the remains of a cleaned marker
and has no effect.

Later versions are read like the known ones, as Kafka's format promises.

Kafka: ControlRecordType, EndTransactionMarker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import BatchHeader, Buffer, parse_header

if TYPE_CHECKING:
    from kafkalog.storage_engine.records.tables import BatchTable

_MARKERS = (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)
_DECOMPRESSED_MAX = 1 << 20
"""Control batches are never compressed in practice; this bounds the memory of a bomb."""


class ControlRecord(NamedTuple):
    """The first record of a control batch.

    The stored number is `type` (`layout.CONTROL_TYPES` has the names; others are of a later Kafka),
    and `version` is that of the key. Only markers have a `coordinator_epoch` other than -1. The
    record's own time in ms is `timestamp`; None means the batch's largest, which it equals in every
    batch of Kafka's.
    """

    type: int
    version: int
    coordinator_epoch: int = -1
    timestamp: int | None = None

    @property
    def is_marker(self) -> bool:
        """Whether the record ends a transaction."""
        return self.type in _MARKERS


def read_control_record(
    batch: Buffer,
    position: int,
    header: BatchHeader,
    *,
    path: Path | str = "control batch",
    file_position: int | None = None,
) -> ControlRecord | None:
    """Return the record of the control batch at `position`, or None if the batch has no records.

    Also returns None for a batch that is not a control batch. The buffer holds the whole batch,
    with a checked checksum. `path` and `file_position` (of the batch in that file) are for the
    error's message. Raises CorruptBatchError for a record that does not decode, a key below 4
    bytes, a marker's value below 6 bytes, and a negative version.
    """
    if not header.is_control or header.magic != layout.MAGIC or header.records_count == 0:
        return None
    import numpy as np

    from kafkalog.storage_engine.records import codes
    from kafkalog.storage_engine.records.kernels import decode
    from kafkalog.storage_engine.records.tables import record_fault

    place = position if file_position is None else file_position
    count = header.records_count
    try:
        with memoryview(batch) as view:
            section = view[position + layout.BATCH_OVERHEAD : position + header.size]
            data = compression.decompress(header.codec, section, limit=_DECOMPRESSED_MAX)
    except ValueError as fault:
        raise CorruptBatchError(path, place, "records that decompress", fault) from fault
    fields = np.empty((codes.RECORD_FIELDS, 1), dtype=np.int64)
    arena = np.frombuffer(data, dtype=np.uint8)
    status = decode.read_record(arena, 0, len(data), fields, 0)
    if status == codes.OK and (count < 0 or (count == 1 and fields[1, 0] != len(data))):
        status = codes.BAD_COUNT
    if status != codes.OK:
        raise CorruptBatchError(path, place, *record_fault(status, 0, count))
    _, _, _, delta, key_at, key_size, value_at, value_size, _ = fields[:, 0].tolist()
    key = None if key_size < 0 else bytes(data[key_at : key_at + key_size])
    value = None if value_size < 0 else bytes(data[value_at : value_at + value_size])
    words = _fault(key, value)
    if words is not None:
        raise CorruptBatchError(path, place, *words)
    assert key is not None
    version, type_number = layout.CONTROL_KEY.unpack_from(key)
    epoch = -1
    if type_number in _MARKERS and value is not None:
        _, epoch = layout.END_TXN_VALUE.unpack_from(value)
    is_append_time = header.timestamp_type == layout.LOG_APPEND_TIME
    timestamp = header.max_timestamp if is_append_time else header.base_timestamp + delta
    return ControlRecord(type_number, version, epoch, timestamp)


def _fault(key: bytes | None, value: bytes | None) -> tuple[str, str] | None:
    """Return (expected, found) if this isn't a control record."""
    size = layout.CONTROL_KEY.size
    if key is None or len(key) < size:
        return f"a control record's key of at least {size} bytes", _sized(key)
    version, type_number = layout.CONTROL_KEY.unpack_from(key)
    if version < 0:
        return "a control record's key of version 0 or later", f"version {version}"
    if type_number not in _MARKERS:
        return None
    size = layout.END_TXN_VALUE.size
    if value is None or len(value) < size:
        return f"a marker's value of at least {size} bytes", _sized(value)
    version, _ = layout.END_TXN_VALUE.unpack_from(value)
    if version < 0:
        return "a marker's value of version 0 or later", f"version {version}"
    return None


def _sized(data: bytes | None) -> str:
    return "null" if data is None else f"{len(data)} bytes"


def batches_of_producers(
    buffer: Buffer, table: BatchTable, *, path: Path | str, file_position: int = 0
) -> Iterator[tuple[BatchHeader, ControlRecord | None]]:
    """Yield the header of each batch that has a producer, and its control record, if any.

    In `path`, the buffer begins at `file_position`. Raises as `read_control_record` does.
    """
    for position in table.positions[table.producer_ids >= 0].tolist():
        header = parse_header(buffer, position)
        yield (
            header,
            read_control_record(
                buffer, position, header, path=path, file_position=file_position + position
            ),
        )
