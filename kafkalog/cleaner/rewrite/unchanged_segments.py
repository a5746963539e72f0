"""Clean segments that a round may leave alone, found out without reading them.

A clean segment stays as it is if no record of it has become obsolete, and nothing in it waits for a
moment or for what else the log holds. The second is known when a cleaning writes the segment: it is
*unchanged* if it has nothing but data with keys and values, of no producer and no transaction, in
batches that are as large as they will get; its key index says so. The first is asked of that index:
the keys of the dirty section are hashed under its secret, and where a hash is there, the batch is
read, and the offset map asked. So a round costs what it has to do, however large the clean part of
the log is, as long as new records are few and of keys that were written not long ago.

What is wrong about an index (`key_index` says when it is believed) could only make an obsolete
record stay. Kafka's cleaner reads and writes the whole clean part in every round (C40); what comes
out is the same, for a group of one segment of which nothing goes is not replaced.
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
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.records.tables import RecordTable
    from kafkalog.storage_engine.segment.open_segment import OpenSegment

__all__ = ["UnchangedSegments"]

WORTHWHILE: Final = 2
"""Asking the indexes takes time for each dirty record; so little of the log must be dirty."""
KEYS_MAX: Final = 1 << 18
"""Different dirty keys of which hashes are held: 2 MiB for each secret, and as much to sort."""
SECRETS_MAX: Final = 2


class UnchangedSegments:
    """The segments of one round's clean part that are unchanged; `add` the dirty keys, then ask.

    `check_abort` is called with every segment, and raises to stop.
    """

    def __init__(
        self, snapshot: PartitionSnapshot, log: LogToClean, check_abort: Callable[[], None]
    ) -> None:
        self.secret = secrets.token_bytes(16)
        """What keys are to be hashed under, so that new indexes can be asked along with old ones.

        Segments whose index is under another are read, and get an index under this one.
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
        """Whether there is any use in adding keys."""
        return bool(self._hashes)

    def add(self, records: RecordTable) -> None:
        """Take the keys of dirty records."""
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
        """Return the base offsets of segments of which no record is obsolete.

        Raises CorruptBatchError, StorageError, and what `check_abort` raises.
        """
        # Only a map that has all dirty keys can be asked for those of a batch out of turn.
        if not self._hashes or not isinstance(latest, OffsetMap):
            return set()
        self._compact()
        found: set[int] = set()
        for segment in self._clean_segments():
            with _opened_index(self._snapshot, segment) as index:
                if index is None or not index.is_unchanged:
                    continue
                held = self._hashes.get(index.secret)
                if held is not None and not _has_obsolete(segment, index, held[0], latest):
                    found.add(segment.files.base_offset)
        return found

    def _clean_segments(self) -> Iterator[OpenSegment]:
        """Yield the segments that lie wholly in the clean part, open one by one."""
        segments, end = self._snapshot.segments, self._first_dirty_offset
        if not segments:
            return
        for segment in self._snapshot.open_segments(segments[0].base_offset, end):
            self._check_abort()
            if segment.end_offset <= end:
                yield segment


@contextlib.contextmanager
def _opened_index(snapshot: PartitionSnapshot, segment: OpenSegment) -> Iterator[KeyIndex | None]:
    with locks.SegmentsLock(snapshot.directory).shared():
        index = KeyIndex.open(snapshot.directory, segment)
    try:
        yield index
    finally:
        if index is not None:
            index.close()


def _has_obsolete(
    segment: OpenSegment, index: KeyIndex, hashes: Uint64s, latest: OffsetMap
) -> bool:
    """Tell whether a record of a segment is obsolete; True also where the index is damaged."""
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
