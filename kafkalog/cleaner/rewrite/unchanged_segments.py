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

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.cleaner.dedup.offset_map import OffsetMap, Uint64s
from kafkalog.cleaner.key_index.key_index import key_hashes

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.latest_records import LatestRecords
    from kafkalog.cleaner.key_index.key_index import KeyIndex
    from kafkalog.cleaner.shelf import Round
    from kafkalog.storage_engine.records.tables import RecordTable
    from kafkalog.storage_engine.segment.open_segment import OpenSegment

WORTHWHILE: Final = 2
"""The clean part must be at least so many times as large as the dirty one."""
KEYS_MAX: Final = 1 << 18
"""Distinct dirty keys whose hashes are held: 2 MiB per secret, and as much to sort them."""
SECRETS_MAX: Final = 2


class UnchangedSegments:
    """The unchanged segments of a round's clean part; `add` the dirty keys, then ask.

    For each segment, the round's `check` is called and may raise.
    """

    def __init__(self, work: Round) -> None:
        self.secret = secrets.token_bytes(16)
        """The secret of new key indexes, that of most old ones.

        Segments whose index has another secret are read.
        """
        self._work = work
        self._hashes: dict[bytes, list[Uint64s]] = {}
        self._held = 0
        if work.plan.clean_bytes < WORTHWHILE * work.plan.cleanable_bytes:
            return
        met = Counter[bytes]()
        for segment in self._clean_segments():
            with work.key_index_of(segment) as index:
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

        Raises CorruptBatchError, StorageError, and what `check` raises.
        """
        # Only a map with all dirty keys can look up a batch out of order.
        if not self._hashes or not isinstance(latest, OffsetMap):
            return set()
        self._compact()
        found: set[int] = set()
        for segment in self._clean_segments():
            with self._work.key_index_of(segment) as index:
                if index is None or not index.is_unchanged:
                    continue
                if not segment.has_whole_time_index():
                    continue  # a rewrite gives it a whole one
                held = self._hashes.get(index.secret)
                if held is not None and not _has_obsolete(segment, index, held[0], latest):
                    found.add(segment.base_offset)
        return found

    def _clean_segments(self) -> Iterator[OpenSegment]:
        """Yield the segments wholly in the clean part, opened one at a time."""
        sources, end = self._work.sources, self._work.plan.first_dirty_offset
        if not sources or sources[0].base_offset >= end:
            return
        for segment in self._work.snapshot.open_segments(sources[0].base_offset, end):
            self._work.check()
            if segment.end_offset <= end:
                yield segment


def _has_obsolete(
    segment: OpenSegment, index: KeyIndex, hashes: Uint64s, latest: OffsetMap
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
