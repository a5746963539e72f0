"""The transaction markers that a read has found, kept for later reads of the same log.

A transaction may be far longer than one read. Without this cache, each of many short reads over it
would look ahead to its marker again. A finished read therefore leaves its markers here, and the
next one that begins in their range continues from them.

Below the high watermark a marker never changes, and a marker that a cleaner removes ends no record
any more. The markers of an earlier read are valid only for the same log:

- It is the same directory of the same topic, and no leader was elected since. A leader that was not
  in sync may have truncated the log and let it grow again.
- Its high watermark is not below the known range.
- The segments that were closed then have the same sizes, from the start of the read on. A log that
  lost its end exactly between two batches has lost markers without a trace.
- The last batch of the range is still where it was. A log that was restored in place has another
  one there.

The cache drops markers that fail these checks, and those of a read that failed.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.segment.segments import SegmentFiles

_SLACK: Final = 1 << 20
"""Bytes of markers that are kept before passed ones are dropped."""
_MARKER_SIZE: Final = 9
_PRODUCER_SIZE: Final = 400
_SEGMENT_SIZE: Final = 150


class Place(NamedTuple):
    """A batch in a log directory."""

    segment_base: int
    position: int
    crc: int

    def is_held_in(self, directory: Path) -> bool:
        """Return whether a batch of that checksum is still there."""
        path = directory / layout.segment_file(self.segment_base, layout.LOG)
        try:
            with files.closing(files.open_to_read(path)) as fd:
                data = files.read_at(fd, layout.BATCH_OVERHEAD, self.position)
        except OSError as raised:
            files.pass_on(raised)
            return False
        return len(data) == layout.BATCH_OVERHEAD and parse_header(data, 0).crc == self.crc


class Markers:
    """All markers of a log in the offsets [`begin`, `frontier`). Not thread-safe."""

    def __init__(self, begin: int) -> None:
        self.begin = self.frontier = begin
        self.last: Place | None = None
        """The batch before the frontier."""
        self._count = 0
        self._size_max = _SLACK
        self._of: dict[int, tuple[array[int], bytearray]] = {}
        """Per producer id: the offsets of its markers, ascending, and whether each is an ABORT."""

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """The approximate memory in bytes."""
        return self._count * _MARKER_SIZE + len(self._of) * _PRODUCER_SIZE

    def note(
        self, found: Iterable[tuple[int, int, bool]], frontier: int, last: Place | None = None
    ) -> None:
        """Add the markers from the frontier to a new one, as (producer id, offset, is ABORT).

        `last` is the batch before the new one.
        """
        for producer_id, offset, is_abort in found:
            if producer_id not in self._of:
                self._of[producer_id] = array("q"), bytearray()
            offsets, aborts = self._of[producer_id]
            offsets.append(offset)
            aborts.append(is_abort)
            self._count += 1
        if frontier > self.frontier:
            self.frontier, self.last = frontier, last

    def tells(self, producer_id: int, offset: int) -> bool:
        """Return whether a marker of a producer above `offset` is known."""
        own = self._of.get(producer_id)
        return own is not None and own[0][-1] > offset

    def outcomes(
        self, producer_id: int, last_offsets: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return for a producer's batches (b) the offsets of their markers, and which are ABORTs.

        The offset is -1 if no marker is known.
        """
        import numpy as np

        ends = np.full(len(last_offsets), -1, dtype=np.int64)
        is_aborted = np.zeros(len(last_offsets), dtype=np.bool_)
        own = self._of.get(producer_id)
        if own is not None:
            offsets = np.frombuffer(own[0], dtype=np.int64)
            places = np.searchsorted(offsets, last_offsets)
            is_known = places < len(offsets)
            places = places[is_known]
            ends[is_known] = offsets[places]
            is_aborted[is_known] = np.frombuffer(own[1], dtype=np.bool_)[places]
        return ends, is_aborted

    def pass_by(self, offset: int) -> None:
        """Note that the read has passed `offset`; drop lower markers once they are many."""
        if self.size > self._size_max:
            self.forget_below(offset)
            self._size_max = 2 * self.size + _SLACK

    def forget_below(self, offset: int) -> None:
        """Drop the markers below `offset`."""
        self.begin = max(self.begin, offset)
        kept: dict[int, tuple[array[int], bytearray]] = {}
        for producer_id, (offsets, aborts) in self._of.items():
            passed = bisect_left(offsets, offset)
            if passed < len(offsets):
                kept[producer_id] = offsets[passed:], aborts[passed:]
        self._of = kept
        self._count = sum(len(offsets) for offsets, _ in kept.values())


class LogIdentity(NamedTuple):
    """The log of a read, with the facts that show whether it has changed since."""

    directory: Path
    place: tuple[object, ...]
    leader_epoch: int
    high_watermark: int
    segments: Sequence[SegmentFiles]
    """The closed segments, ascending."""

    def sizes(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (base offset, bytes) of the closed segments that overlap [start, end)."""
        first = bisect_right(self.segments, start, key=lambda segment: segment.base_offset) - 1
        stop = bisect_left(self.segments, end, key=lambda segment: segment.base_offset)
        return tuple((s.base_offset, s.size) for s in self.segments[max(0, first) : stop])


def log_identity(
    directory: Path, state: PartitionState, segments: Sequence[SegmentFiles]
) -> LogIdentity | None:
    """Return the identity of a log, or None if its directory or topic id is unreadable."""
    try:
        found = directory.stat()
        topic_id = checkpoints.read_topic_id(directory)
    except (OSError, StorageError) as raised:
        files.pass_on(raised)
        return None
    closed = len(segments)
    while closed and segments[closed - 1].base_offset >= state.active_base:
        closed -= 1
    place = (str(directory), found.st_dev, found.st_ino, topic_id)
    return LogIdentity(
        directory, place, state.leader_epoch, state.high_watermark, segments[:closed]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    place: tuple[object, ...]
    leader_epoch: int
    sizes: tuple[tuple[int, int], ...]
    markers: Markers

    @property
    def size(self) -> int:
        return self.markers.size + len(self.sizes) * _SEGMENT_SIZE

    def is_true_of(self, log: LogIdentity) -> bool:
        """Return whether leader epoch, high watermark and last batch are those of the same log."""
        epoch, frontier, last = self.leader_epoch, self.markers.frontier, self.markers.last
        if epoch != log.leader_epoch or frontier > log.high_watermark:
            return False
        return last is None or last.is_held_in(log.directory)

    def has_segments_of(self, log: LogIdentity, offset: int) -> bool:
        """Return whether the closed segments from that of `offset` on have the same sizes."""
        if not self.sizes:
            return True
        found = log.sizes(offset, self.sizes[-1][0] + 1)
        first = bisect_left(self.sizes, found[0]) if found else 0
        return found == self.sizes[first:]


class MarkerCache:
    """The markers that earlier reads of this process found in several logs, within a memory bound.

    Thread-safe: markers belong to the thread that takes them until it gives them back.
    """

    def __init__(self, *, entries_max: int = 64, size_max: int = 16 << 20) -> None:
        self._entries_max = entries_max
        self._size_max = size_max
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        # Reentrant: the garbage collector may end a read of this thread while it holds the lock.
        self._guard = threading.RLock()
        self._kept: tuple[_Kept, ...] = ()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, log: LogIdentity, offset: int) -> Markers | None:
        """Remove and return the known markers of a log from `offset` on, or None."""
        with self._guard:
            gone: set[_Kept] = set()
            best: _Kept | None = None
            for kept in self._kept:
                markers = kept.markers
                if kept.place != log.place:
                    continue
                if not kept.is_true_of(log):
                    gone.add(kept)
                elif not markers.begin <= offset <= markers.frontier:
                    continue
                elif not kept.has_segments_of(log, offset):
                    gone.add(kept)
                elif best is None or markers.frontier > best.markers.frontier:
                    best = kept
            if best is not None:
                gone.add(best)
            self._kept = tuple(kept for kept in self._kept if kept not in gone)
        if best is None:
            return None
        best.markers.begin = offset  # a later read of this range finds it, with fewer sizes kept
        return best.markers

    def give(self, log: LogIdentity, markers: Markers, offset: int) -> None:
        """Keep the markers of a read that got to `offset`. They belong to the cache from now on."""
        new = _kept(log, markers)
        if new.size > self._size_max // 4:
            markers.forget_below(offset)
            new = _kept(log, markers)
        with self._guard:
            kept = [*self._kept, new]
            size = sum(one.size for one in kept)
            while kept and (len(kept) > self._entries_max or size > self._size_max):
                size -= kept.pop(0).size
            self._kept = tuple(kept)


def _kept(log: LogIdentity, markers: Markers) -> _Kept:
    sizes = log.sizes(markers.begin, markers.frontier)
    return _Kept(log.place, log.leader_epoch, sizes, markers)


known_markers: Final = MarkerCache()
"""The cache of this process: Spark reuses its Python workers, and a log is read repeatedly."""
os.register_at_fork(after_in_child=known_markers.clear)
