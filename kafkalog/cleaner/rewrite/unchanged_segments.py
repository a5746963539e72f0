"""Find the clean segments that a round may leave alone, without reading them.

A segment is *unchanged* if it has only data with keys and values, without producers and
transactions, in batches that need no merging. The cleaning that writes it records this in its key
index. A round leaves it alone if none of its records has become obsolete. To find out, it hashes
the dirty keys under the index's secret, reads only batches with a matching hash, and looks their
records up in the offset map. A round with few new records is then cheap, however large the clean
part is.

A wrong index could only make an obsolete record stay. Kafka's cleaner rewrites the whole clean part
in every round (C40), with the same result.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.dedup.offset_map import OffsetMap, Uint64s
from kafkalog.cleaner.key_index.key_index import KeyIndex, key_hashes
from kafkalog.storage_engine.fs import locks

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.latest_records import LatestRecords
    from kafkalog.cleaner.dedup.log_to_clean import LogToClean
    from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot
    from kafkalog.storage_engine.records.tables import RecordTable
    from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile

WORTHWHILE: Final = 2
"""The clean part must be at least so many times as large as the dirty one."""
KEYS_MAX: Final = 1 << 18
"""Distinct dirty keys whose hashes are held: 2 MiB per secret, and as much to sort them."""
SECRETS_MAX: Final = 2


class UnchangedSegments:
    """The unchanged segments of a round's clean part; `add` the dirty keys, then ask.

    For each segment, `check_abort` is called and may raise.
    """

    def __init__(
        self, snapshot: DirectorySnapshot, log: LogToClean, check_abort: Callable[[], None]
    ) -> None:
        self.secret = secrets.token_bytes(16)
        """The secret of new key indexes, that of most old ones.

        Segments whose index has another secret are read.
        """
        self._snapshot = snapshot
        self._check_abort = check_abort
        self._first_dirty_offset = log.first_dirty_offset
        self._hashes: dict[bytes, list[Uint64s]] = {}
        self._held = 0
        if log.clean_bytes < WORTHWHILE * log.cleanable_bytes:
            return
        met = Counter[bytes]()
        for segment in self._clean_segments():
            with _opened_index(snapshot, segment) as index:
                if index is not None and index.is_unchanged:
                    met[index.secret] += 1
        self._hashes = {secret: [] for secret, _ in met.most_common(SECRETS_MAX)}
        self.secret = next(iter(self._hashes), self.secret)

    @property
    def wants_keys(self) -> bool:
        """Whether keys need to be added."""
        return bool(self._hashes)

    def add(self, records: RecordTable) -> None:
        """Add the keys of dirty records."""
        rows = np.flatnonzero(records.key_sizes >= 0)
        self._held += len(rows)
        for secret, held in self._hashes.items():
            held.append(key_hashes(records, rows, secret))
        if self._held > KEYS_MAX:
            self._compact()

    def _compact(self) -> None:
        for held in self._hashes.values():
            held[:] = [np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *held]))]
            self._held = len(held[0])
        if self._held > KEYS_MAX // 2:  # so many keys are in every segment
            self._hashes.clear()

    def bases_to_leave(self, latest: LatestRecords) -> set[int]:
        """Return the base offsets of unchanged segments without obsolete records.

        Raises CorruptBatchError, StorageError, and what `check_abort` raises.
        """
        # Only a map with all dirty keys can look up a batch out of order.
        if not self._hashes or not isinstance(latest, OffsetMap):
            return set()
        self._compact()
        found: set[int] = set()
        for segment in self._clean_segments():
            with _opened_index(self._snapshot, segment) as index:
                if index is None or not index.is_unchanged:
                    continue
                if not segment.is_late and not segment.has_whole_time_index():
                    continue  # a rewrite gives it a whole one
                held = self._hashes.get(index.secret)
                if held is not None and not _has_obsolete(segment, index, held[0], latest):
                    found.add(segment.base_offset)
        return found

    def _clean_segments(self) -> Iterator[OpenSegmentFile]:
        """Yield the segments wholly in the clean part, opened one at a time."""
        segments, end = self._snapshot.segments, self._first_dirty_offset
        if not segments:
            return
        for segment in self._snapshot.open_segments(segments[0].base_offset, end):
            self._check_abort()
            # The last file of a store's part of a log is no active segment.
            if min(segment.end_offset, self._snapshot.state.high_watermark) <= end:
                yield segment


@contextlib.contextmanager
def _opened_index(
    snapshot: DirectorySnapshot, segment: OpenSegmentFile
) -> Iterator[KeyIndex | None]:
    with locks.SegmentsLock(snapshot.directory).shared():
        index = KeyIndex.open(snapshot.directory, segment)
    try:
        yield index
    finally:
        if index is not None:
            index.close()


def _has_obsolete(
    segment: OpenSegmentFile, index: KeyIndex, hashes: Uint64s, latest: OffsetMap
) -> bool:
    """Return whether a segment has an obsolete record, or its index is damaged."""
    found = index.positions_of(hashes)
    if found is None:
        return True
    for position in found.tolist():
        chunk = segment.batch_at(position)
        if chunk is None:
            return True
        for run, records in chunk.runs(np.ones(1, dtype=np.bool_)):
            if latest.obsolete(run, records).any():
                return True
    return False
