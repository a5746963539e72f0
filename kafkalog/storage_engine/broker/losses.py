"""Find the records that a broker's partition has lost, although each file that is left is sound.

A `.log` file is easily lost: by an ignore file, an exclude rule of rsync, a bad sector in a
directory. The other files then show that it was there:

- *An index without its `.log`*. Kafka renames the `.log` first when it deletes a segment, so an
  index with entries remains alone only if the `.log` was lost.
- *A hole between two segments*. A segment begins where the one before it ends. Only a compaction
  makes holes, and it shows. The cleaner's checkpoint lies above the hole; or offsets are missing
  within a segment, too, because the leader's log was compacted. A cleaner that stops within a round
  has not written its checkpoint.
- *A log that begins above its start*. Retention moves the first leader epoch to the log's new
  start, and a checkpoint has a log start inside of a segment.
- *A log that ends too early*. It reaches its recovery point, because everything below was synced.
  Without checkpoints it reaches its last producer snapshot and leader epoch.

After a power cut a log may end above the recovery point and below the high watermark. The broker
starts without these records and fetches them from another replica (`Loss.is_unsynced`).

Kafka: LogLoader.load, UnifiedLog.roll, LogSegment.deleteIfExists, LeaderEpochFileCache,
LogManager.checkpointLogStartOffsetsInDir.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.locate import headers
from kafkalog.storage_engine.segment.loss import Loss, lost_segments
from kafkalog.storage_engine.segment.segments import (
    SegmentFiles,
    next_offset,
    orphaned_indexes,
    retired_bases,
)
from kafkalog.storage_engine.transactions import producer_snapshot


def find_losses(
    directory: Path,
    segments: Sequence[SegmentFiles],
    checkpointed: Checkpointed,
    *,
    end_offset: int,
) -> tuple[Loss, ...]:
    """Return what a partition of a broker has lost, ascending; see the module.

    `segments` are the live ones, and `end_offset` is where the log ends now. The checkpoints of a
    live broker lag behind, so only its lost segments are found. Raises OSError.
    """
    epochs = _epoch_starts(directory)
    log_start = checkpointed.log_start or 0
    if epochs and segments and epochs[0] == segments[0].base_offset:
        log_start = max(log_start, epochs[0])  # retention deleted what was below
    found = lost_segments(directory, segments, log_start=log_start, is_live=checkpointed.is_live)
    if not checkpointed.is_live:
        # Between the last segment and a lost one, a compaction may have taken all.
        end_offset = max([end_offset, *(loss.end for loss in found)])
        others = [
            *_lost_first(directory, segments, checkpointed, epochs),
            *_holes(directory, segments, checkpointed, log_start),
            *_lost_end(directory, segments, checkpointed, epochs, end_offset),
        ]
        found += [loss for loss in others if not any(_is_in(loss, known) for known in found)]
    return tuple(sorted(found, key=lambda loss: loss.start))


def _is_in(loss: Loss, known: Loss) -> bool:
    return known.start <= loss.start and loss.end <= known.end


def _epoch_starts(directory: Path) -> list[int]:
    epochs, _ = checkpoints.known_leader_epochs(directory)  # the loader reports the reason
    return [start for _, start in epochs]


def _lost_first(
    directory: Path,
    segments: Sequence[SegmentFiles],
    checkpointed: Checkpointed,
    epochs: Sequence[int],
) -> Iterator[Loss]:
    """Find out whether the first segment is not the one with the log start.

    A broker that was killed just after it had deleted segments has left their `.deleted` files, and
    a checkpoint from before.
    """
    if not segments or checkpointed.is_tiered:
        return
    first = segments[0].base_offset
    was_killed = checkpointed.recovery_point is not None and not checkpointed.is_clean
    if was_killed and retired_bases(directory):
        return
    known = None if was_killed else checkpointed.log_start
    if known is not None:
        start, says = known, f"as {layout.LOG_START_CHECKPOINT} says"
    elif epochs:
        start, says = epochs[0], f"as {layout.LEADER_EPOCH_CHECKPOINT} says"
    else:
        return
    if start < first:
        path = directory / layout.segment_file(start, layout.LOG)
        expected = f"a segment with the log start, offset {start}, {says}"
        yield Loss(path, start, first, expected, f"a first segment of base {first}")


def _holes(
    directory: Path, segments: Sequence[SegmentFiles], checkpointed: Checkpointed, log_start: int
) -> Iterator[Loss]:
    cleaned_to = checkpointed.first_dirty or 0
    if cleaned_to == 0 and checkpointed.is_always_compacted:
        return
    begin = max(cleaned_to, log_start)
    dirty = segments[max(0, bisect_right([s.base_offset for s in segments], begin) - 1) :]
    holes = [
        (before, start, segment.base_offset)
        for before, segment in pairwise(dirty)
        if begin <= (start := next_offset(before)) < segment.base_offset
    ]
    if not holes or any(map(_is_emptied, dirty[:-1])):
        return
    if not any(_has_gaps(segment, begin) for segment in dirty):
        for before, start, end in holes:
            position = _whole_bytes(before)
            if position < before.size or not before.size:
                expected = f"batches up to offset {end - 1}"
                yield Loss(before.log, start, end, expected, f"none from byte {position} on")
                continue
            path = directory / layout.segment_file(start, layout.LOG)
            expected = (
                f"a segment of base {start}, since nothing shows a compaction of what follows"
            )
            yield Loss(path, start, end, expected, f"the next one of base {end}")


def _whole_bytes(segment: SegmentFiles) -> int:
    """Return how many bytes at the beginning of a `.log` are whole batches."""
    with files.closing(files.open_to_read(segment.log)) as fd:
        source, end = FileBytes(fd), 0
        for position, header in headers(source, 0, source.size()):
            end = position + header.size
        return end


def _is_emptied(segment: SegmentFiles) -> bool:
    """Return whether a compaction has taken all out of a segment that is not the last one.

    If somebody has cut its `.log`, the time index still has the entry of the roll.
    """
    try:
        return not segment.size and not segment.time_index.stat().st_size
    except FileNotFoundError:
        return False


def _has_gaps(segment: SegmentFiles, begin: int) -> bool:
    """Return whether a compaction has taken records at or above `begin` out of a segment.

    A segment's base is that of its first batch, until a compaction takes it.
    """
    with files.closing(files.open_to_read(segment.log)) as fd:
        source = FileBytes(fd)
        following = max(segment.base_offset, begin)
        for _, header in headers(source, 0, source.size()):
            if header.last_offset < begin:
                continue
            is_batch = header.magic == layout.MAGIC
            if is_batch and header.records_count <= header.last_offset_delta:
                return True
            # The first offset of compressed messages is not known.
            is_known = is_batch or not header.codec
            if is_known and header.known_first_offset > following:
                return True
            following = header.next_offset
    return False


def _lost_end(
    directory: Path,
    segments: Sequence[SegmentFiles],
    checkpointed: Checkpointed,
    epochs: Sequence[int],
    end_offset: int,
) -> Iterator[Loss]:
    """Find out whether the log ends below what was there."""
    snapshots = producer_snapshot.snapshot_offsets(directory)
    claims = {
        layout.RECOVERY_POINT_CHECKPOINT: checkpointed.recovery_point or 0,
        layout.REPLICATION_CHECKPOINT: checkpointed.high_watermark or 0,
    }
    if checkpointed.recovery_point is None:
        claims["its last producer snapshot"] = max(snapshots, default=0)
        claims[layout.LEADER_EPOCH_CHECKPOINT] = max(epochs, default=0)
    source, wanted = max(claims.items(), key=lambda claim: claim[1])
    if wanted <= end_offset:
        return
    start = end_offset if segments else max(end_offset, epochs[0] if epochs else 0)
    synced = claims[layout.RECOVERY_POINT_CHECKPOINT]
    base = segments[-1].base_offset if segments else start
    has_lost_file = any(orphan >= end_offset for orphan in orphaned_indexes(directory))
    if has_lost_file:  # a power cut leaves no index alone, because the `.log` is made first
        base = end_offset
    yield Loss(
        directory / layout.segment_file(base, layout.LOG),
        min(start, wanted),
        wanted,
        f"a log up to offset {wanted}, as {source} says",
        f"its end at {end_offset}" if segments else "no file",
        is_unsynced=bool(segments)
        and not has_lost_file
        and not checkpointed.is_clean
        and checkpointed.recovery_point is not None
        and synced <= end_offset,
    )
