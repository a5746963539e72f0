"""Kafka's text checkpoint files: a version, a count, then one entry per line.

The checkpoints in the root of our log are derived from the journal, for Kafka's tools and for a
broker that gets the directory back. In a broker's directory they are the only record of its
partitions. This module also handles the files that name a topic and a broker. Kafka:
CheckpointFile, OffsetCheckpointFile, LeaderEpochCheckpointFile, PartitionMetadataFile,
PropertiesUtils.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.remote_log_starts import (
    checkpointed_log_start,
    read_remote_log_starts,
)
from kafkalog.storage_engine.metadata.state import State

_T = TypeVar("_T")
_VERSION = 0
OFFSET_FIELDS: Final = ("topic", "partition", "offset")
EPOCH_FIELDS: Final = ("epoch", "start offset")
"""The fields of an entry in a checkpoint of the root, and in that of a partition."""
CLEAN_SHUTDOWN_CONTENT = b'{"version":0,"brokerEpoch":-1}'
"""The content of `.kafka_cleanshutdown`. Kafka: CleanShutdownFileHandler."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_SIZE_MAX: Final = 64 << 20
"""Bytes of a small file: 100,000 partitions with the longest names need half of it."""


def checkpoint(entries: Iterable[tuple[object, ...]]) -> bytes:
    """Return the text of a checkpoint file."""
    lines = [" ".join(str(token) for token in entry) for entry in entries]
    return "\n".join([str(_VERSION), str(len(lines)), *lines, ""]).encode()


def read_offset_checkpoint(path: Path) -> dict[tuple[str, int], int]:
    """Return the offsets in a checkpoint of the root, by (topic, partition).

    A missing or empty file is an empty checkpoint; the last line for a partition counts, as in
    Kafka. Raises CorruptLogError if the file is malformed or has a log start above
    `layout.LOG_START_MAX`; OSError.
    """
    is_log_start = path.name == layout.LOG_START_CHECKPOINT
    limit = layout.LOG_START_MAX if is_log_start else layout.INT64_MAX
    offsets: dict[tuple[str, int], int] = {}
    with contextlib.suppress(FileNotFoundError):
        for position, (topic, partition, offset) in _read(path):
            offsets[topic, partition] = offset
            if offset > limit:
                raise _malformed(path, position, f"an offset up to {limit}", offset)
    return offsets


def _read(path: Path) -> Iterator[tuple[int, list[Any]]]:
    yield from checkpoint_entries(path, _read_small(path), OFFSET_FIELDS)


def _read_small(path: Path) -> bytes:
    """Return a small file's content; raises CorruptLogError for more than it can need, OSError."""
    size = os.lstat(path).st_size
    if size > _SIZE_MAX:
        raise _malformed(path, 0, f"at most {_SIZE_MAX} bytes", size)
    return files.read_file(path)


def known_offsets(root: Path) -> tuple[dict[str, dict[tuple[str, int], int]], list[str]]:
    """Return the offsets in each checkpoint of a broker's root, and what is not known of them.

    A checkpoint that is damaged, or cannot be read, costs what it would have told, as in Kafka's
    LogManager.loadLogs.
    """
    offsets: dict[str, dict[tuple[str, int], int]] = {}
    notices = []
    for name, cost in _COSTS.items():
        offsets[name] = {}
        try:
            offsets[name] = read_offset_checkpoint(root / name)
        except CorruptLogError as fault:
            notices.append(f"{fault.damage}; it is taken for empty: {cost}")
        except OSError as fault:
            files.pass_on(fault)
            notices.append(f"{root / name}: cannot be read: {fault.strerror}; {cost}")
    return offsets, notices


_COSTS: Final = {
    layout.RECOVERY_POINT_CHECKPOINT: (
        "after a crash every batch of its partitions is checked, from the first one on"
    ),
    layout.LOG_START_CHECKPOINT: (
        "each log begins with its first segment, so deleted records may be back"
    ),
    layout.REPLICATION_CHECKPOINT: (
        "while a broker runs here, nothing above the cleaned part of a log is known to be committed"
    ),
    layout.CLEANER_CHECKPOINT: "how far the broker had cleaned each log is not known",
}
"""What is lost with each checkpoint of the root."""


def checkpoint_entries(
    path: Path, data: bytes, fields: tuple[str, ...]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the position and the fields of each entry in the `data` of a checkpoint file.

    All fields but a topic are whole numbers. Raises CorruptLogError for a file that Kafka would
    refuse.
    """
    if not data:
        return
    version, *lines = data.splitlines(keepends=True)
    if version.strip() != str(_VERSION).encode():
        raise _malformed(path, 0, f"version {_VERSION}", version)
    position = len(version)
    announced = lines[0] if lines else b""
    if announced.strip() != str(len(lines) - 1).encode():
        raise _malformed(path, position, f"{max(len(lines) - 1, 0)} entries", announced)
    position += len(announced)
    for line in lines[1:]:
        tokens = line.decode(errors="replace").split()
        try:
            yield position, [_field(*pair) for pair in zip(fields, tokens, strict=True)]
        except ValueError:
            raise _malformed(path, position, " and ".join(fields), line) from None
        position += len(line)


def _field(name: str, text: str) -> Any:
    """Return a topic, or a 64-bit number; raises ValueError for Python's extra notations."""
    if name == "topic":
        return text
    number = int(text) if _NUMBER.fullmatch(text) else layout.INT64_MAX + 1
    if abs(number) > layout.INT64_MAX:
        raise ValueError(text)
    return number


def _malformed(path: Path, position: int, expected: str, found: object) -> CorruptLogError:
    shown = repr(found[:60].decode(errors="replace")) if isinstance(found, bytes) else found
    return CorruptLogError(
        path, position, expected, shown, advice="restore it from a copy, or remove it"
    )


def write_root_checkpoints(root: Path, state: State) -> None:
    """Write the four offset checkpoints; the caller holds the commit lock.

    Keeps their entries for partitions in this directory that are not ours, such as a broker's
    internal topics. A tiered log keeps the log start in remote storage (`remote_log_starts`).
    """
    remote = read_remote_log_starts(root)
    partitions = [
        (topic.name, number, partition)
        for topic in state.topics.values()
        for number, partition in topic.present()
    ]
    offsets = {
        layout.REPLICATION_CHECKPOINT: [(t, n, p.high_watermark) for t, n, p in partitions],
        layout.RECOVERY_POINT_CHECKPOINT: [(t, n, p.high_watermark) for t, n, p in partitions],
        layout.LOG_START_CHECKPOINT: [
            (t, n, checkpointed_log_start(remote, state, t, n))
            for t, n, p in partitions
            if p.log_start_offset > 0
        ],
    }
    for name, entries in offsets.items():
        _write_offsets(root, name, state, entries)
    write_cleaner_checkpoint(root, state)


def write_cleaner_checkpoint(root: Path, state: State) -> None:
    """Write `cleaner-offset-checkpoint`: the first dirty offset of every partition ever cleaned."""
    entries = [
        (topic.name, number, partition.first_dirty_offset)
        for topic in state.topics.values()
        for number, partition in topic.present()
        if partition.first_dirty_offset > 0
    ]
    _write_offsets(root, layout.CLEANER_CHECKPOINT, state, entries)


def _write_offsets(
    root: Path, name: str, state: State, entries: Iterable[tuple[str, int, int]]
) -> None:
    # Directories of a deleted topic may remain, and those of a failed creation with its name.
    ours = {*state.topics, *(deleted.name for deleted in state.deleting.values())}
    foreign = [
        (topic, number, offset)
        for (topic, number), offset in _readable(root / name).items()
        if topic not in ours and (root / layout.partition_directory(topic, number)).is_dir()
    ]
    files.write_atomically(root / name, checkpoint([*entries, *foreign]))


def _readable(path: Path) -> dict[tuple[str, int], int]:
    """Read an offset checkpoint; a malformed one, which is about to be replaced, has no entries."""
    try:
        return read_offset_checkpoint(path)
    except CorruptLogError:
        return {}


def write_leader_epochs(directory: Path, epochs: Iterable[tuple[int, int]]) -> None:
    """Write a partition's `leader-epoch-checkpoint`: (epoch, its first offset)."""
    files.write_atomically(directory / layout.LEADER_EPOCH_CHECKPOINT, checkpoint(epochs))


def read_leader_epochs(directory: Path) -> list[tuple[int, int]]:
    """Read a partition's leader epochs; empty for a missing or empty file.

    Raises CorruptLogError if the file is malformed.
    """
    data = _content(directory, layout.LEADER_EPOCH_CHECKPOINT)
    return list(_leader_epochs(str(directory), data)) if data else []


@lru_cache(maxsize=4096)
def _leader_epochs(directory: str, data: bytes) -> tuple[tuple[int, int], ...]:
    """Parse leader epochs. Cached, because every commit reads them and they rarely change."""
    path = Path(directory, layout.LEADER_EPOCH_CHECKPOINT)
    epochs = []
    for position, (epoch, start) in checkpoint_entries(path, data, EPOCH_FIELDS):
        if not 0 <= epoch <= layout.INT32_MAX:
            raise _malformed(path, position, f"an epoch up to {layout.INT32_MAX}", epoch)
        epochs.append((epoch, start))
    return tuple(epochs)


def known_leader_epochs(directory: Path) -> tuple[list[tuple[int, int]], str | None]:
    """Return a partition's leader epochs, and why they are not known, if they are not."""
    path = directory / layout.LEADER_EPOCH_CHECKPOINT
    return _known(path, lambda: read_leader_epochs(directory), [], "the log's leader epochs are")


def _known(path: Path, read: Callable[[], _T], unknown: _T, what: str) -> tuple[_T, str | None]:
    """Return what a file of a partition says, or `unknown` and the reason."""
    try:
        return read(), None
    except CorruptLogError as fault:
        reason = fault.damage
    except (StorageError, OSError) as fault:
        files.pass_on(fault)
        reason = f"{path}: cannot be read: {getattr(fault, 'strerror', None) or fault}"
    return unknown, f"{reason}; {what} not known, and the records are read without"


def _content(directory: Path, name: str) -> bytes | None:
    """Return a file's content, or None without one; raises CorruptLogError for a huge one."""
    try:
        return _read_small(Path(directory, name))
    except (FileNotFoundError, NotADirectoryError):
        return None


def trim_leader_epochs(
    directory: Path, log_start_offset: int, high_watermark: int, epoch: int
) -> None:
    """Drop the epochs that ended at or below the log start, and start the current one there.

    First drops those that a dead commit assigned. `epoch` is the current one.
    """
    found = read_leader_epochs(directory)
    committed = leader_epochs.committed(found, high_watermark, epoch)
    kept = leader_epochs.trimmed(committed, log_start_offset)
    if kept != found:
        write_leader_epochs(directory, kept)


def partition_metadata(topic_id: str) -> bytes:
    """Return the content of `partition.metadata`, which Kafka ends without a newline."""
    return f"version: 0\ntopic_id: {topic_id}".encode()


def known_topic_id(directory: Path) -> tuple[str | None, str | None]:
    """Return a partition's topic id, or None, and why it is not known, if a file does not say it.

    Without a file, as before Kafka 2.8, there is neither.
    """
    path = directory / layout.PARTITION_METADATA
    topic_id, fault = _known(path, lambda: _topic_id(directory), None, "the topic's id is")
    if topic_id is None and fault is None and path.exists():
        fault = f"{path}: expected a topic id, found an empty file or zeros; it counts as missing"
    return topic_id, fault


def read_topic_id(directory: Path, name: str = layout.PARTITION_METADATA) -> str | None:
    """Return the topic id in a partition directory, or None.

    `name` is the file's name. Raises StorageError if the file has no valid id.
    """
    try:
        return _topic_id(directory, name)
    except CorruptLogError as fault:
        raise StorageError(str(fault)) from fault


def _topic_id(directory: Path, name: str = layout.PARTITION_METADATA) -> str | None:
    """Return the topic id in a partition directory, or None; raises CorruptLogError."""
    data = _content(directory, name)
    if data is None or not data.strip(b"\0"):  # empty or zeros: a power cut before its sync
        return None
    path, text = directory / name, data.decode(errors="replace")
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in pairs}
    topic_id = values.get("topic_id", "")
    if values.get("version") != str(_VERSION) or not layout.is_topic_id(topic_id):
        expected = f"version {_VERSION} and a topic id of 22 characters"
        raise _malformed(path, 0, expected, repr(text[:80]))
    return topic_id


def is_of_topic(directory: Path, topic_id: str) -> bool:
    """Return whether `partition.metadata` has the exact bytes that are written for a topic.

    A fast check for the usual case; if it is False, call `read_topic_id`.
    """
    return _content(directory, layout.PARTITION_METADATA) == partition_metadata(topic_id)


def read_properties(path: Path) -> dict[str, str]:
    """Return the entries of a Java properties file such as `meta.properties`, {} without a file.

    Raises StorageError if it is not text; OSError.
    """
    try:
        lines = _read_small(path).decode().splitlines()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as fault:
        raise StorageError(f"{path}: expected a text file of properties, found {fault}") from None
    pairs = (line.strip() for line in lines)
    found: dict[str, str] = {}
    for pair in pairs:
        if pair and pair[0] not in "#!":
            name, _, value = pair.partition("=")
            found[name.strip()] = value.strip().replace("\\", "")
    return found


def is_clean(root: Path) -> bool:
    """Return whether the broker of this directory had a clean shutdown.

    An adoption moves `meta.properties` aside, and then the file that proves the shutdown. While
    `meta.properties` is in its place, a file aside belongs to an earlier adoption, and the broker
    has run since.
    """
    if (root / layout.CLEAN_SHUTDOWN).exists():
        return True
    has_begun = (root / layout.META_ASIDE).exists() and not (root / layout.META_PROPERTIES).exists()
    return has_begun and (root / layout.CLEAN_ASIDE).exists()
