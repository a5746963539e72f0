"""A partition of a log in an object store, as a log directory for the time of one cleaning.

Its segment objects are fetched into the directory, each at most once. They are the closed segments
there. The indexes come first. The records follow while the cleaner works, and it waits for those
that it needs. The records of a clean segment with a key index come only if the cleaner reads them:
it leaves unchanged segments alone. Fresh extents of mixed objects stay where they are, as an active
segment does. The local cleaner then works in the directory, by its own rules. Segments that are new
after that become segment objects.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.key_index import key_filter
from kafkalog.cleaner.plan import valid_first_dirty_offset
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.cleaner.state.last_cleaning import EARLIER
from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import c_library, files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.object_store.segment_object import SEGMENT_SIZE_MAX, put_segment
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import Extent, StoreState, covering
from kafkalog.storage_engine.object_store.stored_producers import recorded_producers
from kafkalog.storage_engine.object_store.stored_segments import segment_of
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.gaps import GapFile, Section, list_sections
from kafkalog.storage_engine.segment.index import TimeIndex
from kafkalog.storage_engine.segment.locate import header_at
from kafkalog.storage_engine.segment.partition_directory import create_partition, note_recorded
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments
from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot

if TYPE_CHECKING:
    from kafkalog.storage_engine.fs.files import Buffer
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.client import ObjectClient
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent

NOTES: Final = (layout.DELETE_HORIZON, layout.LAST_CLEANING, layout.UNCLEANABLE)
"""Small files of a partition's directory that one cleaning leaves for the next one."""
_FILES: Final = (layout.INDEX, layout.TIME_INDEX, layout.TRANSACTION_INDEX)
_REQUESTS: Final = 4
"""Objects that are fetched side by side, in pieces."""
_WRITES: Final = 2
"""Segments that are written side by side: each has its key filter in memory."""


class ScratchPartition:
    """The directory with one partition; `fetch`, let a cleaner work, then `put`."""

    def __init__(
        self,
        root: Path,
        client: ObjectClient,
        state: StoreState,
        topic: str,
        partition: int,
        *,
        limit: int = layout.INT64_MAX,
    ) -> None:
        """Make the directory below `root`, which is empty; send no request. Raises OSError.

        The segments at or above `limit` are not to be cleaned. They are there because a transaction
        may end in them.

        `close` it before the directory is removed.
        """
        self._client = client
        self._state = state
        self._topic = state.log.topic(topic)
        self._partition = partition
        self.held: PartitionState = self._topic.partitions[partition]
        self.limit = limit
        self.sources = closed_extents(state, topic, partition)
        """The segment objects, ascending."""
        sizes = Counter[int]()
        for placed in self.sources:
            sizes[segment_of(placed)] += placed.extent.size
        self._too_large = {base for base, size in sizes.items() if size > SEGMENT_SIZE_MAX}
        """Segments whose files do not fit into one object."""
        self.end = self.sources[-1].extent.next_offset if self.sources else 0
        """Where they end."""
        self._inodes: dict[int, str] = {}
        """The name of the object that each file was fetched from."""
        self._keyed: set[str] = set()
        """Those that have a key index."""
        self._late: dict[Path, Callable[[], None]] = {}
        """What fetches the records of a segment, or waits for them."""
        self._brought: set[Path] = set()
        self._pool = ThreadPoolExecutor(_REQUESTS, "kafkalog-clean")
        self.engine = DirectoryLog(root)
        self.engine.late = self._late
        self.directory = self.engine.partition_directory(topic, partition)
        offset = self.held.producer_snapshot
        is_here = any(extent.has_end(offset) for _, extent in self.sources)
        self._producers_at = offset if is_here else -1
        """The offset whose producers are beside a source; -1 without any."""
        self._prepare()

    def _prepare(self) -> None:
        """Create the topic, with this partition alone, and set the partition's state."""
        topic, held, end = self._topic, self.held, self.end
        count = len(topic.partitions)
        segment_bytes = TopicConfig.parse(topic.config).segment_bytes
        config = {**topic.config, "segment.bytes": str(min(segment_bytes, SEGMENT_SIZE_MAX))}
        config["min.compaction.lag.ms"] = "0"  # the plan has kept away what it holds back
        create_partition(self.directory, topic.topic_id)
        note_recorded(self.directory)
        files.remove(self.directory / layout.segment_file(0, layout.LOG))
        with self.engine.transaction() as transaction:
            absent = {*range(count)} - {self._partition}
            transaction.add_topic(topic.name, topic.topic_id, NewTopic(count, config), absent)
            transaction.change_partition(
                topic.name,
                self._partition,
                high_watermark=end,
                active_base=end,
                log_start_offset=min(held.log_start_offset, end),
                last_stable_offset=min(held.last_stable_offset, end),
                first_dirty_offset=min(valid_first_dirty_offset(held), end),
                leader_epoch=held.leader_epoch,
                producer_snapshot=self._producers_at,
            )
            transaction.publish(self._state.log.time_ms)

    def close(self) -> None:
        """Fetch no more, and wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)

    def fetch(self) -> None:
        """Fetch the indexes, and begin to fetch the records, by a request each for each segment.

        The records of clean segments wait if the dirty section is small (`unchanged_segments`).
        Raises CorruptLogError, StorageError, OSError; a read of the records does so too.
        """
        self.restore_notes()
        sections = [*self._pool.map(self._fetch_indexes, self.sources)]
        keys = {section.key for section in sections}
        list_sections(self.directory, sections, present=keys)
        sizes = [0, 0]
        for _, extent in self.sources:
            sizes[self._is_clean(extent)] += extent.size
        may_wait = sizes[True] >= unchanged_segments.WORTHWHILE * sizes[False]
        for placed in self.sources:
            log = self._path(placed.extent, layout.LOG)
            is_unread = may_wait and self._is_clean(placed.extent)
            if placed.extent.base_offset >= self.limit or (
                is_unread and placed.object_name in self._keyed
            ):
                self._late[log] = partial(self._bring, placed)
            else:
                self._late[log] = self._pool.submit(self._bring, placed).result
        # The plan looks at the first batch of each dirty segment if records may not wait for long,
        # and at the time of a file whose records have none; a write in the background changes that.
        is_looked_at = (
            TopicConfig.parse(self._topic.config).max_compaction_lag_ms < layout.INT64_MAX
        )
        if is_looked_at or any(each.extent.max_timestamp < 0 for each in self.sources):
            for _, extent in self.sources:
                if extent.base_offset < self.limit:
                    self._late[self._path(extent, layout.LOG)]()

    def restore_notes(self) -> None:
        """Write what the last cleaning has left."""
        cleaned = self._state.cleaned_of(self._topic.topic_id, self._partition)
        for name in NOTES:
            if cleaned is not None and name in cleaned.notes:
                files.create(self.directory / name, cleaned.notes[name].encode())

    def _fetch_indexes(self, placed: PlacedExtent) -> Section:
        """Fetch the indexes of a segment, and make its file; return its gaps."""
        with files.without_syncs():
            return self._indexed(placed)

    def _indexed(self, placed: PlacedExtent) -> Section:
        name, extent = placed
        with self._side(placed) as side:
            for suffix in _FILES:
                content = side.section(suffix)
                if content or suffix != layout.TRANSACTION_INDEX:
                    files.create(self._path(extent, suffix), content)
            if side.size_of(layout.KEYS):
                keys = self.directory / layout.key_index_file(extent.base_offset)
                _write(keys, side.pieces(layout.KEYS))
                self._keyed.add(name)
            log = self._path(extent, layout.LOG)
            with files.closing(files.open_empty(log)) as fd:
                files.truncate(fd, self._state.objects[name].size)
            self._inodes[log.stat().st_ino] = name
            files.set_times(log, self._modified_ns(placed))
            if extent.base_offset < self._producers_at <= extent.next_offset:
                content = side.section(layout.SNAPSHOT)
                if not content:
                    number = self._partition
                    found = recorded_producers(self._client, self._state, self._topic.name, number)
                    content = pack_snapshot(found.entries.values())
                files.create(self._producers(), content)
            return Section(extent.base_offset, extent.size, side.gaps())

    @contextlib.contextmanager
    def _side(self, placed: PlacedExtent) -> Iterator[SideObject]:
        """Fetch a side object into a file for a time, as its key index may be large."""
        name = layout.stored_side(placed.object_name)
        size = self._state.objects[placed.object_name].side_size
        # Extents of a damaged state may have one base offset: a mapped file is never another's.
        path = self.directory / f"{secrets.token_hex(8)}{layout.STORED_SIDE}"
        _write(path, self._client.pieces(name, size))
        try:
            with files.mapped(path) as data:
                yield SideObject(self._client, name, data)
        finally:
            files.remove(path)

    def _bring(self, placed: PlacedExtent) -> None:
        """Fetch the records of a segment, unless they are here."""
        name, extent = placed
        log = self._path(extent, layout.LOG)
        if log in self._brought:
            return
        with files.closing(files.open_to_write(log)) as fd:
            files.write_pieces(fd, self._client.pieces(name, extent.size))
        files.set_times(log, self._modified_ns(placed))
        self._brought.add(log)

    def _modified_ns(self, placed: PlacedExtent) -> int:
        """Return the modification time of a segment's file; it tells the age of its records."""
        return max(0, self._state.time_of(placed)) * 1_000_000

    def _is_clean(self, extent: Extent) -> bool:
        return extent.next_offset <= valid_first_dirty_offset(self.held)

    def _producers(self) -> Path:
        return self.directory / layout.segment_file(self._producers_at, layout.SNAPSHOT)

    def _path(self, extent: Extent, suffix: str) -> Path:
        return self.directory / layout.segment_file(extent.base_offset, suffix)

    def partition_state(self) -> PartitionState:
        """Return the partition's state in the directory, after a cleaning."""
        return self.engine.describe(self._topic.name).partitions[self._partition]

    def notes(self) -> Mapping[str, str]:
        """Return what the cleaning leaves for the next one; of earlier ones the last is enough.

        A note of an earlier cleaning that cannot be read is left out.
        """
        found = {}
        for name in NOTES:
            with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
                text = files.read_file(self.directory / name).decode()
                content = json.loads(self.about_the_log(text))
                if not isinstance(content, dict):
                    continue
                content.pop(EARLIER, None)
                if "config" in content:  # that of the directory has smaller segments
                    content["config"] = dict(self._topic.config)
                found[name] = json.dumps(content)
        return found

    def about_the_log(self, text: str) -> str:
        """Let an error name objects, and not the files that are removed."""
        for name, extent in self.sources:
            text = text.replace(
                str(self._path(extent, layout.LOG)), f"{self._client.address}/{name}"
            )
        return text.replace(str(self.engine.root), str(self._client.address))

    def put(self, outputs: list[SegmentObject]) -> Sequence[str]:
        """Write the new segments as objects, into `outputs`; return the sources that they replace.

        Raises StorageError, OSError.
        """
        c_library.give_back_memory()
        segments = list_segments(self.directory)
        with contextlib.closing(GapFile(self.directory / layout.GAPS)) as gaps:
            replaced = {name for name, _ in self.sources}
            new: list[tuple[SegmentFiles, Extent]] = []
            for segment, end in self._followed(segments):
                source = self._inodes.get(segment.log.stat().st_ino)
                if source is not None and not self._gains_keys(source, segment):
                    replaced.discard(source)
                else:
                    new.append((segment, self._extent(segment, end)))

            def put_one(each: tuple[SegmentFiles, Extent]) -> None:
                segment, extent = each
                seen = self._state.number
                with self._sections(segment, gaps, extent.next_offset) as sections:
                    outputs.append(put_segment(self._client, seen, extent, segment.log, sections))

            with ThreadPoolExecutor(_WRITES, "kafkalog-put") as pool:
                for _ in pool.map(put_one, new):
                    pass
        return [name for name, _ in self.sources if name in replaced]

    def _followed(self, segments: Sequence[SegmentFiles]) -> Iterator[tuple[SegmentFiles, int]]:
        """Yield each closed segment with the offset at which the next one begins."""
        closed = [segment for segment in segments if segment.base_offset < self.end]
        return zip(closed, [*(s.base_offset for s in closed[1:]), self.end], strict=True)

    def _gains_keys(self, source: str, segment: SegmentFiles) -> bool:
        """Return whether a segment that stays as it is has a key index now, and had none."""
        path = self.directory / layout.key_index_file(segment.base_offset)
        return source not in self._keyed and path.exists()

    def segment_of(self, base_offset: int) -> int:
        """Return the base offset of the segment that the file of a source belongs to.

        The files of a segment that are too large for one object stay segments of their own.
        """
        found = covering(self.sources, base_offset, base_offset + 1)
        segment = segment_of(found[0]) if found else base_offset
        return base_offset if segment in self._too_large else segment

    def _extent(self, segment: SegmentFiles, end: int) -> Extent:
        times = TimeIndex(segment.time_index, segment.base_offset).last_entry()
        with files.closing(files.open_to_read(segment.log)) as fd:
            header = header_at(FileBytes(fd), 0, segment.size)
        return Extent(
            self._topic.topic_id,
            self._partition,
            0,
            segment.size,
            segment.base_offset,
            end,
            self.held.leader_epoch,
            layout.NO_TIMESTAMP if times is None else times[0],
            first_timestamp=layout.NO_TIMESTAMP if header is None else header.max_timestamp,
            segment=segment.base_offset,
        )

    @contextlib.contextmanager
    def _sections(
        self, segment: SegmentFiles, gaps: GapFile, end: int
    ) -> Iterator[Mapping[str, Buffer]]:
        paths = {
            layout.INDEX: segment.index,
            layout.TIME_INDEX: segment.time_index,
            layout.TRANSACTION_INDEX: segment.transaction_index,
        }
        if segment.base_offset < self._producers_at <= end:
            paths[layout.SNAPSHOT] = self._producers()
        found: dict[str, Buffer] = {}
        for name, path in paths.items():
            with contextlib.suppress(FileNotFoundError):
                found[name] = files.read_file(path)
        listed = [s for s in gaps.sections_of(segment.base_offset) if s.size == segment.size]
        if not listed:
            raise StorageError(f"{segment.log}: its gaps are not listed. Clean the topic again.")
        rows = np.concatenate([*listed[-1].all()])
        found[layout.GAPS] = rows.astype(">i8").tobytes()
        keys = self.directory / layout.key_index_file(segment.base_offset)
        if not keys.exists():
            yield found
            return
        with files.mapped(keys) as data:
            found[layout.KEYS] = data
            found[layout.STORED_FILTER] = key_filter.encoded(data)
            yield found


def _write(path: Path, pieces: Iterable[Buffer]) -> None:
    """Write a file of some pieces."""
    with files.closing(files.open_empty(path)) as fd:
        files.write_pieces(fd, pieces)


def closed_extents(
    state: StoreState, topic: str, partition: int, end: int = layout.INT64_MAX
) -> Sequence[PlacedExtent]:
    """Return the segment objects of a partition that a cleaning can take, ascending.

    They reach from the log start to the first fresh extent, or to the first one at `end` or above.
    """
    known = state.log.topic(topic)
    start = known.partitions[partition].log_start_offset
    found: list[PlacedExtent] = []
    for placed in state.extents(known.topic_id, partition):
        if not layout.is_stored_segment(placed.object_name) or placed.extent.base_offset >= end:
            break
        if placed.extent.next_offset > start:
            found.append(placed)
    return found
