"""`kafkalog verify` of a log in an object store: its objects against its commit log.

Each object that the log names must be there, with its size. The records of each partition must lie
side by side, from the log start to the end. An object that nothing names is an orphan: a notice,
since a task may be about to commit it, and a sweep deletes it otherwise. If its writer had seen a
commit that is not there, commits are lost: that is damage. With `deep` every live
object is read: its batches, their records, and its indexes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify_index import OffsetIndexCheck, TimeIndexCheck
from kafkalog.inspection.verify_segment import LogCheck, SegmentCheck
from kafkalog.inspection.verify_transactions import TransactionCheck
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.collector import unnamed
from kafkalog.storage_engine.object_store.extent_bytes import ExtentBytes
from kafkalog.storage_engine.object_store.failure import ObjectMissingError
from kafkalog.storage_engine.object_store.fetched_ranges import AHEAD, FetchedRanges
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.side_object import SECTIONS, SideObject
from kafkalog.storage_engine.object_store.store_draft import is_live
from kafkalog.storage_engine.object_store.store_state import PlacedExtent, StoreState, stored_names
from kafkalog.storage_engine.segment.gaps import GapRows, decoded
from kafkalog.storage_engine.segment.log_scanner import INSPECT, LogScanner
from kafkalog.storage_engine.segment.offset_chain import OffsetChain

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import DataObject

_FOLDERS = (layout.STORED_DATA, layout.STORED_SEGMENTS)


def verify_store(
    log: ObjectLog,
    topic: str | None = None,
    *,
    deep: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Finding]:
    """Yield what is wrong in a log, or in its topic `topic`, as soon as it is found.

    `progress` receives the bytes of records read since its last call. Raises UnknownTopicError,
    StorageError, CorruptLogError for a commit log that cannot be read.
    """
    before = log.store_state()
    if topic is not None:
        before.log.topic(topic)
    sizes = {each.name: each.size for folder in _FOLDERS for each in log.client.list(folder)}
    after = log.store_state()
    check = _Store(log, after, progress)
    wanted = {name: each for name, each in before.objects.items() if name in after.objects}
    if topic is not None:
        topic_id = before.log.topic(topic).topic_id
        wanted = {
            name: each
            for name, each in wanted.items()
            if any(extent.topic_id == topic_id for extent in each.extents)
        }
    yield from check.sizes(wanted, sizes)
    if topic is None:
        yield from check.others(sizes)
    for name, known in sorted(after.log.topics.items()):
        for number, state in known.present() if topic in (None, name) else ():
            yield from check.partition(name, number, state, deep=deep)
    if deep:
        for name, each in wanted.items():
            if not layout.is_stored_segment(name) and name in sizes:
                yield from check.footer(name, each)


def stored_size(log: ObjectLog, topic: str | None = None) -> int:
    """Return the bytes of the live extents of a topic, or of all."""
    state = log.store_state()
    names = {known.topic_id: name for name, known in state.log.topics.items()}
    return sum(
        extent.size
        for each in state.objects.values()
        for extent in each.extents
        if (name := names.get(extent.topic_id)) is not None and topic in (None, name)
    )


@dataclasses.dataclass(slots=True)
class _Store:
    """The checks of one state."""

    log: ObjectLog
    state: StoreState
    progress: Callable[[int], None]

    def sizes(
        self, wanted: Mapping[str, DataObject], sizes: Mapping[str, int]
    ) -> Iterator[Finding]:
        """Compare what the log names with what the store lists."""
        for name, each in wanted.items():
            for object_name, size in zip(
                stored_names(name, each), (each.size, each.side_size), strict=False
            ):
                found = sizes.get(object_name)
                if found is None:
                    expected = f"an object of {size} bytes, which commit {each.added_at} names"
                    yield self._finding(object_name, 0, expected, "no object: records are lost")
                elif found != size:
                    yield self._finding(object_name, 0, f"{size} bytes", f"{found}")

    def others(self, sizes: Mapping[str, int]) -> Iterator[Finding]:
        """Report orphans, what lost commits leave, and objects that aren't ours."""
        for name in unnamed(self.state, sizes):
            is_damage = False
            if not layout.is_stored_data(name):
                expected, found = "a log's objects alone", "a foreign one"
            elif self.state.is_before(name):
                expected = f"commit {layout.seen_by_stored(name)}, which its writer had seen"
                found = f"{self.state.number} as the last: commits are lost, or it is foreign"
                is_damage = True
            else:
                expected = "an object that a commit names"
                found = "none: it is of a task at work, or a sweep deletes it"
                if layout.seen_by_stored(name) <= self.state.swept:
                    found = "none: a sweep was killed, and the next one deletes it"
            yield self._finding(name, 0, expected, found, is_damage=is_damage)

    def partition(
        self, topic: str, number: int, state: PartitionState, *, deep: bool
    ) -> Iterator[Finding]:
        """Check that the extents of a partition follow each other; with `deep` their batches."""
        known = self.state.log.topics[topic]
        live = {known.topic_id: known}
        placed = [
            each
            for each in self.state.extents(known.topic_id, number)
            if is_live(each.extent, live)
        ]
        place = f"{self.log.root}: {topic}-{number}"
        end = state.log_start_offset
        for name, extent in placed:
            if extent.base_offset > end:
                found = f"the next ones at offset {extent.base_offset}, in {name}"
                yield Finding(place, 0, f"the records of offset {end}", found)
            elif extent.base_offset < end and end > state.log_start_offset:
                found = f"offset {extent.base_offset}, twice"
                yield self._finding(name, extent.position, f"offset {end}", found)
            end = max(end, extent.next_offset)
        if end < state.high_watermark:
            found = f"no object with an offset up to {state.high_watermark}"
            yield Finding(place, 0, f"the records of offset {end}", found)
        if deep:
            yield from self._records(placed)

    def _records(self, placed: list[PlacedExtent]) -> Iterator[Finding]:
        """Read the extents of a partition, in their order."""
        transactions = TransactionCheck(is_stored=True)
        check = LogCheck(deep=True, progress=self.progress, transactions=transactions)
        with_bytes = [each for each in placed if each.extent.size]
        ranges = FetchedRanges(self.log.client, with_bytes)
        for place, each in enumerate(with_bytes):
            source = ExtentBytes(ranges, each, with_bytes[place + 1 : place + 1 + AHEAD])
            try:
                for finding in self._extent(each, source, check):
                    position = finding.position
                    if finding.path == Path(each.object_name):
                        position += each.extent.position
                    yield dataclasses.replace(
                        finding, path=f"{self.log.root}/{finding.path}", position=position
                    )
            except ObjectMissingError:
                pass  # reported already
            except CorruptLogError as fault:
                yield Finding(
                    str(fault.path), fault.position, str(fault.expected), str(fault.found)
                )
            except StorageError as fault:
                yield self._finding(each.object_name, each.extent.position, "its bytes", str(fault))
        ranges.close()

    def _extent(
        self, placed: PlacedExtent, source: ExtentBytes, check: LogCheck
    ) -> Iterator[Finding]:
        """Check the batches of an extent, and its indexes."""
        name, extent = placed
        base = extent.base_offset
        is_segment = layout.is_stored_segment(name)
        path = Path(name)
        sections: dict[str, bytes] = {}
        beside = Path(layout.stored_side(name))
        if is_segment:
            side = SideObject(self.log.client, str(beside))
            sections = {kind: side.section(kind) for kind in SECTIONS}
        gaps = decoded(sections.get(layout.GAPS, b""))
        index = OffsetIndexCheck(beside, base, sections.get(layout.INDEX, b""))
        times = TimeIndexCheck(beside, base, sections.get(layout.TIME_INDEX, b""))
        segment = SegmentCheck(
            scan=LogScanner(source, path, INSPECT, limit=extent.size, next_offset=base),
            path=path,
            base_offset=base,
            end_offset=extent.next_offset,
            following=extent.next_offset,
            chain=OffsetChain([GapRows(gaps)] if is_segment else [], base, 0),
            is_active=not is_segment,
            may_be_torn=False,
        )
        aborted = sections.get(layout.TRANSACTION_INDEX, b"")
        yield from check.transactions.begin_stored(beside, base, aborted)
        yield from segment.findings(index, times, check)

    def footer(self, name: str, each: DataObject) -> Iterator[Finding]:
        """Compare the footer of a mixed object with the commit that names it."""
        place = f"{self.log.root}/{name}"
        end = max((extent.position + extent.size for extent in each.extents), default=0)
        try:
            data = bytes(self.log.client.fetch(name, end, each.size - end))
        except (StorageError, CorruptLogError) as fault:
            yield Finding(place, end, "a footer", str(fault))
            return
        try:
            runs = footer_of(place, data)
        except CorruptLogError as fault:
            position = end + fault.position
            yield Finding(place, position, str(fault.expected), str(fault.found))
            return
        found = {(run[1], run[2], run[3], run[4]) for run in runs}
        for extent in each.extents:
            span = extent.partition, extent.position, extent.size
            # The task did not know the id of a topic that its own commit created.
            if not found & {(extent.topic_id, *span), ("", *span)}:
                expected = f"a run of partition {extent.partition} at byte {extent.position}"
                yield Finding(place, end, expected, "a footer without it")

    def _finding(
        self, name: str, position: int, expected: str, found: str, *, is_damage: bool = True
    ) -> Finding:
        return Finding(f"{self.log.root}/{name}", position, expected, found, is_damage)
