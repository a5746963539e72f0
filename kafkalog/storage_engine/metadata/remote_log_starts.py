"""The starts of the logs of a broker with tiered storage, kept while its directory is ours.

Its log begins in remote storage, below its first local segment (KIP-405). A broker deletes what
remote storage has below the checkpointed log start, and finds the rest by the leader epochs. Both
therefore stay as they were, unless records were deleted here since. The file's first line is the
CRC-32C of all others. Each of these has a topic, a partition, the topic's id, the log start, the
first local offset, and the leader epochs that begin below that. Most logs have no such file.

Kafka: RemoteLogManager.cleanupExpiredRemoteLogSegments, LogManager.checkpointLogStartOffsetsInDir.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.state import State


class RemoteLogStart(NamedTuple):
    """The starts of tiered logs."""

    topic_id: str
    log_start: int
    """In remote storage."""
    local_start: int
    """In the directory, at the adoption."""
    epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, its first offset) of those that begin below `local_start`."""

    def whole(self, epochs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the epochs of the log; `epochs` are those in the directory."""
        last = max((epoch for epoch, _ in self.epochs), default=-1)
        return [*self.epochs, *((epoch, start) for epoch, start in epochs if epoch > last)]


RemoteLogStarts: TypeAlias = Mapping[tuple[str, int], RemoteLogStart]
"""By topic and partition."""


def write_remote_log_starts(root: Path, starts: RemoteLogStarts) -> None:
    """Write the file, or remove the one of an earlier adoption."""
    path = root / layout.REMOTE_LOG_STARTS
    if starts:
        lines = []
        for (topic, partition), start in starts.items():
            numbers = [number for epoch in start.epochs for number in epoch]
            fields = topic, partition, start.topic_id, start.log_start, start.local_start, *numbers
            lines.append(" ".join(map(str, fields)) + "\n")
        content = "".join(lines).encode()
        files.write_atomically(path, b"%d\n%b" % (crc32c(content), content))
    else:
        files.remove(path)


def read_remote_log_starts(root: Path) -> RemoteLogStarts:
    """Return what the file says; {} without one. Raises CorruptLogError for a damaged one."""
    path = root / layout.REMOTE_LOG_STARTS
    try:
        head, _, content = files.read_file(path).partition(b"\n")
    except FileNotFoundError:
        return {}
    if head != b"%d" % crc32c(content):
        raise CorruptLogError(
            path,
            0,
            "the checksum of its lines",
            head[:20],
            advice="restore it from a copy, or remove it if remote storage has none of these logs",
        )
    found = {}
    for line in content.decode().splitlines():
        topic, partition, topic_id, *texts = line.split()
        log_start, local_start, *numbers = map(int, texts)
        epochs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        found[topic, int(partition)] = RemoteLogStart(topic_id, log_start, local_start, epochs)
    return found


def checkpointed_log_start(
    starts: RemoteLogStarts, state: State, topic: str, partition: int
) -> int:
    """Return a partition's log start as a broker has to find it."""
    log_start = state.topics[topic].partitions[partition].log_start_offset
    start = starts.get((topic, partition))
    if start is None or start.topic_id != state.topics[topic].topic_id:
        return log_start
    return min(start.log_start, log_start) if log_start <= start.local_start else log_start


def notices_of_remote_logs(root: Path, state: State) -> list[str]:
    """Return what becomes of the records in remote storage when a broker gets the directory."""
    starts = read_remote_log_starts(root)
    notices = []
    for (topic, partition), start in sorted(starts.items()):
        known = state.topics.get(topic)
        if known is None or not known.is_here(partition):
            continue
        name = layout.partition_directory(topic, partition)
        where = f"{name}: remote storage may have its records from {start.log_start} on"
        begin = known.partitions[partition].log_start_offset
        if known.topic_id != start.topic_id:
            notices.append(f"{where}, and the broker does not find them by another topic id")
        elif begin > start.local_start:
            notices.append(
                f"{where}: the broker deletes those below {begin}, because records up to there "
                "were deleted here"
            )
        else:
            notices.append(f"{where}: the broker keeps them, with the log start of before")
    return notices
