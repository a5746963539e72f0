"""Whether the records that a journal's record speaks of are in the files.

A commit syncs its records before it writes the journal's record. They are therefore missing only in
a copy that a program made of a live log, file by file: the segment before the commit, the journal
after it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState

_GONE: Final = {errno.ENOENT, errno.ENOTDIR}


def journal_of(root: Path) -> Journal:
    """Return the journal of a log, which publishes no record whose bytes are missing."""
    return Journal(root / layout.COMMIT, lambda before, after: missing(root, before, after))


def missing(root: Path, before: State, after: State) -> str | None:
    """Say what the files lack of what was appended between two states; None for nothing.

    Reads what was appended as any reader does: checksums and offsets are compared. Raises OSError
    and StorageError for files that cannot be read now.
    """
    for topic in after.topics.values():
        known = before.topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            known = None
        for number, state in topic.present():
            is_new = known is None or number >= len(known.partitions)
            recorded = None if is_new or known is None else known.partitions[number]
            if state != recorded and (fault := _lacks(root, topic, number, recorded, state)):
                return fault
    return None


def _lacks(
    root: Path, topic: TopicState, number: int, before: PartitionState | None, after: PartitionState
) -> str | None:
    # Only a death leaves such records; a fresh worker need not load what reads a log.
    from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot
    from kafkalog.storage_engine.transactions.producer_snapshot import read_snapshot

    directory = root / layout.partition_directory(topic.name, number)
    if before is None:  # a new partition, of which a copied topic's begins above 0
        before = PartitionState(high_watermark=after.active_base)
    end, size = before.high_watermark, after.active_size
    try:
        ids = {
            checkpoints.read_topic_id(directory, name)
            for name in (layout.PARTITION_METADATA, layout.METADATA_ASIDE)
        }
        if topic.topic_id not in ids:
            return f"{directory} is not the directory of topic id {topic.topic_id}"
        if not (directory / layout.CANARY).exists():
            return f"{directory} has no {layout.CANARY}"
        if after.producer_snapshot not in (-1, before.producer_snapshot):
            read_snapshot(directory, after.producer_snapshot)
        if after.high_watermark == end:
            return None
        with open_snapshot(directory, topic.name, number, lambda: after, start=end) as snapshot:
            for chunk in snapshot.chunks(end, after.high_watermark):
                end = int(chunk.table.last_offsets[-1]) + 1
                table = chunk.table
                size = chunk.file_position + int(table.positions[-1] + table.sizes[-1])
    except (FileNotFoundError, NotADirectoryError):
        pass
    except KafkaLogError as fault:
        if isinstance(fault.__cause__, OSError) and fault.__cause__.errno not in _GONE:
            raise  # it could not be read now, which proves nothing
    else:
        # If it has just been rolled, its active segment is empty and begins at the end.
        is_rolled = not after.active_size and after.active_base == after.high_watermark
        if is_rolled or (end, size) == (after.high_watermark, after.active_size):
            return None
    return f"{directory} has no whole records from offset {end} to {after.high_watermark}"
