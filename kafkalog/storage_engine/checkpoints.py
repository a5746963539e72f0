"""Kafka's text checkpoint files: a version, a count, then an entry a line.

Those in the root are derived from the journal, for Kafka's tools and for a broker that is given the
directory back; nothing of ours reads them. Kafka: CheckpointFile, OffsetCheckpointFile,
LeaderEpochCheckpointFile, PartitionMetadataFile.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.state import State

_VERSION = 0


def checkpoint(entries: Iterable[tuple[object, ...]]) -> bytes:
    """Return the text of a checkpoint file."""
    lines = [" ".join(str(token) for token in entry) for entry in entries]
    return "\n".join([str(_VERSION), str(len(lines)), *lines, ""]).encode()


def write_root_checkpoints(root: Path, state: State) -> None:
    """Write the four offset checkpoints; the caller holds the commit lock."""
    partitions = [
        (topic.name, number, partition)
        for topic in state.topics.values()
        for number, partition in enumerate(topic.partitions)
    ]
    offsets = {
        layout.REPLICATION_CHECKPOINT: [(t, n, p.high_watermark) for t, n, p in partitions],
        layout.RECOVERY_POINT_CHECKPOINT: [(t, n, p.high_watermark) for t, n, p in partitions],
        layout.LOG_START_CHECKPOINT: [
            (t, n, p.log_start_offset) for t, n, p in partitions if p.log_start_offset > 0
        ],
    }
    for name, entries in offsets.items():
        files.write_atomically(root / name, checkpoint(entries))
    write_cleaner_checkpoint(root, state)


def write_cleaner_checkpoint(root: Path, state: State) -> None:
    """Write `cleaner-offset-checkpoint`: the first dirty offset of every partition ever cleaned."""
    entries = [
        (topic.name, number, partition.first_dirty_offset)
        for topic in state.topics.values()
        for number, partition in enumerate(topic.partitions)
        if partition.first_dirty_offset > 0
    ]
    files.write_atomically(root / layout.CLEANER_CHECKPOINT, checkpoint(entries))


def write_leader_epochs(directory: Path, epochs: Iterable[tuple[int, int]]) -> None:
    """Write a partition's `leader-epoch-checkpoint`: (epoch, its first offset)."""
    files.write_atomically(directory / layout.LEADER_EPOCH_CHECKPOINT, checkpoint(epochs))


def read_leader_epochs(directory: Path) -> list[tuple[int, int]]:
    """Read a partition's leader epochs; a missing or empty file has none."""
    try:
        lines = (directory / layout.LEADER_EPOCH_CHECKPOINT).read_text().split("\n")
    except FileNotFoundError:
        return []
    pairs = [line.split() for line in lines[2:] if line]
    return [(int(epoch), int(start)) for epoch, start in pairs]


def trim_leader_epochs(directory: Path, log_start_offset: int) -> None:
    """Drop the epochs that ended at or below the log start; the one it lies in begins there.

    Kafka: LeaderEpochFileCache.truncateFromStart.
    """
    epochs = read_leader_epochs(directory)
    passed = [pair for pair in epochs if pair[1] <= log_start_offset]
    if passed and passed[-1][1] < log_start_offset:
        kept = [(passed[-1][0], log_start_offset), *epochs[len(passed) :]]
        write_leader_epochs(directory, kept)


def partition_metadata(topic_id: str) -> bytes:
    """Return the content of `partition.metadata`, which Kafka ends without a newline."""
    return f"version: 0\ntopic_id: {topic_id}".encode()


def read_topic_id(directory: Path) -> str | None:
    """Return the topic id a partition directory was made for; None when it says none."""
    try:
        lines = (directory / layout.PARTITION_METADATA).read_text().split("\n")
    except FileNotFoundError:
        return None
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "topic_id":
            return value.strip()
    return None
