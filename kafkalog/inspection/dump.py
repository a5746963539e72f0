"""Dump a file of a log, entry by entry: each of Kafka's file types, and the `commit` journal.

`dump_file` yields one dict per entry: `type`, then Kafka's field names. Damage is an entry of type
`finding`, not an error. `dump_text` makes the lines that Kafka's tool prints.

Kafka: DumpLogSegments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kafkalog.errors import CorruptLogError, InvalidInputError, StorageError
from kafkalog.inspection.dump_entry import DumpOptions, Entry, finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.checkpoints import (
    EPOCH_FIELDS,
    OFFSET_FIELDS,
    checkpoint_entries,
)

ROOT_CHECKPOINTS: Final = (
    layout.RECOVERY_POINT_CHECKPOINT,
    layout.LOG_START_CHECKPOINT,
    layout.REPLICATION_CHECKPOINT,
    layout.CLEANER_CHECKPOINT,
)
"""The checkpoints of offsets in the root."""
_PROPERTIES: Final = (layout.META_PROPERTIES, layout.META_ASIDE, layout.PARTITION_METADATA)


def dump_file(path: Path, options: DumpOptions | None = None) -> Iterator[Entry]:
    """Yield the entries of a file; its name decides its type.

    Raises InvalidInputError for a name of unknown type, StorageError for an unreadable file.
    """
    options = DumpOptions() if options is None else options
    try:
        yield from _dump(path, options)
    except OSError as fault:
        files.pass_on(fault)
        raise StorageError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    except CorruptLogError as fault:
        yield finding(path, "damage", fault.position, fault.expected, fault.found)


def _dump(path: Path, options: DumpOptions) -> Iterator[Entry]:
    parsed = layout.parse_segment_file(path.name)
    if parsed is not None:
        base_offset, suffix, _ = parsed
        if suffix == layout.LOG:
            from kafkalog.inspection import dump_log

            yield {"type": "log", "startOffset": base_offset}
            yield from dump_log.batches(path, base_offset, options)
        elif suffix == layout.TRANSACTION_INDEX:
            yield from _transaction_index(path)
        elif suffix == layout.SNAPSHOT:
            yield from _producer_snapshot(path)
        else:
            from kafkalog.inspection import dump_index

            yield from dump_index.entries(path, options)
        return
    snapshot = layout.parse_metadata_snapshot(path.name)
    if snapshot is not None:
        from kafkalog.inspection import dump_log

        yield {"type": "metadata snapshot", "endOffset": snapshot[0], "epoch": snapshot[1]}
        yield from dump_log.batches(path, 0, options)
    elif path.name in (layout.COMMIT, layout.COMMIT_RELEASED):
        yield from _journal(path)
    elif path.name == layout.LEADER_EPOCH_CHECKPOINT:
        found = checkpoint_entries(path, files.read_file(path), EPOCH_FIELDS)
        for _, (epoch, start_offset) in found:
            yield {"type": "leader epoch", "epoch": epoch, "startOffset": start_offset}
    elif path.name in ROOT_CHECKPOINTS:
        found = checkpoint_entries(path, files.read_file(path), OFFSET_FIELDS)
        for _, (topic, partition, offset) in found:
            yield {"type": "checkpoint", "topic": topic, "partition": partition, "offset": offset}
    elif path.name in _PROPERTIES:
        yield {"type": "properties", **properties(path)}
    else:
        raise InvalidInputError(
            f"{path}: a file of this name cannot be dumped; expected a segment's file "
            f"(20 digits and {', '.join((*layout.SEGMENT_SUFFIXES, layout.SNAPSHOT))}), "
            f"a checkpoint, {layout.PARTITION_METADATA} or {layout.COMMIT}"
        )


def _transaction_index(path: Path) -> Iterator[Entry]:
    entry = layout.TRANSACTION_INDEX_ENTRY
    names = ("version", "producerId", "firstOffset", "lastOffset", "lastStableOffset")
    data = files.read_file(path)
    whole = len(data) - len(data) % entry.size
    for position in range(0, whole, entry.size):
        fields = entry.unpack_from(data, position)
        yield {"type": "aborted transaction", **dict(zip(names, fields, strict=True))}
        if fields[0] != 0:
            found = data[position : position + 2].hex()
            yield finding(path, "damage", position, "entry version 0", found)
            return
    if whole < len(data):
        yield finding(path, "damage", whole, f"{entry.size} bytes", f"{len(data) - whole} bytes")


def _producer_snapshot(path: Path) -> Iterator[Entry]:
    from kafkalog.storage_engine.transactions.producer_snapshot import parse_snapshot

    for entry in parse_snapshot(files.read_file(path), path):
        first_offset = entry.current_txn_first_offset
        found: Entry = {
            "type": "producer",
            "producerId": entry.producer_id,
            "producerEpoch": entry.producer_epoch,
            "coordinatorEpoch": entry.coordinator_epoch,
            "currentTxnFirstOffset": None if first_offset < 0 else first_offset,
            "lastTimestamp": entry.timestamp,
        }
        if entry.last_offset >= 0:
            found["firstSequence"] = _first_sequence(entry.last_sequence, entry.offset_delta)
            found["lastSequence"] = entry.last_sequence
            found["lastOffset"] = entry.last_offset
            found["offsetDelta"] = entry.offset_delta
            found["timestamp"] = entry.timestamp
        yield found


def _first_sequence(last_sequence: int, offset_delta: int) -> int:
    """Return a batch's first sequence number; numbers wrap to 0 after the largest int32."""
    first = last_sequence - offset_delta
    return first if first >= 0 else first + layout.INT32_MAX + 1


def _shown(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace"))


def properties(path: Path) -> dict[str, str]:
    """Return the names and values in `partition.metadata` or `meta.properties`.

    Raises CorruptLogError for a line that is neither a pair nor a comment.
    """
    separator = ":" if path.name == layout.PARTITION_METADATA else "="
    found: dict[str, str] = {}
    position = 0
    for line in files.read_file(path).split(b"\n"):
        text = line.decode("utf-8", "replace").strip()
        if text and not text.startswith(("#", "!")):
            name, separated, value = text.partition(separator)
            if not separated:
                raise CorruptLogError(
                    path, position, f"a name, {separator!r} and a value", _shown(line)
                )
            found[name.strip()] = value.strip()
        position += len(line) + 1
    return found


def _journal(path: Path) -> Iterator[Entry]:
    from kafkalog.storage_engine.metadata.journal import Journal

    if not path.exists():
        raise FileNotFoundError(2, "no such file")
    header, records = Journal(path).records()
    yield {"type": "journal", **header}
    for position, size, number, change in records:
        yield {
            "type": "commit",
            "number": number,
            "position": position,
            "size": size,
            "isPublished": position + size <= header["publishedEnd"],
            "change": change,
        }
