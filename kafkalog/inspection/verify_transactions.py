"""Compare the transactions of a partition with its `.txnindex` files, for `verify`.

Readers of committed records leave out what these files list. An ABORT marker that ends a
transaction with records needs an entry that covers them. An entry needs its marker. A cleaning
leaves empty batches, for which some brokers keep no entry.

Kafka: ProducerStateManager, TransactionIndex.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from kafkalog.errors import CorruptBatchError
from kafkalog.inspection.finding import Finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.log_scanner import ScannedBatches
from kafkalog.storage_engine.transactions.control_record import read_control_record

_ABORTED: Final = layout.CONTROL_ABORT
_UNKNOWN: Final = -1
_Entry = tuple[int, int, int, int, int]
"""Position, producer id, first offset, last offset, last stable offset."""


class TransactionCheck:
    """Follow a partition's transactions from segment to segment.

    `open` maps each producer to the first offset of its open transaction. An early release left
    entries out of an object store (`is_stored`), where readers need none, so they don't count as
    damage.
    """

    def __init__(self, *, is_stored: bool = False) -> None:
        self.open: dict[int, int] = {}
        self._with_records: set[int] = set()
        """The producers whose open transaction has a record, not only empty batches."""
        self._entries: dict[int, _Entry] = {}
        self._path = Path()
        self._dead: list[Finding] | None = None
        """Findings about entries of a dead commit; damage only if a later entry has its marker."""
        self._is_stored = is_stored
        self._confirmed = -1
        """The position of the last entry whose marker was found."""

    def begin(self, path: Path, base_offset: int, *, is_ours: bool = False) -> Iterator[Finding]:
        """Read the `.txnindex` of the next segment, if any.

        `is_ours` marks our active segment: its next writer truncates the entries of a dead commit.
        """
        self._begin(path, is_ours=is_ours)
        try:
            size = path.stat().st_size
            if size > files.WHOLE_SIZE_MAX:
                found = Finding(path, 0, f"{files.WHOLE_SIZE_MAX} bytes at most", f"{size} bytes")
                yield from self._judged(found)
                return
            data = files.read_file(path)
        except FileNotFoundError:
            return
        for finding in self._read(data, base_offset):
            yield from self._judged(finding)

    def begin_stored(self, path: Path, base_offset: int, data: bytes) -> Iterator[Finding]:
        """Take the `.txnindex` of the next segment of an object store; findings name `path`."""
        self._begin(path)
        yield from self._read(data, base_offset)

    def _begin(self, path: Path, *, is_ours: bool = False) -> None:
        self._path, self._entries = path, {}
        self._dead, self._confirmed = [] if is_ours else None, -1

    def _judged(self, finding: Finding) -> Iterator[Finding]:
        if self._dead is None:
            yield finding
        else:
            self._dead.append(finding)

    def _read(self, data: bytes, base_offset: int) -> Iterator[Finding]:
        path, entry = self._path, layout.TRANSACTION_INDEX_ENTRY
        before = base_offset - 1
        whole = len(data) - len(data) % entry.size
        for position in range(0, whole, entry.size):
            version, producer_id, first, last, stable = entry.unpack_from(data, position)
            if version != 0:
                yield Finding(path, position, "entry version 0", str(version))
                return
            if last <= before or not 0 <= first <= last:
                expected = f"a transaction that ends above offset {before}"
                yield Finding(path, position, expected, f"offsets {first} to {last}")
            if not 0 <= stable <= last + 1:
                expected = f"a last stable offset of at most {last + 1}"
                yield Finding(path, position, expected, str(stable))
            before = max(before, last)
            self._entries[last] = (position, producer_id, first, last, stable)
        if whole < len(data):
            expected = f"entries of {entry.size} bytes"
            yield Finding(path, whole, expected, f"{len(data) - whole} bytes at the end")

    def forget_below(self, offset: int) -> None:
        """Forget transactions that begin below `offset`, in segments that retention will delete.

        A cleaner ignores these segments too, so it drops the markers of such transactions.
        """
        self.open = {producer: first for producer, first in self.open.items() if first >= offset}

    def follow(self, chunk: ScannedBatches) -> Iterator[Finding]:
        """Process a chunk's valid batches."""
        table = chunk.table
        is_wanted = chunk.is_valid & (table.magics == layout.MAGIC) & (table.producer_ids >= 0)
        is_wanted &= (table.attributes & layout.TRANSACTIONAL_BIT) != 0
        rows = np.flatnonzero(is_wanted)
        if not len(rows):
            return
        is_control = (table.attributes[rows] & layout.CONTROL_BIT) != 0
        columns = (table.producer_ids, table.base_offsets, table.last_offsets)
        fields = zip(
            rows.tolist(), is_control.tolist(), *(c[rows].tolist() for c in columns), strict=True
        )
        for row, ends, producer_id, base_offset, last_offset in fields:
            if not ends:
                self.open.setdefault(producer_id, base_offset)
                if table.counts[row]:
                    self._with_records.add(producer_id)
                continue
            entry = self._entries.pop(last_offset, None)
            if table.counts[row] <= 0:
                continue  # an empty control batch ends no transaction
            first = self.open.pop(producer_id, None)
            yield from self._end(_type(chunk, row), producer_id, first, last_offset, entry)
            self._with_records.discard(producer_id)

    def _end(
        self, kind: int, producer_id: int, first: int | None, last: int, entry: _Entry | None
    ) -> Iterator[Finding]:
        is_visible = first is not None and producer_id in self._with_records
        if kind == _ABORTED and entry is None and is_visible:
            expected = f"an entry for offsets {first} to {last}, aborted by producer {producer_id}"
            found = "none" if self._is_stored else "none: readers would take them for committed"
            yield Finding(self._path, 0, expected, found, is_damage=not self._is_stored)
        if entry is None:
            return
        position, owner, entry_first, _, _ = entry
        found = f"producer {owner} from offset {entry_first}"
        if kind not in (_ABORTED, _UNKNOWN) or owner != producer_id:
            expected = f"an ABORT marker of producer {owner} at offset {last}"
            found = f"producer {producer_id}'s {layout.CONTROL_TYPES.get(kind, 'marker')}"
            yield Finding(self._path, position, expected, found)
            return
        self._confirmed = max(self._confirmed, position)
        if first is not None and entry_first > first:
            expected = f"an entry from offset {first} on, where the transaction begins"
            yield Finding(self._path, position, expected, found)

    def finish(self, end_offset: int) -> Iterator[Finding]:
        """Report entries below `end_offset` that have no marker in the segment."""
        for position, producer_id, _, last, _ in self._entries.values():
            if last < end_offset:
                expected = f"an ABORT marker of producer {producer_id} at offset {last}"
                yield from self._judged(Finding(self._path, position, expected, "no marker there"))
        yield from (found for found in self._dead or () if found.position <= self._confirmed)


def _type(chunk: ScannedBatches, batch: int) -> int:
    """Return the type of a control batch's record; `_UNKNOWN` for a malformed one."""
    position = int(chunk.table.positions[batch])
    try:
        record = read_control_record(chunk.buffer, position, parse_header(chunk.buffer, position))
    except CorruptBatchError:
        return _UNKNOWN  # the check that decodes records reports it
    return _UNKNOWN if record is None else record.type
