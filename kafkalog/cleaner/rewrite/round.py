"""One round of cleaning one partition: two passes over closed segments, then the outputs.

The first pass learns the latest offset of every key of the dirty section (`latest_records`). The
second pass decides what stays of all segments below the round's end (`retention_rules`) and writes
it (`batch_writer`), group by group. Records keep their offsets. The round hands each finished group
over, and says when all below its end is clean; how that is published depends on the kind of log
(`directory_round`, `object_round`).

Kafka: Cleaner.doClean, cleanSegments.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kafkalog.cleaner.dedup.latest_records import find_latest_records
from kafkalog.cleaner.dedup.transactions import CleanedTransactions, mapped_batches
from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.rewrite.groups import RewrittenGroup, group_segments_by_size
from kafkalog.cleaner.rewrite.retention_rules import RetentionRules
from kafkalog.cleaner.rewrite.unchanged_segments import UnchangedSegments
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.gaps import SourceGaps
from kafkalog.storage_engine.segment.index import TimeIndex

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
    from kafkalog.cleaner.rewrite.groups import Source
    from kafkalog.cleaner.shelf import Round
    from kafkalog.storage_engine.metadata.config import TopicConfig

_log = logging.getLogger(__name__)


def clean_round(work: Round) -> None:
    """Clean as much of a partition as one round can, and publish it; add to the figures.

    The caller has the turn at the partition. Raises CorruptLogError, StorageError, OSError and
    CleaningAborted; what a failed round has published stays.
    """
    stats, snapshot, plan, config = work.order.stats, work.snapshot, work.plan, work.order.config
    started = time.perf_counter()
    try:
        unchanged = UnchangedSegments(work)
        latest, work.end = find_latest_records(
            snapshot,
            plan,
            work.scratch,
            start=work.sources[0].base_offset if work.sources else plan.first_dirty_offset,
            make_is_mapped=lambda start: mapped_batches(snapshot, is_strict=True),
            config=config,
            stats=stats,
            check_abort=work.check,
            on_records=unchanged.add if unchanged.wants_keys else None,
        )
        with contextlib.closing(latest):
            stats.map_ms += (time.perf_counter() - started) * 1e3
            stats.buffer_utilization = latest.utilization
            stats.tombstones_kept = 0
            rules = RetentionRules(
                snapshot=snapshot,
                latest=latest,
                transactions=CleanedTransactions(snapshot, work.aborted_entries),
                now_ms=work.order.now_ms,
                new_delete_horizon_ms=_delete_horizon_ms(plan.config, work.order.now_ms),
                chunk_size=config.io_buffer_size,
                stats=stats,
                check_abort=work.check,
                erased=work.order.erased,
            )
            merges = config.merge_batches and plan.config.kafkalog_cleaner_merge_batches
            _SecondPass(work, rules, unchanged, merges=merges).clean()
        work.finish(rules.earliest_delete_horizon_ms)
    except Exception:
        # Nothing that is finished is done twice; and on a full disk it may make room.
        try:
            work.swap_finished()
        except Exception as fault:  # the first one is the reason
            files.pass_on(fault)
            _log.warning("%s-%d: not swapped in: %s", stats.topic, stats.partition, fault)
        raise
    finally:
        work.discard()
    stats.rounds += 1
    stats.end_offset = work.end


def _delete_horizon_ms(config: TopicConfig, now_ms: int) -> int | None:
    """Return the delete horizon of tombstones found now; None if it exceeds a timestamp (C61)."""
    horizon = now_ms + config.delete_retention_ms
    return horizon if horizon <= layout.INT64_MAX else None


@dataclass(frozen=True, slots=True)
class _SecondPass:
    work: Round
    rules: RetentionRules
    unchanged: UnchangedSegments
    merges: bool

    def clean(self) -> None:
        """Rewrite all groups of segments below the round's end."""
        work, plan, stats = self.work, self.work.plan, self.rules.stats
        sources = [source for source in work.sources if source.base_offset < work.end]
        groups = group_segments_by_size(
            sources,
            max_size=plan.config.segment_bytes,
            max_index_size=plan.config.segment_index_bytes,
            end=plan.first_uncleanable_offset,
        )
        stats.segments_before += len(sources)
        left = self.unchanged.bases_to_leave(self.rules.latest)
        following = [each.base_offset for each in work.sources[len(sources) :]]
        bases = [group[0].base_offset for group in groups]
        ends = [*bases, *following[:1], work.sources_end][1 : len(groups) + 1]
        for group, end in zip(groups, ends, strict=True):
            if len(group) == 1 and group[0].base_offset in left:
                stats.segments_after += 1
                continue
            rewritten = self._write(group, end)
            work.add_finished(rewritten)
            stats.segments_after += len(rewritten.outputs if rewritten.is_changed else group)

    def _write(self, group: Sequence[Source], end: int) -> RewrittenGroup:
        """Write what stays of a group to `.cleaned` files; leave no file after an error."""
        rules, transactions, config = self.rules, self.rules.transactions, self.work.plan.config
        records_before, bytes_before = rules.stats.left_out
        start = group[0].base_offset
        active = self.work.active_producers()
        writer = BatchWriter(
            self.work.scratch,
            start,
            config,
            new_delete_horizon_ms=rules.new_delete_horizon_ms,
            merges=self.merges,
            stats=rules.stats,
            key_secret=self.unchanged.secret,
        )
        source_gaps = {each.base_offset: SourceGaps(each.base_offset, each.size) for each in group}
        try:
            for run, records, retained in rules.retained(start, end, active):
                source_gaps[run.segment_base].add(run.table)
                writer.add(run, records, retained)
            entries = transactions.take_entries()
            writer.add_transactions(entries)
            times = (each.modified_ns() for each in reversed(group))
            outputs = writer.finish(next((time for time in times if time is not None), 0))
        except BaseException:
            writer.discard()
            raise
        is_indexed_alike = entries == b"".join(each.transactions() for each in group)
        # If only the last entry of a time index is wrong, the new file is better.
        is_indexed_alike &= [
            TimeIndex(output.path(layout.TIME_INDEX), output.base_offset).last_time()
            for output in outputs
        ] == [each.last_time() for each in group]
        records_after, bytes_after = rules.stats.left_out
        return RewrittenGroup(
            group,
            end,
            outputs,
            [output.section(following) for output, following in _followed(outputs, end)],
            [
                source_gaps[each.base_offset].section(following)
                for each, following in _followed(group, end)
            ],
            writer.is_changed or len(group) > 1 or not is_indexed_alike,
            records_after - records_before,
            bytes_after - bytes_before,
        )


_Segment = TypeVar("_Segment", "Source", "CleanedSegment")


def _followed(segments: Sequence[_Segment], end: int) -> Iterator[tuple[_Segment, int]]:
    """Yield each segment with the offset of the next one, the last one with `end`."""
    return zip(segments, [*(segment.base_offset for segment in segments[1:]), end], strict=True)
