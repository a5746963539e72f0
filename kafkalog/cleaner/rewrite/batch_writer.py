"""Write the batches that stay of a group of segments into output segments.

Adjacent batches that stay unchanged are copied in one piece. Changed ones are encoded again, and
merged with their neighbours if the settings allow it (`merge.plan`). At most one merged batch is
held back. The snapshot has checked every batch's checksum, so damage is never written under a fresh
checksum.

Kafka: Cleaner.cleanInto, MemoryRecords.filterTo; rules C87 to C94, C97 and C118.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kafkalog.cleaner.key_index.key_index import key_hashes
from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
from kafkalog.cleaner.rewrite.merge import codes, kernels
from kafkalog.cleaner.rewrite.merge.group import Group, NewBatch, encode
from kafkalog.cleaner.rewrite.merge.plan import merge_size, plan_run
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.files import Buffer
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.cleaner.dedup.offset_map import Uint64s
    from kafkalog.cleaner.rewrite.merge.plan import MergePlan
    from kafkalog.cleaner.rewrite.retention_rules import Retained
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.reading.partition_snapshot import Chunk
    from kafkalog.storage_engine.records.tables import Integers, RecordTable


class BatchWriter:
    """Write the output segments of one group: `add` runs, then `finish` or `discard`.

    The first output has the base offset of the group's first segment (C48). A new one begins if
    size or offsets would exceed 2^31-1. `is_changed` says whether batches differ from their
    sources.
    """

    def __init__(
        self,
        directory: Path,
        base_offset: int,
        config: TopicConfig,
        *,
        new_delete_horizon_ms: int | None,
        merges: bool,
        stats: CleanerStats,
        key_secret: bytes | None = None,
    ) -> None:
        """Begin the first output.

        Batches whose tombstones or marker are found for the first time get `new_delete_horizon_ms`.
        If `merges`, batches may be merged. The key indexes hash keys under `key_secret`, or a
        random secret.
        """
        self.is_changed = False
        self._directory = directory
        self._config = config
        self._new_delete_horizon_ms = new_delete_horizon_ms
        self._merges = merges and config.kafkalog_cleaner_merge_batches
        self._stats = stats
        self._transactions = bytearray()
        self._state = np.zeros(codes.GROUP_FIELDS, dtype=np.int64)
        self._group: Group | None = None
        self._key_secret = secrets.token_bytes(16) if key_secret is None else key_secret
        self._is_unchanged = self._merges
        self._keys = _Keys()
        self._outputs = [self._begin(base_offset)]

    def add(self, run: Chunk, records: RecordTable, retained: Retained) -> None:
        """Write what stays of a run, except batches that may still be merged.

        Raises CorruptBatchError, OSError.
        """
        plan = plan_run(
            run,
            records,
            retained,
            config=self._config,
            new_delete_horizon_ms=self._new_delete_horizon_ms,
            merges=self._merges,
        )
        self.is_changed |= bool((plan.batches[0] == codes.DROP).any())
        self._is_unchanged = self._is_unchanged and _is_unchanged(run, records, plan, retained)
        self._keys.add(run, records, plan.rows, self._key_secret)
        outputs = np.empty((codes.OUTPUT_FIELDS, len(run.table) + 1), dtype=np.int64)
        count, first_open = kernels.plan_outputs(
            plan.batches, merge_size(self._config), self._state, outputs
        )
        written = _Written()
        for kind, first, end, is_behind in outputs[:, :count].T.tolist():
            if kind == codes.COPY and is_behind:
                assert self._group is not None
                assert self._group.original is not None
                written.add_bytes(self._group.original)
                self._group = None
            elif kind == codes.COPY:
                written.copy(run, first, end)
            elif kind == codes.EMPTY:
                self._write_empty(written, run, first)
            else:
                batches = self._rebuilt(run, records, plan, first, end, is_behind=bool(is_behind))
                self._note_rebuilt(batches)
                written.add(batches)
        if first_open < len(run.table):
            self._hold(run, records, plan, first_open)
        self._append(written)

    def add_transactions(self, entries: Buffer) -> None:
        """Add packed `.txnindex` entries; each goes to the output that has its marker."""
        self._transactions += entries

    def finish(self, mtime_ns: int) -> list[CleanedSegment]:
        """Write what is held back, and all indexes; return the outputs in ascending order.

        All get the modification time of their last source. Key indexes come last, if there is room.
        Raises OSError.
        """
        self._close_group()
        entry = layout.TRANSACTION_INDEX_ENTRY
        for place, output in enumerate(self._outputs):
            is_last = place + 1 == len(self._outputs)
            end = layout.INT64_MAX if is_last else self._outputs[place + 1].base_offset
            start = output.base_offset if place else -1
            for position in range(0, len(self._transactions) - entry.size + 1, entry.size):
                data = self._transactions[position : position + entry.size]
                marker = entry.unpack(data)[3]
                if start <= marker < end:
                    output.append_transactions(data)
            output.finish(mtime_ns)
        for output in self._outputs:
            output.finish_keys(is_unchanged=self._is_unchanged and not self._transactions)
        return self._outputs

    def discard(self) -> None:
        """Remove the outputs."""
        self._group = None
        for output in self._outputs:
            output.discard()

    # --- what is written of a run ---

    def _rebuilt(
        self,
        run: Chunk,
        records: RecordTable,
        plan: MergePlan,
        first: int,
        end: int,
        *,
        is_behind: bool,
    ) -> list[NewBatch]:
        batches = _with_records(plan, first, end)
        rows = plan.rows[plan.bounds[first] : plan.bounds[end]]
        if not is_behind and not run.table.has_messages:
            return encode(records, plan.table, batches, rows, self._config)
        group = self._group if is_behind else Group()
        assert group is not None
        if len(rows):
            group.add(records, plan.table, batches, rows)
        if is_behind:
            self._group = None
        return group.encode(self._config)

    def _write_empty(self, written: _Written, run: Chunk, batch: int) -> None:
        """Write the header of a batch that keeps no record (C91), or copy an empty batch (C94)."""
        from kafkalog.storage_engine.records.records import empty_batch

        data = empty_batch(run.table, batch)
        start = int(run.table.positions[batch])
        if data == run.buffer[start : start + int(run.table.sizes[batch])]:
            written.copy(run, batch, batch + 1)
            return
        self._note_rebuilt([written.add_bytes(data)])

    def _hold(self, run: Chunk, records: RecordTable, plan: MergePlan, first: int) -> None:
        end = len(run.table)
        batches = _with_records(plan, first, end)
        if self._group is None:
            self._group = Group()
            batch = int(batches[0])
            if len(batches) == 1 and plan.batches[0, batch] == codes.WHOLE:
                start = int(run.table.positions[batch])
                self._group.original = run.buffer[start : start + int(run.table.sizes[batch])]
        rows = plan.rows[plan.bounds[first] : plan.bounds[end]]
        self._group.add(records, plan.table, batches, rows)

    def _close_group(self) -> None:
        if self._group is None:
            return
        written = _Written()
        if self._state[1] == 1 and self._group.original is not None:
            written.add_bytes(self._group.original)
        else:
            batches = self._group.encode(self._config)
            self._note_rebuilt(batches)
            written.add(batches)
        self._group = None
        self._state[:] = 0
        self._append(written)

    def _note_rebuilt(self, batches: Sequence[NewBatch]) -> None:
        self._stats.batches_rewritten += len(batches)
        self.is_changed = True

    # --- what goes into which output ---

    def _append(self, written: _Written) -> None:
        pieces, sizes, bases, lasts, tops = written.joined()
        self._stats.bytes_written += int(sizes.sum())
        while len(sizes):
            output = self._outputs[-1]
            count = output.count_fitting(sizes, lasts)
            if count == 0:
                base_offset = output.next_offset
                if int(lasts[0]) - base_offset > layout.INT32_MAX:
                    base_offset = int(bases[0])
                self._outputs.append(self._begin(base_offset))
                continue
            head, pieces = _split(pieces, int(sizes[:count].sum()))
            keys = self._keys.take(int(lasts[count - 1]))
            output.append(
                head, sizes[:count], bases[:count], lasts[:count], tops[:count], keys=keys
            )
            sizes, bases, lasts, tops = sizes[count:], bases[count:], lasts[count:], tops[count:]

    def _begin(self, base_offset: int) -> CleanedSegment:
        return CleanedSegment(
            self._directory, base_offset, self._config, key_secret=self._key_secret
        )


class _Written:
    """Bytes to write for one run, in pieces, and four figures of each batch."""

    def __init__(self) -> None:
        self._pieces: list[Buffer] = []
        self._figures: list[Integers] = [np.empty((4, 0), dtype=np.int64)]

    def copy(self, run: Chunk, first: int, end: int) -> None:
        table = run.table
        stop = int(table.positions[end - 1] + table.sizes[end - 1])
        self._pieces.append(memoryview(run.buffer)[int(table.positions[first]) : stop])
        columns = (table.sizes, table.base_offsets, table.last_offsets, table.max_timestamps)
        self._figures.append(np.stack([column[first:end] for column in columns]))

    def add(self, batches: Sequence[NewBatch]) -> None:
        self._pieces += [batch.data for batch in batches]
        figures = [
            (len(batch.data), batch.base_offset, batch.last_offset, batch.max_timestamp)
            for batch in batches
        ]
        self._figures.append(np.array(figures, dtype=np.int64).T)

    def add_bytes(self, data: bytes) -> NewBatch:
        from kafkalog.storage_engine.format.batch import parse_header

        header = parse_header(data)
        batch = NewBatch(data, header.base_offset, header.last_offset, header.max_timestamp)
        self.add([batch])
        return batch

    def joined(self) -> tuple[list[Buffer], Integers, Integers, Integers, Integers]:
        """Return the pieces, and per batch: size, base offset, last offset, largest timestamp."""
        figures = np.ascontiguousarray(np.concatenate(self._figures, axis=1))
        return self._pieces, figures[0], figures[1], figures[2], figures[3]


class _Keys:
    """Hashes of the keys that stay, until their batches are written."""

    def __init__(self) -> None:
        self._hashes: list[Uint64s] = []
        self._offsets: list[Integers] = []

    def add(self, run: Chunk, records: RecordTable, rows: Integers, secret: bytes) -> None:
        is_data = records.key_sizes[rows] >= 0
        is_control = run.table.is_control
        if is_control.any():
            is_data &= ~is_control[records.batch_index[rows]]
        if not is_data.all():
            rows = rows[is_data]
        if len(rows):
            self._hashes.append(key_hashes(records, rows, secret))
            self._offsets.append(records.offsets[rows])

    def take(self, last_offset: int) -> tuple[Uint64s, Integers]:
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *self._hashes])
        offsets = np.concatenate([np.empty(0, dtype=np.int64), *self._offsets])
        count = int(np.searchsorted(offsets, last_offset, side="right"))
        self._hashes, self._offsets = [hashes[count:]], [offsets[count:]]
        return hashes[:count], offsets[:count]


def _is_unchanged(run: Chunk, records: RecordTable, plan: MergePlan, retained: Retained) -> bool:
    """Return whether nothing in the remaining run depends on time, a transaction or a producer."""
    stays = (retained.kept > 0) | retained.stays_empty
    special = layout.CONTROL_BIT | layout.TRANSACTIONAL_BIT
    table = run.table
    return not (
        table.has_messages
        or retained.tombstones.any()
        or retained.gets_horizon.any()
        or (stays & (retained.kept == 0)).any()
        or (stays & ((table.attributes & special) != 0)).any()
        or (stays & (table.producer_ids >= 0)).any()
        or (records.key_sizes[plan.rows] < 0).any()
    )


def _with_records(plan: MergePlan, first: int, end: int) -> Integers:
    bounds = plan.bounds
    found: Integers = first + np.flatnonzero(bounds[first + 1 : end + 1] != bounds[first:end])
    return found


def _split(pieces: Sequence[Buffer], size: int) -> tuple[list[Buffer], list[Buffer]]:
    head: list[Buffer] = []
    for place, piece in enumerate(pieces):
        if len(piece) > size:
            rest = [memoryview(piece)[size:], *pieces[place + 1 :]]
            return [*head, memoryview(piece)[:size]] if size else head, rest
        head.append(piece)
        size -= len(piece)
    return head, []
