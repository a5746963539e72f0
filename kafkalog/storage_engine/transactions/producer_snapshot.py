"""Producer snapshots: the state of a partition's producers at an offset, in `<offset>.snapshot`.

A process that needs the state at the log's end loads the latest snapshot and replays only the
batches above it. A broker writes a snapshot for every new segment and at a clean shutdown. A
snapshot has only the last batch of each producer. A broker remembers five, to detect duplicates,
until it restarts.

Readers skip a file with a wrong checksum or length, and take the snapshot before it. Kafka's writer
neither renames nor truncates, so a power cut leaves such files; ours appear as a whole.

Kafka: ProducerStateManager.{readSnapshot, writeSnapshot, removeStraySnapshots}, SnapshotFile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment import swaps
from kafkalog.storage_engine.transactions.producers import ProducerEntry, Producers


def pack_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """Return the content of a snapshot file, with the entries in ascending order of their ids.

    A broker writes them in the order of a hash table; readers ignore the order.
    """
    ordered = sorted(entries, key=lambda entry: entry.producer_id)
    body = bytearray(layout.SNAPSHOT_HEADER.size)
    for entry in ordered:
        body += layout.SNAPSHOT_ENTRY.pack(
            entry.producer_id,
            entry.producer_epoch,
            entry.last_sequence,
            entry.last_offset,
            entry.offset_delta,
            entry.timestamp,
            entry.coordinator_epoch,
            entry.current_txn_first_offset,
        )
    header = layout.SNAPSHOT_HEADER
    header.pack_into(body, 0, layout.SNAPSHOT_VERSION, 0, len(ordered))
    crc = crc32c(memoryview(body)[layout.SNAPSHOT_CRC_END :])
    header.pack_into(body, 0, layout.SNAPSHOT_VERSION, crc, len(ordered))
    return bytes(body)


def parse_snapshot(data: Buffer, path: Path | str) -> list[ProducerEntry]:
    """Return the entries of a snapshot file, in the order of the file.

    A producer without a last batch gets the default in all fields of that batch, and a negative
    first offset becomes -1. Raises CorruptLogError, with `path`, for another version, a wrong
    checksum, or a count that exceeds the file.
    """
    header, entry = layout.SNAPSHOT_HEADER, layout.SNAPSHOT_ENTRY
    if len(data) < header.size:
        raise CorruptLogError(
            path, 0, f"a snapshot of at least {header.size} bytes", f"{len(data)} bytes"
        )
    version, crc, count = header.unpack_from(data)
    if version != layout.SNAPSHOT_VERSION:
        raise CorruptLogError(
            path, 0, f"snapshot version {layout.SNAPSHOT_VERSION}", f"version {version}"
        )
    end = header.size + count * entry.size
    if count < 0 or end > len(data):
        room = (len(data) - header.size) // entry.size
        raise CorruptLogError(path, layout.SNAPSHOT_CRC_END, f"0 to {room} entries", count)
    with memoryview(data) as view:
        found = crc32c(view[layout.SNAPSHOT_CRC_END :])
        if found != crc:
            raise CorruptLogError(path, 0, f"checksum {crc:#010x}", f"checksum {found:#010x}")
        fields = entry.iter_unpack(view[header.size : end])
        return [_normalized(ProducerEntry(*values)) for values in fields]


def _normalized(entry: ProducerEntry) -> ProducerEntry:
    if entry.last_offset < 0:
        entry.last_sequence = entry.last_offset = -1
        entry.offset_delta = 0
    entry.current_txn_first_offset = max(entry.current_txn_first_offset, -1)
    return entry


def write_snapshot(directory: Path, producers: Producers) -> None:
    """Write or replace the snapshot at `producers.end_offset`, durably and as a whole.

    The caller is the only writer of the partition.
    """
    files.write_atomically(
        _path(directory, producers.end_offset),
        pack_snapshot(producers.entries.values()),
        temporary_name=layout.SNAPSHOT_TEMPORARY,
    )


def read_snapshot(directory: Path, offset: int) -> Producers:
    """Return the state at `offset` from its snapshot.

    Raises StorageError if the file is missing or unreadable, CorruptLogError if it is damaged.
    """
    path = _path(directory, offset)
    try:
        data = files.read_file(path)
    except FileNotFoundError as fault:
        raise StorageError(
            f"{path}: the producer snapshot at offset {offset} is missing"
        ) from fault
    except OSError as fault:
        files.pass_on(fault)
        raise StorageError(f"{path}: cannot be read: {fault.strerror}") from fault
    return Producers(parse_snapshot(data, path), offset)


def snapshot_offsets(directory: Path) -> list[int]:
    """Return the offsets of the partition's snapshots, ascending, including damaged ones."""
    return layout.base_offsets(files.list_names(directory), layout.SNAPSHOT)


def latest_snapshot(directory: Path, *, log_start: int, end: int) -> Producers:
    """Return the state at the latest sound snapshot with `log_start` < offset <= `end`.

    Without such a snapshot, returns no producers and the end offset `log_start`. Skips damaged
    snapshots and those that a broker removes meanwhile; removes no file. The caller then calls
    `Producers.expire`, and replays the batches from `end_offset` on. Kafka:
    ProducerStateManager.loadFromSnapshot.
    """
    for offset in reversed(snapshot_offsets(directory)):
        if log_start < offset <= end:
            try:
                return read_snapshot(directory, offset)
            except (CorruptLogError, StorageError):
                continue
    return Producers(end_offset=log_start)


def sweep_snapshots(directory: Path, keep: Collection[int]) -> int:
    """Retire stray snapshots to `.deleted`, and return their number.

    `keep` has the base offsets of the live segments and the snapshot at the partition's end. The
    latest stray also stays, as in Kafka, if it is above all of `keep`: it may be that of a clean
    shutdown. The caller holds the segments lock exclusively. Kafka:
    ProducerStateManager.removeStraySnapshots.
    """
    strays = [offset for offset in snapshot_offsets(directory) if offset not in keep]
    if strays and strays[-1] > max(keep, default=-1):
        strays.pop()
    swaps.retire(directory, strays, suffixes=(layout.SNAPSHOT,))
    return len(strays)


def _path(directory: Path, offset: int) -> Path:
    return directory / layout.segment_file(offset, layout.SNAPSHOT)
