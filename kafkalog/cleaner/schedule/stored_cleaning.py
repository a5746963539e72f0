"""Clean one partition of a log in an object store: fetch, clean in a directory, put, and swap.

The swap is one commit, "minus sources, plus outputs". It is made only if the log still has all
sources. Another cleaner, a deletion of records or of the topic, or retention may have taken one.
Then nothing is changed, and what was written is deleted.

A partition that fails is marked uncleanable by a commit, with the reason, as a local one by a file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.cleaner.rewrite.clean import CleaningAborted
from kafkalog.cleaner.schedule.partition_cleaner import (
    PartitionCleaner,
    never,
    unwatched,
)
from kafkalog.cleaner.schedule.scratch_partition import ScratchPartition, closed_extents
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.cleaner.state.uncleanable import fault_reason, mark_uncleanable
from kafkalog.errors import CommitInDoubtError, KafkaLogError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.failure import SweptError
from kafkalog.storage_engine.object_store.store_state import Cleaned

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cleaner.schedule.throttle import Throttler
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCleaning:
    """Cleans partitions of a log in an object store, one after the other.

    The fields are those of `PartitionCleaner`.
    """

    log: ObjectLog
    now_ms: int
    clock: Callable[[], int] | None = None
    config: CleanerConfig = field(default_factory=CleanerConfig)
    check_abort: Callable[[], None] = never
    progress: Callable[[CleanerStats], None] = unwatched
    throttler: Throttler | None = None
    on_aborted: Callable[[CleanerStats], None] = unwatched
    erased: ErasedKeys | None = None

    def clean(self, topic: str, partition: int, *, force: bool = False) -> CleanerStats | None:
        """Clean the segment objects of a partition; return None if nothing was done.

        Fresh objects are not cleaned before they are regrouped. Nothing is done if another cleaner
        was quicker, or without `force` if the partition is not due. The result's `error` has the
        reason of a failure. Raises CommitInDoubtError, and StorageError if the store refuses even
        the mark.
        """
        state = self.log.known_state  # the swap finds out if it is not the newest
        known = state.log.topics.get(topic)
        if known is None:
            return None
        plan = ObjectMoment(self.log, state, self.now_ms).plan(topic, partition)
        end = plan.end
        if not closed_extents(state, topic, partition, end):
            return None
        with files.scratch_directory() as directory, files.without_syncs():
            scratch = ScratchPartition(
                directory / "log", self.log.client, state, topic, partition, limit=end
            )
            outputs: list[SegmentObject] = []
            work = _Cleaning(self, scratch, topic, known.topic_id, partition, outputs)
            with contextlib.closing(scratch):
                try:
                    stats = work.run(force=force)
                    if stats is not None:  # that of the objects says less than that of segments
                        stats.compaction_delay_ms = plan.compaction_delay_ms
                    return stats
                except CommitInDoubtError:
                    raise
                except CleaningAborted:
                    self.on_aborted(CleanerStats(topic, partition))
                    return None
                except SweptError as fault:
                    self.log.discard_segments(outputs, fault)
                    _log.info("%s-%d: a sweep was quicker", topic, partition)
                    return None
                except (KafkaLogError, OSError) as fault:
                    files.pass_on(fault)
                    self.log.discard_segments(outputs, fault)
                    return work.failed(fault)


@dataclass(slots=True)
class _Cleaning:
    """One cleaning in a scratch partition."""

    cleaning: StoredCleaning
    scratch: ScratchPartition
    topic: str
    topic_id: str
    partition: int
    outputs: list[SegmentObject]

    def run(self, *, force: bool) -> CleanerStats | None:
        given, scratch = self.cleaning, self.scratch
        given.check_abort()
        scratch.fetch()
        stats = PartitionCleaner(
            engine=scratch.engine,
            now_ms=given.now_ms,
            clock=given.clock,
            config=given.config,
            check_abort=given.check_abort,
            progress=given.progress,
            throttler=given.throttler,
            on_aborted=given.on_aborted,
            erased=given.erased,
            is_due=True,
            limit=scratch.limit,
            high_watermark=scratch.held.high_watermark,
            segment_of=scratch.segment_of,
        ).clean(self.topic, self.partition, force=force, until_clean=True)
        if stats is None:
            return None
        if stats.error is not None:
            stats.error = scratch.about_the_log(stats.error)
            return stats if self._note(scratch.notes()) else None
        sources = scratch.put(self.outputs)
        clean_to = scratch.partition_state().first_dirty_offset
        is_done = self._swap(sources, lambda draft: clean_to, scratch.notes())
        given.log.discard_segments(self.outputs)
        if not is_done:
            _log.info("%s-%d: another process was quicker", self.topic, self.partition)
            return None
        return stats

    def failed(self, fault: Exception) -> CleanerStats | None:
        """Mark the partition; return figures with the reason, or None if it is another log now."""
        given, scratch = self.cleaning, self.scratch
        if not given.log.has_topic(self.topic, self.topic_id):
            return None
        reason = scratch.about_the_log(fault_reason(fault))
        _log.warning("%s-%d cannot be cleaned: %s", self.topic, self.partition, reason)
        scratch.restore_notes()
        config = dict(given.log.describe(self.topic).config)
        is_disk_fault = isinstance(fault, OSError) or isinstance(fault.__cause__, OSError)
        mark_uncleanable(
            DirectoryNotes(scratch.directory),
            reason,
            config,
            now_ms=self._now_ms(),
            is_disk_fault=is_disk_fault,
        )
        if not self._note(scratch.notes()):
            return None
        return CleanerStats(self.topic, self.partition, error=reason)

    def _note(self, notes: Mapping[str, str]) -> bool:
        """Commit what a failed cleaning leaves, unless the log is no longer what it failed on."""
        return self._swap([], lambda draft: self._held(draft).first_dirty_offset, notes)

    def _swap(
        self,
        sources: Sequence[str],
        clean_to: Callable[[StoreDraft], int],
        notes: Mapping[str, str],
    ) -> bool:
        """Commit; return False, and change nothing, if the log is no longer what was cleaned."""
        at_ms = self._now_ms()

        def draft_rest(draft: StoreDraft) -> bool:
            if not self._is_as_it_was(draft):
                return False
            offset = max(clean_to(draft), self._held(draft).log_start_offset)
            fields = {"first_dirty_offset": offset, "cleaning_offset": offset}
            if sources:
                fields["swapped_at"] = draft.state.number + 1
            draft.change_partition(self.topic, self.partition, **fields)
            draft.set_cleaned(self.topic_id, self.partition, Cleaned(offset, at_ms, notes))
            return True

        swap = self.cleaning.log.swap
        return swap(sources, self.outputs if sources else [], now_ms=at_ms, work=draft_rest)

    def _is_as_it_was(self, draft: StoreDraft) -> bool:
        known = draft.state.topics.get(self.topic)
        if known is None or known.topic_id != self.topic_id:
            return False
        is_compacted = TopicConfig.parse(known.config).is_compacted
        return is_compacted and all(name in draft.store.objects for name, _ in self.scratch.sources)

    def _held(self, draft: StoreDraft) -> PartitionState:
        return draft.topic(self.topic).partitions[self.partition]

    def _now_ms(self) -> int:
        given = self.cleaning
        return given.now_ms if given.clock is None else given.clock()
