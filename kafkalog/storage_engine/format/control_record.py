"""Read the record of a control batch: the end of a transaction, or a message of a quorum.

A *control batch* has one record, which consumers do not see. Its key is a version and a type. The
types ABORT and COMMIT (the *markers*) end a transaction; their value is a version and the epoch of
the coordinator that wrote it. A control batch without records is the remains of a cleaned marker
and has no effect.

Later versions are read like the known ones, as Kafka's format promises.

Kafka: ControlRecordType, EndTransactionMarker, DefaultRecord.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.format.batch import BatchHeader, Buffer

__all__ = ["ControlRecord", "read_control_record"]

_MARKERS = (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)
_VARINT_SIZE_MAX = 5
_VARLONG_SIZE_MAX = 10
_DECOMPRESSED_MAX = 1 << 20
"""Control batches are never compressed in practice; this bounds the memory of a bomb."""


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """The first record of a control batch.

    `type` is the stored number (`layout.CONTROL_TYPES` has the names; others are of a later Kafka),
    `version` that of the key. `coordinator_epoch` is -1 except in markers. `timestamp` is the
    record's own in ms; None means the batch's largest, which it equals in every batch of Kafka's.
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
    error's message. Raises CorruptBatchError for a record of a wrong size, a key below 4 bytes, a
    marker's value below 6 bytes, and a negative version.
    """
    if not header.is_control or header.magic != layout.MAGIC or header.records_count == 0:
        return None
    try:
        if header.records_count < 0:
            _fail("a count of records", header.records_count)
        with memoryview(batch) as view:
            section = view[position + layout.BATCH_OVERHEAD : position + header.size]
            data = bytes(compression.decompress(header.codec, section, limit=_DECOMPRESSED_MAX))
        timestamp_delta, key, value = _first_record(data, is_only=header.records_count == 1)
        timestamp = header.base_timestamp + timestamp_delta
        if header.timestamp_type == layout.LOG_APPEND_TIME:
            timestamp = header.max_timestamp
        return _control_record(key, value, timestamp)
    except ValueError as fault:
        words = fault.words if isinstance(fault, _Fault) else ("records that decompress", fault)
        place = position if file_position is None else file_position
        raise CorruptBatchError(path, place, *words) from fault


def _control_record(key: bytes | None, value: bytes | None, timestamp: int) -> ControlRecord:
    if key is None or len(key) < layout.CONTROL_KEY.size:
        _fail(f"a control record's key of at least {layout.CONTROL_KEY.size} bytes", _sized(key))
    version, type_number = layout.CONTROL_KEY.unpack_from(key)
    if version < 0:
        _fail("a control record's key of version 0 or later", f"version {version}")
    if type_number not in _MARKERS:
        return ControlRecord(type_number, version, timestamp=timestamp)
    if value is None or len(value) < layout.END_TXN_VALUE.size:
        _fail(f"a marker's value of at least {layout.END_TXN_VALUE.size} bytes", _sized(value))
    value_version, coordinator_epoch = layout.END_TXN_VALUE.unpack_from(value)
    if value_version < 0:
        _fail("a marker's value of version 0 or later", f"version {value_version}")
    return ControlRecord(type_number, version, coordinator_epoch, timestamp)


def _first_record(data: bytes, *, is_only: bool) -> tuple[int, bytes | None, bytes | None]:
    """Return (timestamp delta, key, value) of the first record of a record section."""
    fields = _Fields(data)
    size = fields.varint()
    start = fields.position
    end = start + size
    if not 0 <= size <= len(data) - start:
        _fail(f"a record of at most {len(data) - start} bytes", f"one of {size}")
    if is_only and end != len(data):
        _fail("one record", f"{len(data) - end} bytes after it")
    fields.end = end
    fields.skip(1)  # attributes, unused
    timestamp_delta = fields.varlong()
    fields.varint()  # offset delta
    key = fields.sized()
    value = fields.sized()
    headers_count = fields.varint()
    if not 0 <= headers_count <= end - fields.position:
        _fail(f"at most {end - fields.position} headers", headers_count)
    for _ in range(headers_count):
        if fields.sized() is None:
            _fail("a header's key", "none")
        fields.sized()
    if fields.position != end:
        _fail(f"a record of {size} bytes", f"fields of {fields.position - start}")
    return timestamp_delta, key, value


class _Fields:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.end = len(data)

    def skip(self, size: int) -> None:
        if size > self.end - self.position:
            _fail(f"{size} bytes more in a record", f"{self.end - self.position}")
        self.position += size

    def sized(self) -> bytes | None:
        size = self.varint()
        if size < 0:
            return None
        start = self.position
        self.skip(size)
        return self.data[start : self.position]

    def varint(self) -> int:
        return self._zigzag(_VARINT_SIZE_MAX, 32)

    def varlong(self) -> int:
        return self._zigzag(_VARLONG_SIZE_MAX, 64)

    def _zigzag(self, size_max: int, bits: int) -> int:
        number = 0
        for place in range(size_max):
            if self.position >= self.end:
                _fail("a number", "the end of the record")
            byte = self.data[self.position]
            self.position += 1
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                number &= (1 << bits) - 1
                return (number >> 1) ^ -(number & 1)
        _fail(f"a number of at most {size_max} bytes", "a longer one")


def _sized(data: bytes | None) -> str:
    return "null" if data is None else f"{len(data)} bytes"


class _Fault(ValueError):
    def __init__(self, expected: object, found: object) -> None:
        super().__init__(expected, found)
        self.words = (expected, found)


def _fail(expected: object, found: object) -> NoReturn:
    raise _Fault(expected, found)
