"""A partition's directory: create it, tell whose it is, and sync it as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints

Place: TypeAlias = tuple[int, int]
"""The base offset of a segment, and a byte of its `.log`."""
_PIECE_SIZE: Final = 1 << 20
_MADE: Final = {
    layout.UNRECORDED,
    layout.PARTITION_METADATA,
    layout.SEGMENTS_LOCK,
    layout.SEGMENTS_TURNSTILE,
    layout.CLEANER_LOCK,
    layout.LEADER_EPOCH_CHECKPOINT,
    layout.segment_file(0, layout.LOG),
}
"""The files that `create_partition` makes, besides the canary."""
_MISSING: Final = (FileNotFoundError, NotADirectoryError)
"""The directory is missing; `check_canary` reports that, for this partition alone."""


def check_canary(directory: Path) -> frozenset[str]:
    """Return the names in the directory of a partition of ours.

    Raises LockedByBrokerError if a broker has loaded or removed the partition.
    """
    try:
        names = frozenset(files.list_names(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise LockedByBrokerError(
            f"{directory}: the directory of the partition is missing, removed by a Kafka broker or "
            "by hand; put it back, or let `kafkalog adopt` take the log without it"
        ) from None
    if layout.CANARY not in names:
        raise LockedByBrokerError(
            f"{directory}: {layout.CANARY} is missing, so a Kafka broker has loaded this "
            "partition since kafkalog last wrote it; take it back with `kafkalog adopt`"
        )
    return names


def owner_mark(directory: str) -> tuple[int, ...] | None:
    """Return what stays the same while a partition's directory is ours and of the same topic.

    It is None without the canary or `partition.metadata`. A check of both takes four times as long.
    """
    try:
        os.stat(f"{directory}/{layout.CANARY}")
        found = os.stat(f"{directory}/{layout.PARTITION_METADATA}")
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sync_segments(directory: Path, start: Place) -> None:
    """Sync every `.log` of a partition from the segment of `start` on, and the directory."""
    for _, log in _logs(directory, start):
        with contextlib.suppress(FileNotFoundError):  # a cleaner replaced it, by synced files
            files.sync_path(log)
    with contextlib.suppress(*_MISSING):
        files.sync_directory(directory)


def sync_truncation(directory: Path, active_base: int) -> None:
    """Make possible truncations durable: sync the active segment's indexes, and all names.

    A `.log` needs no sync: bytes that come back are truncated again.
    """
    for suffix in (layout.INDEX, layout.TIME_INDEX, layout.TRANSACTION_INDEX):
        with contextlib.suppress(*_MISSING):
            files.sync_path(directory / layout.segment_file(active_base, suffix))
    with contextlib.suppress(*_MISSING):
        files.sync_directory(directory)


def write_again(directory: Path, start: Place, end: Place) -> None:
    """Write the bytes of a partition's logs between two places again.

    Used after a failed sync of bytes that readers have seen and that cannot be truncated. The
    caller holds the commit lock.
    """
    for base_offset, log in _logs(directory, start):
        if base_offset > end[0]:
            continue
        try:
            fd = files.open_to_write(log)
        except FileNotFoundError:
            continue  # a cleaner replaced it, by synced files
        with files.closing(fd):
            position = start[1] if base_offset == start[0] else 0
            stop = end[1] if base_offset == end[0] else os.fstat(fd).st_size
            for place in range(position, stop, _PIECE_SIZE):
                size = min(_PIECE_SIZE, stop - place)
                files.write_at(fd, files.read_at(fd, size, place), place)


def _logs(directory: Path, start: Place) -> Iterator[tuple[int, Path]]:
    names: list[str] = []
    with contextlib.suppress(*_MISSING):
        names = files.list_names(directory)
    for base_offset in layout.base_offsets(names, layout.LOG):
        if base_offset >= start[0]:
            yield base_offset, directory / layout.segment_file(base_offset, layout.LOG)


def create_partition(directory: Path, topic_id: str, base_offset: int = 0) -> None:
    """Create a partition's directory with an empty segment; the caller syncs the root.

    First removes a directory of that name that an earlier process left before its topic was
    recorded, with the records of its dead commit. Raises StorageError for any other directory with
    records, a foreign directory, and a symbolic link, whose target is never removed.
    """
    if directory.is_symlink() or directory.exists():
        _remove_leftover(directory)
    files.make_directory(directory)
    files.create(directory / layout.UNRECORDED)
    files.create(directory / layout.PARTITION_METADATA, checkpoints.partition_metadata(topic_id))
    files.create(directory / layout.CANARY)
    for name in (layout.SEGMENTS_LOCK, layout.SEGMENTS_TURNSTILE, layout.CLEANER_LOCK):
        files.create(directory / name)
    files.create(directory / layout.LEADER_EPOCH_CHECKPOINT, checkpoints.checkpoint([]))
    files.create(directory / layout.segment_file(base_offset, layout.LOG))
    files.sync_directory(directory)


def note_recorded(directory: Path) -> None:
    """Note that the journal names the partition's topic, so its records aren't remains."""
    with files.ignoring():  # the commit has succeeded; the mark matters only before
        files.remove(directory / layout.UNRECORDED)


def announce_topic_id(directory: Path, topic_id: str) -> None:
    """Write the id that the journal is about to give the topic.

    If a process dies in between, the directory is not taken for a foreign one.
    """
    content = checkpoints.partition_metadata(topic_id)
    files.write_atomically(directory / layout.METADATA_ASIDE, content)


def check_topic_id(directory: Path, topic_id: str) -> None:
    """Raise StorageError unless the directory belongs to the journal's topic.

    Applies an announced new id.
    """
    if checkpoints.is_of_topic(directory, topic_id):
        return
    found: str | None
    try:
        found = checkpoints.read_topic_id(directory)
    except StorageError:
        found = None  # that is for verify to describe
    if found == topic_id:
        return
    if checkpoints.read_topic_id(directory, layout.METADATA_ASIDE) == topic_id:
        content = checkpoints.partition_metadata(topic_id)
        files.write_atomically(directory / layout.PARTITION_METADATA, content)
        return
    raise StorageError(
        f"{directory / layout.PARTITION_METADATA}: expected the topic id {topic_id}, found "
        f"{found or 'no id'}: the directory is of another topic or was damaged, so nothing is "
        "written to it; put the partition's own directory back, or that file from a copy"
    )


def is_leftover(directory: Path) -> bool:
    """Return whether a directory that the journal does not name is left from a creation that died.

    It may have the records of a dead commit.
    """
    if directory.is_symlink():
        return False
    names = {*files.list_names(directory)}
    if layout.UNRECORDED in names:
        return True
    # A power cut may have kept neither mark: then it is ours if only what we make is in it.
    is_ours = layout.CANARY in names or names <= _MADE
    logs = [directory / name for name in names if name.endswith(layout.LOG)]
    return is_ours and not any(path.stat().st_size for path in logs)


def _remove_leftover(directory: Path) -> None:
    if not is_leftover(directory):
        raise StorageError(
            f"{directory}: the directory exists and is not a partition of this log; "
            "move it away, or choose another topic name"
        )
    files.remove_directory(directory)
