"""A round in an object store: what it reads, and the commit that publishes it.

The segment objects are fetched into temporary files, each at most once. The indexes come first. The
records follow while the cleaner works, and it waits for those that it needs. The records of a clean
segment with a key index come only if the cleaner reads them. Fresh extents of mixed objects stay
where they are, as an active segment does.

An output is written as an object as soon as it is finished, and its files go.

The swap is one commit, "minus sources, plus outputs", with what the cleaning leaves for the next
one. It is made only if the log still has all sources. Another cleaner, a deletion of records or of
the topic, or retention may have taken one. Then nothing is changed, and what was written is
deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.key_index import key_filter
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.cleaner.objects.fetched_objects import FetchedObjects, FetchedSnapshot
from kafkalog.cleaner.objects.object_moment import ObjectMoment, live_extents
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.cleaner.rewrite.active_producers import ActiveProducers
from kafkalog.cleaner.shelf import CleaningAborted, LostRaceError, Round
from kafkalog.cleaner.state.delete_horizon import write_delete_horizon
from kafkalog.cleaner.state.last_cleaning import write_last_cleaning
from kafkalog.cleaner.state.notes import StoredNotes
from kafkalog.errors import CommitInDoubtError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.failure import ObjectMissingError, SweptError
from kafkalog.storage_engine.object_store.regroup import is_replaced
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX, put_segment
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import Cleaned, Extent
from kafkalog.storage_engine.object_store.stored_producers import recorded_producers
from kafkalog.storage_engine.object_store.stored_segments import segment_of
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import TimeIndex
from kafkalog.storage_engine.segment.locate import header_at
from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot
from kafkalog.storage_engine.transactions.transaction_index import parse_transactions

if TYPE_CHECKING:
    from kafkalog.cleaner.plan import Plan
    from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
    from kafkalog.cleaner.rewrite.groups import RewrittenGroup
    from kafkalog.cleaner.shelf import RoundOrder
    from kafkalog.storage_engine.fs.files import Buffer
    from kafkalog.storage_engine.metadata.state import PartitionState, State
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject
    from kafkalog.storage_engine.object_store.store_draft import StoreDraft
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState
    from kafkalog.storage_engine.segment.gaps import Section
    from kafkalog.storage_engine.segment.open_segment import OpenSegment
    from kafkalog.storage_engine.transactions.producers import Producers
    from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

_WRITES: Final = 2
"""Segments that are written while the round goes on: each is in memory, with its key filter."""


def closed_extents(state: StoreState, topic: str, partition: int) -> Sequence[PlacedExtent]:
    """Return the segment objects from the log start to the first fresh extent, ascending."""
    extents = live_extents(state, topic, partition)
    return [*takewhile(lambda each: layout.is_stored_segment(each.object_name), extents)]


@contextlib.contextmanager
def open_round(moment: ObjectMoment, order: RoundOrder) -> Iterator[ObjectRound | None]:
    """Plan a round of a partition at a moment, and begin to fetch its objects.

    None if the plan asks for none, or if no segment object is below its end: fresh objects are not
    cleaned before they are regrouped. Raises CorruptLogError, StorageError, OSError.
    """
    log, state = moment.log, moment.store
    topic, partition = order.stats.topic, order.stats.partition
    plan = moment.plan(topic, partition)
    # Those at the plan's end or above are not cleaned; a transaction may end in them.
    placed = closed_extents(state, topic, partition)
    if not placed or placed[0].extent.base_offset >= plan.end:
        yield None
        return
    part = _part_of(plan, placed)
    if not order.is_wanted(plan) or not (part.has_work or order.erased is not None):
        yield None
        return
    with files.scratch_directory() as directory:
        objects = FetchedObjects(log.client, directory, _sizes(state, placed))
        with contextlib.closing(objects):
            try:
                work = ObjectRound(
                    log, order, state, part, placed=placed, objects=objects, scratch=directory
                )
                with work.snapshot:
                    yield work
            except ObjectMissingError as fault:
                if is_replaced(log, [name for name, _ in placed], fault):
                    raise _lost(log, order, state.log.topic(topic).topic_id) from fault
                raise


def _part_of(plan: Plan, placed: Sequence[PlacedExtent]) -> Plan:
    """Return the part of a plan that goes up to the last of some segment objects."""
    end = min(plan.end, placed[-1].extent.next_offset)
    first_dirty = min(plan.first_dirty_offset, end)
    taken = [extent for _, extent in placed if extent.base_offset < end]
    return dataclasses.replace(
        plan,
        config=dataclasses.replace(
            plan.config, segment_bytes=min(plan.config.segment_bytes, SEGMENT_SIZE_MAX)
        ),
        first_dirty_offset=first_dirty,
        first_uncleanable_offset=end,
        end=end,
        clean_bytes=sum(each.size for each in taken if each.base_offset < first_dirty),
        cleanable_bytes=sum(each.size for each in taken if each.next_offset > first_dirty),
        closing_bytes=0,
    )


def _sizes(state: StoreState, placed: Sequence[PlacedExtent]) -> Mapping[str, int]:
    """Return the sizes of segment objects and of their side objects, by name."""
    known = {name: state.objects[name] for name, _ in placed}
    sides = {layout.stored_side(name): each.side_size for name, each in known.items()}
    return {name: each.size for name, each in known.items()} | sides


@dataclass(frozen=True, slots=True)
class _ObjectSource:
    """A segment object, and its side object."""

    name: str
    extent: Extent
    side: SideObject
    segment: int

    @property
    def base_offset(self) -> int:
        return self.extent.base_offset

    @property
    def size(self) -> int:
        return self.extent.size

    @property
    def has_keys(self) -> bool:
        return self.side.size_of(layout.KEYS) > 0

    def index_sizes(self) -> tuple[int, int]:
        return self.side.size_of(layout.INDEX), self.side.size_of(layout.TIME_INDEX)

    def last_time(self) -> int | None:
        load = partial(self.side.section, layout.TIME_INDEX)
        return TimeIndex(load, self.base_offset).last_time()

    def transactions(self) -> bytes:
        return self.side.section(layout.TRANSACTION_INDEX)

    def modified_ns(self) -> int | None:
        return None


class ObjectRound(Round):
    """Reads a partition's segment objects, and commits its outputs in their place."""

    def __init__(
        self,
        log: ObjectLog,
        order: RoundOrder,
        state: StoreState,
        plan: Plan,
        *,
        placed: Sequence[PlacedExtent],
        objects: FetchedObjects,
        scratch: Path,
    ) -> None:
        """`placed` are the segment objects, ascending. Raises CorruptLogError, StorageError."""
        self._log = log
        self._state = state
        self._objects = objects
        topic = state.log.topic(plan.topic)
        self._topic_id = topic.topic_id
        self._held: PartitionState = topic.partitions[plan.partition]
        self._replaced: list[str] = []
        self._removed = 0, 0
        """Records and bytes that the outputs lack."""
        self._outputs: list[SegmentObject] = []
        self._puts: deque[Future[None]] = deque()
        self._pool = ThreadPoolExecutor(_WRITES, "kafkalog-put")
        extents = state.extents(topic.topic_id, plan.partition)
        for name, _ in placed:
            objects.begin(layout.stored_side(name))
        sizes = Counter[int]()
        for each in placed:
            sizes[segment_of(each)] += each.extent.size
        # The objects of a segment that is too large for one stay segments of their own.
        found = [
            _ObjectSource(
                each.object_name,
                each.extent,
                SideObject(objects, layout.stored_side(each.object_name)),
                base if sizes[base] <= SEGMENT_SIZE_MAX else each.extent.base_offset,
            )
            for each in placed
            for base in [segment_of(each)]
        ]
        super().__init__(
            order,
            plan,
            snapshot=FetchedSnapshot(objects, plan.topic, plan.partition, self._held, extents),
            scratch=scratch,
            sources=found,
            sources_end=placed[-1].extent.next_offset,
        )
        self._by_base = {each.base_offset: each for each in found}
        self._fetch_records()

    def _fetch_records(self) -> None:
        """Begin to fetch the records, the dirty ones first.

        Those of clean segments wait if the dirty section is small (`unchanged_segments`).
        """
        plan = self.plan
        may_wait = plan.clean_bytes >= unchanged_segments.WORTHWHILE * plan.cleanable_bytes
        taken = [each for each in self._by_base.values() if each.base_offset < plan.end]
        dirty = [each for each in taken if each.extent.next_offset > plan.first_dirty_offset]
        clean = taken[: len(taken) - len(dirty)]
        for each in [*dirty, *(one for one in clean if not (may_wait and one.has_keys))]:
            self._objects.begin(each.name)

    def active_producers(self) -> ActiveProducers:
        """Return the active producers of the state."""
        return self._active

    @functools.cached_property
    def _active(self) -> ActiveProducers:
        found = self._producers()
        found.expire(self.order.now_ms)
        return ActiveProducers(found.entries.values())

    def _producers(self) -> Producers:
        plan = self.plan
        return recorded_producers(self._objects, self._state, plan.topic, plan.partition)

    def aborted_entries(self, base_offset: int) -> Sequence[AbortedTransaction]:
        """Return the transaction index of a segment."""
        source = self._by_base[base_offset]
        return parse_transactions(source.transactions(), source.side.place)

    @contextlib.contextmanager
    def key_index_of(self, segment: OpenSegment) -> Iterator[KeyIndex | None]:
        """Return the key index of a segment; None if it has no valid one."""
        source = self._by_base.get(segment.base_offset)
        if source is None or not source.has_keys:
            yield None
            return
        yield KeyIndex.of(source.side.source(layout.KEYS), segment)

    def add_finished(self, group: RewrittenGroup) -> None:
        """Write outputs as objects, for the commit; sources that it would only write again stay.

        The records of the sources are read for the last time, so their files go.
        """
        names = [self._by_base[each.base_offset].name for each in group.sources]
        self._objects.forget(names)
        gains_keys = any(
            output.keys is not None and not self._by_base[source.base_offset].has_keys
            for source, output in zip(group.sources, group.outputs, strict=False)
        )
        if not (group.is_changed or gains_keys):
            group.discard()
            return
        self._replaced += names
        records, size = self._removed
        self._removed = records + group.records_removed, size + group.bytes_removed
        ends = [*(each.base_offset for each in group.outputs[1:]), group.end]
        for output, section, end in zip(group.outputs, group.sections, ends, strict=True):
            self._wait_for_puts(_WRITES - 1)
            self._puts.append(self._pool.submit(self._put, output, section, end))

    def discard(self) -> None:
        """Delete the objects that were not committed; the end of the round removes the files."""
        self._pool.shutdown(cancel_futures=True)
        self._log.discard_segments(self._outputs)

    def finish(self, earliest_delete_horizon_ms: int | None) -> None:
        """Commit the outputs. Raises CommitInDoubtError as well.

        Aborts if another process was quicker.
        """
        self._wait_for_puts(0)
        outputs, self._outputs = self._outputs, []  # whatever ends this now, they may be committed
        try:
            is_done = self._commit(outputs, earliest_delete_horizon_ms)
        except CommitInDoubtError:
            raise
        except Exception as fault:
            self._outputs = outputs
            if isinstance(fault, SweptError):
                raise LostRaceError("a sweep was quicker") from fault
            raise
        self._outputs = outputs
        if not is_done:
            raise _lost(self._log, self.order, self._topic_id)
        records, size = self._removed
        self.order.stats.records_removed += records
        self.order.stats.bytes_removed += size

    def _wait_for_puts(self, left: int) -> None:
        """Wait until no more than `left` outputs are being written; raises what a write raised."""
        while len(self._puts) > left:
            self._puts.popleft().result()

    def _put(self, output: CleanedSegment, section: Section, end: int) -> None:
        """Write an output as an object, and remove its files."""
        extent = self._extent(output, end)
        with self._sections(output, section, extent) as sections:
            log = output.path(layout.LOG)
            put = put_segment(self._log.client, self._state.number, extent, log, sections)
        self._outputs.append(put)
        output.discard()

    def _extent(self, output: CleanedSegment, end: int) -> Extent:
        times = TimeIndex(output.path(layout.TIME_INDEX), output.base_offset).last_time()
        with files.closing(files.open_to_read(output.path(layout.LOG))) as fd:
            header = header_at(FileBytes(fd), 0, output.size)
        return Extent(
            self._topic_id,
            self.plan.partition,
            0,
            output.size,
            output.base_offset,
            end,
            self._held.leader_epoch,
            layout.NO_TIMESTAMP if times is None else times,
            first_timestamp=layout.NO_TIMESTAMP if header is None else header.max_timestamp,
            segment=output.base_offset,
        )

    @contextlib.contextmanager
    def _sections(
        self, output: CleanedSegment, section: Section, extent: Extent
    ) -> Iterator[Mapping[str, Buffer]]:
        found: dict[str, Buffer] = {}
        for suffix in (layout.INDEX, layout.TIME_INDEX, layout.TRANSACTION_INDEX):
            with contextlib.suppress(FileNotFoundError):
                found[suffix] = files.read_file(output.path(suffix))
        offset = self._held.producer_snapshot
        if extent.has_end(offset):
            (holder,) = (each for each in self._by_base.values() if each.extent.has_end(offset))
            content = holder.side.section(layout.SNAPSHOT)
            found[layout.SNAPSHOT] = content or pack_snapshot(self._producers().entries.values())
        found[layout.GAPS] = section.gaps.astype(">i8").tobytes()
        if output.keys is None:
            yield found
            return
        with files.mapped(output.keys.temporary) as data:
            found[layout.KEYS] = data
            found[layout.STORED_FILTER] = key_filter.encoded(data)
            yield found

    def _commit(
        self, outputs: Sequence[SegmentObject], earliest_delete_horizon_ms: int | None
    ) -> bool:
        """Commit; return False, and change nothing, if the log is no longer what was cleaned."""
        topic, partition, stats = self.plan.topic, self.plan.partition, self.order.stats
        at_ms, ended_ms = self.order.time_ms(), self.order.ended_ms()
        done = dataclasses.replace(stats, rounds=stats.rounds + 1, end_offset=self.end)

        def draft_rest(draft: StoreDraft) -> bool:
            if not is_as_it_was(
                draft, topic, self._topic_id, [each.name for each in self._by_base.values()]
            ):
                return False
            held = draft.topic(topic).partitions[partition]
            clean_to = max(self.end, held.log_start_offset)
            fields = {"first_dirty_offset": clean_to, "cleaning_offset": clean_to}
            if self._replaced:
                fields["swapped_at"] = draft.state.number + 1
                gone_to = max(held.deletions_gone_to, stats.deletions_gone_to)
                fields["deletions_gone_to"] = gone_to
            draft.change_partition(topic, partition, **fields)
            notes = StoredNotes(self._log.root)
            write_delete_horizon(notes, clean_to, earliest_delete_horizon_ms)
            write_last_cleaning(notes, done, ended_ms=ended_ms)
            draft.set_cleaned(self._topic_id, partition, Cleaned(clean_to, at_ms, notes.texts))
            return True

        return self._log.swap(self._replaced, outputs, now_ms=at_ms, work=draft_rest)


def _lost(log: ObjectLog, order: RoundOrder, topic_id: str) -> CleaningAborted:
    """Return the reason to give up a round that met changes of others."""
    if _is_compacted(log.known_state.log, order.stats.topic, topic_id):
        return LostRaceError("another process was quicker")
    return CleaningAborted("the topic is gone, or no longer compacted")


def is_as_it_was(draft: StoreDraft, topic: str, topic_id: str, names: Sequence[str]) -> bool:
    """Return whether a log still has the topic, compacted, and all objects of a round."""
    is_compacted = _is_compacted(draft.state, topic, topic_id)
    return is_compacted and all(name in draft.store.objects for name in names)


def _is_compacted(state: State, topic: str, topic_id: str) -> bool:
    """Return whether a topic exists still, and is compacted."""
    known = state.topics.get(topic)
    if known is None or known.topic_id != topic_id:
        return False
    return TopicConfig.parse(known.config).is_compacted
