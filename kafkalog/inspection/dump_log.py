"""Dump the batches of a `.log` file and their records: the only place with Python per record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kafkalog.errors import CorruptBatchError
from kafkalog.inspection.decoded_record import decoded_control, decoded_record
from kafkalog.inspection.dump_entry import NUMBER_MAX, DumpOptions, Entry, finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.records.kernels.decode import read_varint
from kafkalog.storage_engine.records.tables import Bytes, RecordTable
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.log_scanner import (
    INSPECT,
    FaultKind,
    LogScanner,
    ScannedBatches,
)

TIMESTAMP_TYPES: Final = {-1: "NoTimestampType", 0: "CreateTime", 1: "LogAppendTime"}
_FIELDS: Final = (
    "positions",
    "sizes",
    "base_offsets",
    "last_offsets",
    "leader_epochs",
    "attributes",
    "base_timestamps",
    "max_timestamps",
    "producer_ids",
    "producer_epochs",
    "base_sequences",
    "counts",
    "crcs",
    "magics",
)


def batches(path: Path, base_offset: int, options: DumpOptions) -> Iterator[Entry]:
    """Yield an entry per batch and per problem; with `is_deep` also one per record."""
    fd = files.open_to_read(path)
    try:
        limit = min(os.fstat(fd).st_size, options.max_bytes)
        scan = LogScanner(FileBytes(fd), path, INSPECT, limit=limit, next_offset=base_offset)
        last_offset = -1
        for chunk in scan:
            for batch in range(len(chunk.table)):
                row = {name: int(getattr(chunk.table, name)[batch]) for name in _FIELDS}
                yield _batch(chunk, batch, row)
                if not chunk.is_valid[batch]:
                    place = chunk.position_of(batch)
                    yield finding(path, "checksum", place, f"checksum {row['crcs']:#010x}", "other")
                elif options.is_deep:
                    for entry in _records(chunk, batch, row, options):
                        if entry["type"] == "record":
                            if entry["offset"] != last_offset + 1:
                                yield _gap(path, chunk, batch, last_offset, entry["offset"])
                            last_offset = entry["offset"]
                        yield entry
        scan.look_at_tail()
        if scan.fault is not None and options.max_bytes == NUMBER_MAX:
            kind = "preallocated" if scan.kind is FaultKind.ZEROS else "trailing bytes"
            yield {
                **finding(path, kind, scan.position, "a batch, or the end", scan.fault.found),
                "size": limit - scan.position,
            }
    finally:
        os.close(fd)


def _gap(path: Path, chunk: ScannedBatches, batch: int, before: int, offset: int) -> Entry:
    place = chunk.position_of(batch)
    return {
        **finding(path, "gap", place, f"offset {before + 1}", f"offset {offset}"),
        "before": before,
        "offset": offset,
    }


def _batch(chunk: ScannedBatches, batch: int, row: dict[str, int]) -> Entry:
    attributes = row["attributes"]
    if row["magics"] == layout.MAGIC:
        entry: Entry = {
            "type": "batch",
            "baseOffset": row["base_offsets"],
            "lastOffset": row["last_offsets"],
            "count": row["counts"],
            "baseSequence": row["base_sequences"],
            "lastSequence": _sequence(
                row["base_sequences"], row["last_offsets"] - row["base_offsets"]
            ),
            "producerId": row["producer_ids"],
            "producerEpoch": row["producer_epochs"],
            "partitionLeaderEpoch": row["leader_epochs"],
            "isTransactional": bool(attributes & layout.TRANSACTIONAL_BIT),
            "isControl": bool(attributes & layout.CONTROL_BIT),
            "deleteHorizonMs": row["base_timestamps"]
            if attributes & layout.DELETE_HORIZON_BIT
            else None,
        }
    else:
        entry = {"type": "message", "offset": row["last_offsets"]}
    codec = attributes & layout.CODEC_MASK
    return entry | {
        "position": chunk.position_of(batch),
        "timestampType": TIMESTAMP_TYPES[_timestamp_type(row)],
        "maxTimestamp": row["max_timestamps"],
        "size": row["sizes"],
        "magic": row["magics"],
        "compresscodec": layout.CODEC_NAMES.get(codec, f"unknown({codec})"),
        "crc": row["crcs"],
        "isvalid": bool(chunk.is_valid[batch]),
    }


def _timestamp_type(row: dict[str, int]) -> int:
    if row["magics"] == 0:
        return layout.NO_TIMESTAMP_TYPE
    return int(row["attributes"] & layout.TIMESTAMP_TYPE_BIT != 0)


def _sequence(base_sequence: int, offset_delta: int) -> int:
    """Return a record's sequence number; numbers wrap to 0 after the largest int32."""
    if base_sequence < 0:
        return -1
    return (base_sequence + offset_delta) % (layout.INT32_MAX + 1)


def _records(
    chunk: ScannedBatches, batch: int, row: dict[str, int], options: DumpOptions
) -> Iterator[Entry]:
    if row["counts"] == 0:
        return
    try:
        for table in chunk.records(np.array([batch])):
            for record in range(len(table)):
                yield _record(table, record, row, options)
    except CorruptBatchError as fault:
        place = Path(chunk.path)
        yield finding(place, "records", fault.position, fault.expected, fault.found)


def _record(table: RecordTable, record: int, row: dict[str, int], options: DumpOptions) -> Entry:
    arena = table.arena
    fields = table.fields[:, record].tolist()
    start, _, offset, timestamp, key_at, key_size, value_at, value_size, headers_at = fields
    key = None if key_size < 0 else arena[key_at : key_at + key_size].tobytes()
    value = None if value_size < 0 else arena[value_at : value_at + value_size].tobytes()
    entry: Entry = {
        "type": "record",
        "offset": offset,
        "timestampType": TIMESTAMP_TYPES[_timestamp_type(row)],
        "timestamp": timestamp,
        "keySize": key_size,
        "valueSize": value_size,
    }
    is_control = bool(row["attributes"] & layout.CONTROL_BIT) and row["magics"] == layout.MAGIC
    headers: list[tuple[bytes, bytes | None]] = []
    if row["magics"] == layout.MAGIC:
        headers = _headers(arena, headers_at)
        entry["sequence"] = _sequence(row["base_sequences"], offset - row["base_offsets"])
        entry["headerKeys"] = [name.decode("utf-8", "replace") for name, _ in headers]
    else:
        # A wrong inner message was reported with its set.
        crc = int.from_bytes(arena[start + 12 : start + 16].tobytes(), "big")
        entry |= {"isvalid": True, "crc": crc}
    if is_control:
        entry |= _control(key, value)
    elif options.decoder is not None:
        entry |= decoded_record(options.decoder, offset, key, value)
    elif options.print_data_log:
        entry |= {"key": key, "payload": value}
        if headers:
            entry["headers"] = headers
    return entry


def _headers(arena: Bytes, position: int) -> list[tuple[bytes, bytes | None]]:
    """Return the headers of a record v2; the kernel has checked that they lie within it."""
    count, position = read_varint(arena, position, len(arena))
    found = []
    for _ in range(count):
        size, position = read_varint(arena, position, len(arena))
        name = arena[position : position + size].tobytes()
        size, position = read_varint(arena, position + size, len(arena))
        value = None if size < 0 else arena[position : position + size].tobytes()
        found.append((name, value))
        position += max(size, 0)
    return found


def _control(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    if key is None or len(key) < layout.CONTROL_KEY.size:
        return {"controlType": f"invalid key {(key or b'').hex()!r}"}
    _, number = layout.CONTROL_KEY.unpack_from(key)
    name = layout.CONTROL_TYPES.get(number, "UNKNOWN")
    is_marker = number in (layout.CONTROL_ABORT, layout.CONTROL_COMMIT)
    if is_marker and value is not None and len(value) >= layout.END_TXN_VALUE.size:
        _, coordinator_epoch = layout.END_TXN_VALUE.unpack_from(value)
        return {"endTxnMarker": name, "coordinatorEpoch": coordinator_epoch}
    message = decoded_control(name, value)
    return {"controlType": f"{name}({number})"} if message is None else {"control": message}
