"""A snapshot of a partition in a log directory.

It keeps its `.log` files open. A later roll, swap or deletion therefore does not affect it.
It holds no lock: the segments lock is shared only while files are listed and opened.

Invariants:

- A snapshot reads no byte of the active segment after `active_size`. Bytes there are garbage, or
  belong to a commit in flight.
- A log of ours has no gap that is not listed (`gaps`), within segments and between them.
- Indexes only choose the start of a scan (`locate.locate`). They are opened by name on demand, so
  an index may be missing or newer than the open log. The scan is then longer.

Gaps are normal: the cleaner removes records, batches, and all batches of a segment. It lists the
gaps between batches, and a snapshot opens the list with its segments.

The number of descriptors is bounded. A snapshot of very many segments opens a *window* of them, and
lists the directory again at its end. The next window is newer but yields the same records as far as
they are still needed, so a changelog reader sees no difference. A reader that needs exactly one
state, to find the latest record of a key, opens the snapshot `whole`. The cleaner, which alone
replaces segments, opens them one by one (`held`).

A reader must finish a window within `delete.retention.ms` (a day by default) after opening it, as
in Kafka. The cleaner removes aborted data at once, and the marker only that much later. A slower
reader still has the data in its open files, but may not find the marker in the later window. It
then judges the data by the producer's next marker, or takes it as not aborted. A slower reader
needs a larger `delete.retention.ms`, as for tombstones.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
from kafkalog.storage_engine.segment.listing import Listing
from kafkalog.storage_engine.segment.loss import Loss, lost_adopted
from kafkalog.storage_engine.segment.offset_chain import GapLists
from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile
from kafkalog.storage_engine.segment.segments import SegmentFiles, bases_below
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    IndexedTransactions,
)
from kafkalog.storage_engine.transactions.transaction_markers import LogIdentity, log_identity

WINDOW = 128
"""Segments that a snapshot opens at once, unless it is opened whole."""


class _Window:
    def __init__(
        self,
        directory: Path,
        state: PartitionState,
        segments: list[SegmentFiles],
        offset: int,
        size: int | None,
    ) -> None:
        """Open `size` segments (None: all), beginning with the one that may hold `offset`."""
        bases = [segment.base_offset for segment in segments]
        first = 0 if size is None else max(0, bisect_right(bases, offset) - 1)
        last = len(bases) if size is None else min(first + size, len(bases))
        self.is_first = first == 0
        self.following = bases[last] if last < len(bases) else None
        """Base offset of the segment after the window, or None."""
        self.bases = bases[first:last]
        self.segments: list[OpenSegmentFile] = []
        self.gaps = None if state.listed_from == layout.INT64_MAX else GapLists(directory)
        try:
            for place in range(first, last):
                self.segments.append(_opened(state, segments, place, self.gaps))
        except BaseException:
            self.close()
            raise

    def covers(self, offset: int) -> bool:
        """Return whether the window has the segment that may hold `offset`, if one exists."""
        if self.following is not None and offset >= self.following:
            return False
        return self.is_first or offset >= self.bases[0]

    def keep_last(self, active_base: int) -> bool:
        """Close all but the active segment; return False if the window does not have it."""
        if not self.segments or self.bases[-1] != active_base:
            return False
        for segment in self.segments[:-1]:
            segment.close()
        del self.segments[:-1], self.bases[:-1]
        self.is_first = False
        return True

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        if self.gaps is not None:
            self.gaps.close()


def _opened(
    state: PartitionState, segments: Sequence[SegmentFiles], place: int, gaps: GapLists | None
) -> OpenSegmentFile:
    segment = segments[place]
    is_last = place + 1 == len(segments)
    is_active = segment.base_offset == state.active_base
    return OpenSegmentFile(
        segment,
        end_offset=layout.INT64_MAX if is_last else segments[place + 1].base_offset,
        committed=state.active_size if is_active else None,
        high_watermark=state.high_watermark,
        gaps=gaps,
        listed_from=state.listed_from,
    )


def _committed(segments: Sequence[SegmentFiles], state: PartitionState) -> list[SegmentFiles]:
    """Omit segments that a commit in flight, or a dead one, created."""
    return [segment for segment in segments if segment.base_offset <= state.active_base]


def _check_present(
    directory: Path, segments: Sequence[SegmentFiles], state: PartitionState, start: int, end: int
) -> None:
    """Raise StorageError if [start, end) needs the first or active segment and it is missing."""
    first = segments[0].base_offset if segments else state.high_watermark
    last = segments[-1].base_offset if segments else -1
    if max(start, state.log_start_offset) < min(end, first):
        raise _missing(directory, max(start, state.log_start_offset))
    if state.active_size and last != state.active_base and end > state.active_base:
        raise _missing(directory, state.active_base)


def _missing(directory: Path, offset: int) -> StorageError:
    return StorageError(
        f"{directory}: the segment of offset {offset} is missing; committed records are lost"
    )


class DirectorySnapshot(PartitionSnapshot):
    """A snapshot of a partition in a log directory; see the module.

    `segments` has all its segments, open or not.
    """

    def __init__(
        self,
        directory: Path,
        topic: str,
        partition: int,
        state: PartitionState,
        segments: list[SegmentFiles],
        *,
        load_state: Callable[[], PartitionState] | None = None,
        start: int | None = None,
        held: bool = False,
        listing: Listing,
        aborted: Sequence[AbortedTransaction] | None = None,
        lost: Sequence[Loss] = (),
        check_topic: Callable[[], object],
    ) -> None:
        """Open the segments; the caller holds the segments lock, shared or exclusive.

        `aborted` has the aborted transactions if the `.txnindex` files are unreliable, and `lost`
        the records that are gone. With `load_state`, open a window that begins at offset `start`
        (default: the log start); the function returns later states, under the lock. With `held`
        too, open no segment yet; see `open_snapshot`. Raises StorageError, and FileNotFoundError if
        a listed file is gone.
        """
        super().__init__(topic, partition, state)
        self.directory = directory
        self.segments = _committed(segments, state)
        self._load_state = load_state
        self._held = held
        self._listing = listing
        self._known_aborted = aborted
        self.lost = tuple(lost)
        self._check_topic = check_topic
        self._window = _Window(
            directory,
            state,
            [] if held else self.segments,
            state.log_start_offset if start is None else start,
            WINDOW if load_state else None,
        )

    def __del__(self) -> None:
        if hasattr(self, "_window"):
            self.close()

    def close(self) -> None:
        """Close all files."""
        self._window.close()

    def keep_active(self) -> bool:
        """Close all but the active segment; return False unless only that one matters later.

        A broker may change its files at any time. Producers and raw appends need
        other files too.
        """
        gaps, state = self._window.gaps, self.state
        if gaps is None or not gaps.raw.is_missing or state.producer_snapshot >= 0:
            return False
        return self._window.keep_last(state.active_base)

    def grow(self, state: PartitionState, start: int) -> bool:
        """Go on to a later state if the open active segment has all from `start` on.

        The committed bytes of an active segment stay where they are as long as it is the active
        one. An empty one may be made anew, which its name tells.
        """
        known, gaps = self.state, self._window.gaps
        is_grown = (
            known.active_base == state.active_base <= start
            and known.high_watermark <= state.high_watermark
            and 0 < state.active_size >= known.active_size
            and known.listed_from == state.listed_from
            and state.producer_snapshot < 0
        )
        if not is_grown or gaps is None or gaps.raw.path.exists():
            return False
        (segment,) = self._window.segments
        if not segment.is_live:
            return False
        segment.grow(state.active_size, state.high_watermark)
        self.state = state
        return True

    def log_identity(self) -> LogIdentity | None:
        """Return the identity of the log; raises UnknownTopicError if its topic is gone."""
        found = log_identity(self.directory, self.state, self.segments)
        self._check_topic()
        return found

    def indexed_transactions(self, *, kept_max: int = 0) -> IndexedTransactions:
        """Return the entries of the `.txnindex` files, for consecutive reads that share them."""
        end, known = self.state.high_watermark, self._known_aborted
        return IndexedTransactions(
            self._transaction_indexes,
            end_offset=end,
            known=known,
            kept_max=kept_max,
            check_topic=self._check_topic,
        )

    def _transaction_indexes(self) -> list[tuple[int, Path]]:
        """Return (base offset, path) of the transaction indexes, even without a `.log` file."""
        paths = {segment.base_offset: segment.transaction_index for segment in self.segments}
        for base_offset in bases_below(self.directory, layout.INT64_MAX):
            path = self.directory / layout.segment_file(base_offset, layout.TRANSACTION_INDEX)
            paths.setdefault(base_offset, path)
        return sorted(paths.items())

    def position_of(self, offset: int) -> tuple[SegmentFiles, int] | None:
        """Return the segment and position of the first batch with last_offset >= `offset`.

        Returns None if no such batch is below the high watermark. Compares no checksums, except of
        a compressed message v0 or v1.
        """
        end = self.state.high_watermark
        for segment in self.open_segments(offset, end):
            for position, header in segment.batches_from(offset):
                if segment.base_offset_of(position, header) >= end:
                    return None
                return segment.files, position
        return None

    def open_segments(self, start: int, end: int) -> Iterator[OpenSegmentFile]:
        """Yield the segments that may hold offsets of [start, end), window by window."""
        if end > self.state.high_watermark:
            raise self._out_of_range(end, self.state)
        self.check_not_lost(start, end)
        _check_present(self.directory, self.segments, self.state, start, end)
        if self._held:
            yield from self._held_segments(start, end)
            return
        offset: int | None = start
        while offset is not None and offset < end:
            with self._window_at(offset) as window:
                for segment in window.segments[max(0, bisect_right(window.bases, offset) - 1) :]:
                    if segment.base_offset >= end:
                        return
                    yield segment
                offset = window.following

    def _held_segments(self, start: int, end: int) -> Iterator[OpenSegmentFile]:
        """Yield the segments that may hold offsets of [start, end), with one open at a time."""
        assert self._load_state is not None
        first = bisect_right(self.segments, start, key=lambda segment: segment.base_offset) - 1
        for place in range(max(0, first), len(self.segments)):
            base_offset = self.segments[place].base_offset
            if base_offset >= end:
                return
            try:
                segment = _opened(self.state, self.segments, place, self._window.gaps)
            except FileNotFoundError:
                following = [after.base_offset for after in self.segments[place + 1 : place + 2]]
                if following and self._load_state().log_start_offset >= following[0]:
                    continue  # retention deleted it, and the log start has passed its records
                raise _missing(self.directory, base_offset) from None
            with contextlib.closing(segment):
                yield segment

    def whole_segments(self) -> Sequence[OpenSegmentFile]:
        """Return all segments, open and ascending, of a snapshot that was opened `whole`."""
        self.check_not_lost(self.state.log_start_offset, self.state.high_watermark)
        _check_present(
            self.directory,
            self.segments,
            self.state,
            self.state.log_start_offset,
            self.state.high_watermark,
        )
        return self._window.segments

    @contextlib.contextmanager
    def _window_at(self, offset: int) -> Iterator[_Window]:
        load_state = self._load_state
        if load_state is None or self._window.covers(offset):
            yield self._window
            return

        def reopen(state: PartitionState, listed: list[SegmentFiles]) -> _Window:
            if offset < state.log_start_offset and (
                not listed or listed[0].base_offset > max(offset, self.state.log_start_offset)
            ):
                # Deleted since the snapshot was opened: an error is better than a silent gap.
                raise self._out_of_range(offset, state)
            committed = _committed(listed, state)
            _check_present(self.directory, committed, state, offset, state.high_watermark)
            return _Window(self.directory, state, committed, offset, WINDOW)

        window = self._listing.open_listed(load_state, reopen)
        try:
            yield window
        finally:
            window.close()


def open_snapshot(
    directory: Path,
    topic: str,
    partition: int,
    load_state: Callable[[], PartitionState],
    *,
    whole: bool = False,
    held: bool = False,
    start: int | None = None,
    locked: bool = True,
    load_aborted: Callable[[], Sequence[AbortedTransaction] | None] | None = None,
    load_lost: Callable[[Sequence[SegmentFiles]], Sequence[Loss]] | None = None,
    check_topic: Callable[[], object] = lambda: None,
) -> DirectorySnapshot:
    """Open a partition as it is now: its state, listing and files, all of the same time.

    `load_state` is called under the shared segments lock. A snapshot of more than `WINDOW` segments
    calls it again for each further window. `whole` opens all segments. `held` opens each by name
    when the read gets there. It is for the holder of the cleaner lock, who alone replaces segments
    and no longer reads the replaced ones. `start` is the offset of the first read, if known.
    `locked` is False for a broker's directory, to leave no lock files there. `load_aborted` returns
    the aborted transactions for the last loaded state (None: read the `.txnindex` files).
    `load_lost` returns the records that are gone; by default, the segments of which only the
    indexes are left, of those that an adoption took. `check_topic` is called after files were
    opened by name. It raises if the directory is another topic's by now.
    """

    def opened(state: PartitionState, listed: list[SegmentFiles]) -> DirectorySnapshot:
        later = load_state if held or (len(listed) > WINDOW and not whole) else None
        return DirectorySnapshot(
            directory,
            topic,
            partition,
            state,
            listed,
            load_state=later,
            start=start,
            held=held,
            listing=listing,
            aborted=None if load_aborted is None else load_aborted(),
            lost=(load_lost or (lambda found: lost_adopted(directory, state, found)))(listed),
            check_topic=check_topic,
        )

    listing = Listing(directory, locked=locked)
    return listing.open_listed(load_state, opened)
