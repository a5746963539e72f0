"""One round of cleaning one partition: two passes over closed segments, then the swaps.

A record with key K and offset O is obsolete if K occurs at an offset above O. The first pass learns
the newest offset of every key of the dirty section, as far as the offset map reaches; the second
rewrites all segments below that end without the obsolete records, group by group, so that small
segments become one. What is kept keeps its offset.

A round touches the log only by swaps, each under the commit lock and, exclusively, the segments
lock. Before the first one the journal is told how far this round goes (`cleaning_offset`), so that
no view of an older moment is given a log that lacks records; after the last one, that all below is
clean (`first_dirty_offset`). A round that dies in between is done again, with the same result.

Kafka: Cleaner.doClean, buildOffsetMap, groupSegmentsBySize, cleanSegments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.delete_horizon import write_delete_horizon
from kafkalog.cleaner.log_to_clean import LogToClean, group_segments_by_size, log_to_clean
from kafkalog.cleaner.offset_map import OffsetMap
from kafkalog.cleaner.rewrite import Rewritten, Round, clean_into
from kafkalog.cleaner.stats import CleanerStats
from kafkalog.cleaner.survivors import build_offset_map, old_format
from kafkalog.cleaner.swap import replace_segments
from kafkalog.storage_engine import files, layout
from kafkalog.storage_engine.checkpoints import write_cleaner_checkpoint
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.log_view import LogView, open_view
from kafkalog.storage_engine.segments import SegmentFiles, header_at
from kafkalog.storage_engine.state import PartitionState

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = ["CleaningAborted", "clean_round"]


class CleaningAborted(Exception):
    """A cleaning stops because it was asked to, or its topic is gone; the log is as it was."""


def clean_round(
    engine: Engine,
    topic: str,
    partition: int,
    *,
    now_ms: int,
    config: CleanerConfig,
    stats: CleanerStats,
    check_abort: Callable[[], None],
) -> LogToClean | None:
    """Clean as much of a partition as the offset map can take in at once; None for nothing to do.

    The caller holds the partition's cleaner lock, and no swap is pending. `now_ms` is fixed for the
    round (C41). Adds to `stats`. Returns the plan as it was before. Raises CorruptBatchError,
    StorageError, OSError, CleaningAborted, and InvalidInputError for messages v0 and v1; what was
    swapped before that stays, the rest is as it was.
    """
    directory = engine.partition_directory(topic, partition)
    topic_id = engine.describe(topic).topic_id
    topic_config = TopicConfig.parse(engine.describe(topic).config)

    def load_state() -> PartitionState:
        known = engine.state().topics.get(topic)
        if known is None or known.topic_id != topic_id:
            raise CleaningAborted(f"{topic}: the topic was deleted meanwhile")
        return known.partitions[partition]

    def check() -> None:
        check_abort()
        load_state()  # whoever deletes the topic waits for this round to end

    reopen = partial(open_view, directory, topic, partition, load_state, held=True)
    with reopen() as view:
        log = log_to_clean(
            topic,
            partition,
            directory=directory,
            config=topic_config,
            state=view.state,
            segments=view.segments,
            now_ms=now_ms,
        )
        if not log.has_work:
            return None
        _refuse_old_formats(log)
        started = time.perf_counter()
        offset_map = OffsetMap.for_records(
            log.end - log.first_dirty_offset,
            budget_bytes=config.dedupe_buffer_size,
            load_factor=config.io_buffer_load_factor,
        )
        end = build_offset_map(
            view,
            log.first_dirty_offset,
            log.end,
            offset_map,
            chunk_size=config.io_buffer_size,
            stats=stats,
            check_abort=check,
        )
        stats.map_ms += (time.perf_counter() - started) * 1e3
        stats.buffer_utilization = offset_map.utilization
        round_ = Round(
            view,
            reopen,
            topic_config,
            offset_map,
            now_ms,
            config.io_buffer_size,
            stats,
            check,
        )
        publisher = _Publisher(engine, load_state, view, end, now_ms)
        _clean_groups(round_, log, end, publisher)
        publisher.finish(round_.earliest_delete_horizon_ms)
        stats.rounds += 1
        stats.end_offset = end
        return log


def _refuse_old_formats(log: LogToClean) -> None:
    """Raise InvalidInputError if a segment begins with a message v0 or v1, before anything is done.

    One that has them further on only is met when it is to be rewritten, and refused then.
    """
    for segment in log.segments:
        if segment.base_offset < log.end:
            with segment.log.open("rb") as file:
                header = header_at(file.fileno(), 0, segment.size)
            if header is not None and header.magic != layout.MAGIC:
                raise old_format(segment.log, header.magic)


def _clean_groups(round_: Round, log: LogToClean, end: int, publisher: _Publisher) -> None:
    """Rewrite and swap every group of segments that begins below the round's end."""
    state = round_.view.state
    closed = [s for s in log.segments if s.base_offset < state.active_base]
    sources = [s for s in closed if s.base_offset < end]
    bases = [s.base_offset for s in closed] + [state.active_base]
    groups = group_segments_by_size(
        sources,
        max_size=log.config.segment_bytes,
        max_index_size=log.config.segment_index_bytes,
        end=log.first_uncleanable_offset,
    )
    round_.stats.segments_before += len(sources)
    for group in groups:
        group_end = bases[bases.index(group[-1].base_offset) + 1]
        rewritten = clean_into(round_, group, group_end, log.directory)
        if rewritten.is_changed:
            # Where this fails nothing is discarded: a `.cleaned` file may be all that still says
            # that the sources are live. The next cleaner settles it (`finish_swaps`).
            publisher.swap(group, rewritten)
        else:
            for output in rewritten.outputs:
                output.discard()
        kept = rewritten.outputs if rewritten.is_changed else group
        round_.stats.segments_after += len(kept)


class _Publisher:
    """Swaps a round's segments in, and tells the journal before the first and after the last."""

    def __init__(
        self,
        engine: Engine,
        load_state: Callable[[], PartitionState],
        view: LogView,
        end: int,
        now_ms: int,
    ) -> None:
        self._engine = engine
        self._load_state = load_state
        self._view = view
        self._end = end
        self._now_ms = now_ms

    def swap(self, sources: Sequence[SegmentFiles], rewritten: Rewritten) -> None:
        """Put the outputs in the place of their sources."""
        view = self._view
        with self._engine.transaction() as transaction:
            state = self._load_state()
            if state.cleaned_to < self._end:
                transaction.change_partition(view.topic, view.partition, cleaning_offset=self._end)
                transaction.publish(self._now_ms)
            transaction.check_lock()  # a later swap publishes nothing, which would look
            with files.SegmentsLock(view.directory).exclusive():
                replace_segments(
                    view.directory,
                    sources,
                    rewritten.outputs,
                    sections=rewritten.sections,
                    source_sections=rewritten.source_sections,
                    producer_snapshot=state.producer_snapshot,
                )

    def finish(self, earliest_delete_horizon_ms: int | None) -> None:
        """Say that everything below the round's end is clean."""
        view = self._view
        with self._engine.transaction() as transaction:
            state = self._load_state()
            # Records that were deleted while the round went on may lie beyond its end.
            clean_to = max(self._end, state.log_start_offset)
            # Before the offset it belongs to: a crash between the two repeats the round.
            write_delete_horizon(view.directory, clean_to, earliest_delete_horizon_ms)
            if state.first_dirty_offset != clean_to:
                transaction.change_partition(
                    view.topic, view.partition, first_dirty_offset=clean_to
                )
                transaction.publish(self._now_ms)
            write_cleaner_checkpoint(self._engine.root, self._engine.state())
