"""Scan all objects of a log in an object store while other processes write, clean and collect.

It lists the objects after it has read the newest state, and fetches each of them whole, once. An
object is written before the commit that names it, and is never overwritten. The result therefore
holds as of that state, if each object that the state names was read. Otherwise a collector was
quicker: the records may be in new objects, and the scan lists and reads again. It also does this
after a commit that came meanwhile, unless commits never pause.

Objects that no commit names any more, or not yet, are read too. The commits are too. A mixed object
is read as far as it has records of the topic, by its footer. Segment objects of other topics are
left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kafkalog.erasure.file_occurrences import FileOccurrences, scan_bytes
from kafkalog.erasure.key_scan import KeyScan
from kafkalog.erasure.topic_files import LIVE, FileKind, TopicFile
from kafkalog.errors import CorruptLogError, KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp_run
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.object_store.client import ObjectEntry
from kafkalog.storage_engine.object_store.collector import deleted_after
from kafkalog.storage_engine.object_store.failure import ObjectMissingError
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.store_state import stored_names
from kafkalog.storage_engine.segment.byte_source import HeldBytes

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import Extent, StoreState

_FETCHERS: Final = 8
_SMALL: Final = 1 << 20
"""Objects up to this size are fetched side by side, and larger ones one by one."""
_TOGETHER: Final = 64
_FOLDERS: Final = (
    *(layout.STORED_DATA, layout.STORED_SEGMENTS, layout.STORED_COMMITS),
    *(layout.STORED_CLAIMS, layout.STORED_PROBE),
)
_ROOT: Final = (layout.STORED_LOG, layout.STORED_BOUNDARY)


class StoreScan(KeyScan[TopicFile, Sequence[FileOccurrences]]):
    """Scan all objects: several results of a mixed object."""

    _log: ObjectLog

    def _round(self, *, is_pressed: bool) -> bool:
        state = self._log.store_state()
        state.log.topic(self._topic)
        kinds = _Kinds(state, self._topic)
        listed = [file for entry in self._listed() if (file := kinds.file(entry)) is not None]
        new = [file for file in listed if file not in self._seen]
        self._of += sum(file.size for file in new)
        for file, data in self._fetched(new):
            found = self._scanned(state, file, data)
            if found is not None:
                self._seen[file] = found
            self._advance(file.size)
        read = [file for file in listed if file in self._seen]
        missing = kinds.live() - {str(file.path) for file in read}
        after = self._log.store_state()
        lost = missing & _Kinds(after, self._topic).live()
        self.state = state.log
        self.files = (
            *(one for file in read for one in self._seen[file]),
            *(FileOccurrences(kinds.lost(name), faults=["it is missing"]) for name in sorted(lost)),
        )
        return missing == lost and (is_pressed or after.number == state.number)

    def _listed(self) -> Iterator[ObjectEntry]:
        client = self._log.client
        for name in _ROOT:
            entry = client.head(name)
            if entry is not None:
                yield entry
        for folder in _FOLDERS:
            yield from client.list(folder)

    def _fetched(
        self, wanted: Iterable[TopicFile]
    ) -> Iterator[tuple[TopicFile, bytearray | KafkaLogError]]:
        """Yield each file with its content, or with the reason why it cannot be had."""
        with ThreadPoolExecutor(_FETCHERS, "kafkalog-erase") as pool:
            for is_small, files in itertools.groupby(wanted, lambda file: file.size <= _SMALL):
                while some := [*itertools.islice(files, _TOGETHER if is_small else 1)]:
                    yield from zip(some, pool.map(self._fetch, some), strict=True)

    def _fetch(self, file: TopicFile) -> bytearray | KafkaLogError:
        name = str(file.path)
        try:
            self._log.client.check_whole(name, file.size)
            data = bytearray()
            for piece in self._log.client.pieces(name, file.size):
                data += piece
            return data
        except (StorageError, CorruptLogError) as fault:
            return fault

    def _scanned(
        self, state: StoreState, file: TopicFile, data: bytearray | KafkaLogError
    ) -> Sequence[FileOccurrences] | None:
        """Return the occurrences in an object; None if it is gone."""
        if isinstance(data, ObjectMissingError):
            return None
        if isinstance(data, KafkaLogError):
            return [FileOccurrences(file, faults=[f"it cannot be read: {data}"])]
        if file.path.suffix == layout.STORED_MIXED and file.kind.has_batches:
            return [*self._mixed(state, file, data)]
        return [self._scan(file, HeldBytes(bytes(data)), 0, len(data))]

    def _mixed(
        self, state: StoreState, file: TopicFile, data: bytearray
    ) -> Iterator[FileOccurrences]:
        """Yield the occurrences in a mixed object: for each run of the topic, and its footer."""
        name = str(file.path)
        topic_id = state.log.topic(self._topic).topic_id
        live = state.objects.get(name)
        extents = {each.position: each for each in (live.extents if live is not None else ())}
        footer = dataclasses.replace(file, kind=FileKind.MARK)
        faults: list[str] = []
        found: list[tuple[TopicFile, int, int]] = []
        try:
            runs = [*footer_of(name, bytes(data))]
        except CorruptLogError as fault:
            faults.append(
                f"at byte {fault.position}: expected {fault.expected}, found {fault.found}"
            )
            footer = dataclasses.replace(file, kind=FileKind.INDEX)  # unknown bytes are no text
            runs = [*_runs(extents.values(), {topic_id: self._topic})]
        end = 0
        for topic, run_id, partition, position, size, *_ in runs:
            end = max(end, position + size)
            if topic != self._topic:
                continue
            for start, extent in extents.items():
                if position <= start < position + size:
                    batches = data[start : start + extent.size]
                    stamp_run(batches, extent.run_offset, extent.leader_epoch)
                    data[start : start + extent.size] = batches
            number = partition if run_id in ("", topic_id) else None
            found.append((dataclasses.replace(file, partition=number), position, position + size))
        held = HeldBytes(bytes(data))
        for run, start, stop in found:
            yield self._scan(run, held, start, stop)
        rest = self._scan(footer, held, end, len(data))
        rest.faults += faults
        yield rest

    def _scan(self, file: TopicFile, held: HeldBytes, start: int, end: int) -> FileOccurrences:
        return scan_bytes(file, held, self._keys, start=start, end=end, names=self._names)


def _runs(extents: Iterable[Extent], names: dict[str, str]) -> Iterator[Sequence[Any]]:
    """Yield the runs that a footer would name, of the extents of a commit."""
    for each in extents:
        topic = names.get(each.topic_id, "")
        yield topic, each.topic_id, each.partition, each.position, each.size


class _Kinds:
    """The objects as they are in one state."""

    def __init__(self, state: StoreState, topic: str) -> None:
        self._state = state
        self._topic_id = state.log.topic(topic).topic_id
        topics = state.log.topics.values()
        self._others = {each.topic_id for each in topics} - {self._topic_id}
        gone = state.log.deleting.values()
        self._others |= {each.topic_id for each in gone if each.name != topic}
        self._deleted_after = deleted_after(state)

    def live(self) -> set[str]:
        """Return the names of the objects that the state has, and that have records of the topic.

        Their side objects are among them.
        """
        return {
            name
            for entry, each in self._state.objects.items()
            if any(extent.topic_id == self._topic_id for extent in each.extents)
            for name in stored_names(entry, each)
        }

    def lost(self, name: str) -> TopicFile:
        """Return an object that is missing, although a commit names it, as a file."""
        return TopicFile(Path(name), self._kind(name), self._partition(name), 0, 0, 0, 0)

    def file(self, entry: ObjectEntry) -> TopicFile | None:
        """Return an object as a file; None for one of another topic."""
        name = entry.name
        is_segment = name.startswith(f"{layout.STORED_SEGMENTS}/")
        if is_segment and layout.topic_of_stored(name) in self._others:
            return None
        dropped = self._state.dropped.get(name)
        kind = self._kind(name)
        kept_until_ms = None
        if dropped is not None:
            kept_until_ms = self._deleted_after(name, dropped)
        elif kind is FileKind.UNFINISHED:
            kept_until_ms = entry.modified_ms + STAGED_RETENTION_MS
        changed_ms = entry.modified_ms if dropped is None else dropped.time_ms
        return TopicFile(
            Path(name),
            kind,
            self._partition(name) if kind in LIVE or kind is FileKind.RETIRED else None,
            0,
            entry.size,
            changed_ms * 1_000_000,
            entry.modified_ms,
            is_retired=dropped is not None,
            kept_until_ms=kept_until_ms,
        )

    def _kind(self, name: str) -> FileKind:
        folder = name.partition("/")[0]
        if folder == layout.STORED_COMMITS:
            return FileKind.JOURNAL
        if folder in _ROOT or folder in (layout.STORED_CLAIMS, layout.STORED_PROBE):
            return FileKind.MARK
        if not layout.is_stored_data(name):
            return FileKind.OTHER
        if name in self._state.dropped:
            return FileKind.RETIRED
        is_live = name in self._state.objects
        if layout.is_stored_segment(name):
            return FileKind.LOG if is_live else FileKind.UNFINISHED
        if name.endswith(layout.STORED_SIDE):
            return FileKind.INDEX
        if name.endswith(layout.STORED_MIXED):
            return FileKind.MIXED if is_live else FileKind.STAGED
        return FileKind.OTHER

    def _partition(self, name: str) -> int | None:
        """Return the partition of a segment object of the topic."""
        if not layout.is_stored_segment(name) or layout.topic_of_stored(name) != self._topic_id:
            return None
        tail = name.rpartition("/")[2][layout.TOPIC_ID_TEXT_SIZE + 1 :]
        return int(tail.partition("-")[0])
