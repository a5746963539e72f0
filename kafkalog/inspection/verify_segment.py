"""Check one segment in a single scan, for `verify`.

The scan checks checksums, headers and offsets, and with `deep` every record. In our logs, only
listed gaps may interrupt the offsets. Indexes, transactions and leader epochs are compared on the
same scan.

Kafka: LogSegment.recover, which checks only sizes, checksums and offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kafkalog.errors import CorruptBatchError, CorruptLogError, OversizedBatchError
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify_index import OffsetIndexCheck, TimeIndexCheck
from kafkalog.inspection.verify_transactions import TransactionCheck
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.log_scanner import LogScanner, ScannedBatches
from kafkalog.storage_engine.segment.offset_chain import OffsetChain

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class LogCheck:
    """State that is carried from one segment of a partition to the next."""

    epochs: list[tuple[int, int]] = field(default_factory=list)
    """(leader epoch, its first offset), as `leader-epoch-checkpoint` has them."""
    transactions: TransactionCheck = field(default_factory=TransactionCheck)
    last_offset: int = -1
    """Last offset of the last batch."""
    end_position: int = 0
    """Byte after the last whole batch of the last segment."""
    latest_ms: int = layout.NO_TIMESTAMP
    """The largest timestamp of all sound batches, and the file that has it."""
    latest_path: Path = Path()
    deep: bool = False
    progress: Callable[[int], None] = lambda _: None
    """Receives the bytes of `.log` files read since its last call."""


@dataclass(slots=True, kw_only=True)
class SegmentCheck:
    """Check one segment."""

    scan: LogScanner
    """Scans its `.log` with the policy INSPECT."""
    path: Path
    base_offset: int
    end_offset: int
    """The base of the next segment."""
    following: int
    """That, or the log's end."""
    chain: OffsetChain | None
    """The listed gaps; None if there is no list."""
    is_active: bool
    """Whether to ignore index entries beyond the end."""
    may_be_torn: bool
    """Whether bytes after the last batch are no damage: a broker runs or was killed."""
    _is_ordered: bool = True
    _is_epoch_wrong: bool = False

    def findings(
        self, index: OffsetIndexCheck, times: TimeIndexCheck, log: LogCheck
    ) -> Iterator[Finding]:
        """Yield what is wrong; advance `log` to the segment's end."""
        previous = max(log.last_offset, self.base_offset - 1)
        done = 0
        has_times = False
        yield from index.in_order()
        yield from times.in_order()
        if self.is_active:
            times.counted_to = index.last_offset()
        for chunk in self.scan:
            table = chunk.table
            yield from self._headers(chunk, previous)
            previous = max(previous, int(table.last_offsets.max()))
            # Index entries can be searched only among ascending offsets.
            if self._is_ordered:
                yield from self._without_damaged_lists(self._breaks(chunk))
                positions = table.positions + chunk.file_position
                offsets = table.base_offsets, table.last_offsets
                yield from index.compare(positions, *offsets, self.scan.position)
                yield from times.compare(*offsets, table.max_timestamps)
            has_times = has_times or bool((table.max_timestamps >= 0).any())
            latest_ms = int(table.max_timestamps[chunk.is_valid].max(initial=log.latest_ms))
            if latest_ms > log.latest_ms:
                log.latest_ms, log.latest_path = latest_ms, self.path
            yield from log.transactions.follow(chunk)
            yield from self._epochs(chunk, log)
            if log.deep:
                yield from _records(chunk)
            log.progress(self.scan.position - done)
            done = self.scan.position
        self.scan.look_at_tail()
        log.last_offset = max(log.last_offset, previous if self.scan.position else log.last_offset)
        log.end_position = self.scan.position
        yield from self._end()
        log.progress(self.scan.limit - done)
        if self._is_ordered and self.scan.fault is None:
            yield from self._without_damaged_lists(self._chain_end())
            yield from index.finish(self.scan.position, is_active=self.is_active)
            yield from times.finish(previous + 1, is_active=self.is_active)
        yield from log.transactions.finish(previous + 1)
        if index.is_missing and self.scan.position:
            yield Finding(index.path, 0, "the segment's offset index", "no file", is_damage=False)
        if times.is_missing and has_times:
            yield Finding(times.path, 0, "the segment's time index", "no file", is_damage=False)

    def _end(self) -> Iterator[Finding]:
        scan = self.scan
        if scan.fault is None:
            return
        is_expected = self.may_be_torn and scan.is_torn
        left = scan.limit - scan.position
        found = str(scan.fault.found)
        if not is_expected:
            found = f"{found}; {left} bytes from there on were not checked"
        yield Finding(self.path, scan.position, "a record batch", found, is_damage=not is_expected)

    def _headers(self, chunk: ScannedBatches, previous: int) -> Iterator[Finding]:
        table, valid = chunk.table, chunk.is_valid
        for batch in np.flatnonzero(~valid).tolist():
            expected = f"checksum {table.crcs[batch]:#010x}, as the batch says"
            yield Finding(self.path, chunk.position_of(batch), expected, "another one")
        bases, lasts = table.base_offsets, table.last_offsets
        before = np.maximum.accumulate(np.append(previous, lasts[:-1]))
        wrong = (bases <= before) | (lasts < bases) | (lasts >= self.end_offset)
        wrong |= lasts - self.base_offset > layout.INT32_MAX
        for batch in np.flatnonzero(wrong).tolist():
            self._is_ordered = False
            expected = f"offsets above {before[batch]}"
            if self.end_offset < layout.INT64_MAX:
                expected += f" and below {self.end_offset}"
            found = f"a batch of the offsets {bases[batch]} to {lasts[batch]}"
            yield Finding(self.path, chunk.position_of(batch), expected, found)
        is_batch = valid & (table.magics == layout.MAGIC)
        codecs = table.attributes & layout.CODEC_MASK
        for batch in np.flatnonzero(valid & (codecs > layout.CODEC_ZSTD)).tolist():
            expected, found = "a codec from 0 to 4", f"codec {codecs[batch]}"
            yield Finding(self.path, chunk.position_of(batch), expected, found)
        room = lasts - bases + 1
        odd = is_batch & ((table.counts < 0) | (table.counts > room)) & ~wrong
        for batch in np.flatnonzero(odd).tolist():
            expected, found = f"0 to {room[batch]} records", f"a count of {table.counts[batch]}"
            yield Finding(self.path, chunk.position_of(batch), expected, found)

    def _without_damaged_lists(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        """Drop the gap lists if they are damaged; another check reports the damage."""
        try:
            yield from findings
        except CorruptLogError:
            self.chain = None

    def _breaks(self, chunk: ScannedBatches) -> Iterator[Finding]:
        """Report gaps that are not listed, and listed gaps that do not exist."""
        table, chain, start = chunk.table, self.chain, 0
        while chain is not None and start < len(table):
            bases, lasts = table.base_offsets[start:], table.last_offsets[start:]
            found = chain.first_break(bases, lasts)
            if found is None:
                return
            batch = start + found
            # A damaged batch was reported already; its last offset cannot be trusted.
            if chunk.is_valid[max(batch - 1, 0) : batch + 1].all():
                before = int(lasts[found - 1]) + 1 if found else chain.next_offset
                wanted = int(bases[0]) if before is None else chain.expected_after(before)
                yield Finding(
                    self.path,
                    chunk.position_of(batch),
                    f"a batch from offset {wanted} on, or a gap that {layout.GAPS} or "
                    f"{layout.RAW_GAPS} lists",
                    f"a batch of the offsets {bases[found]} to {lasts[found]}",
                )
            start, chain.next_offset = batch + 1, None
            if start == len(table):
                chain.next_offset = int(lasts[-1]) + 1

    def _chain_end(self) -> Iterator[Finding]:
        chain = self.chain
        if chain is None or chain.next_offset is None or chain.ends_at(self.following):
            return
        wanted = chain.expected_after(chain.next_offset)
        found = f"the segment's end, and what follows begins at offset {self.following}"
        if chain.sizes:
            sizes = " or ".join(str(size) for size in sorted(set(chain.sizes)))
            found = f"the end of a file that had {sizes} bytes, as {layout.GAPS} says"
        expected = f"a batch from offset {wanted} on, or a gap that is listed"
        yield Finding(self.path, self.scan.position, expected, found)

    def _epochs(self, chunk: ScannedBatches, log: LogCheck) -> Iterator[Finding]:
        """Compare the leader epochs with the checkpoint's, up to the first difference.

        An epoch that a later, lower one has replaced there is right (`leader_epochs.assigned`).
        """
        table = chunk.table
        if not log.epochs or self._is_epoch_wrong or not self._is_ordered:
            return
        epochs, starts = (
            np.array(column, dtype=np.int64) for column in zip(*log.epochs, strict=True)
        )
        places = np.searchsorted(starts, table.base_offsets, side="right") - 1
        has_epoch = chunk.is_valid & (table.leader_epochs >= 0) & (places >= 0)
        is_own = epochs[places] == table.leader_epochs
        is_replaced = np.append(epochs, layout.INT64_MAX)[places + 1] <= table.leader_epochs
        # If the entry's own epoch came back after a replaced one, it would have its own entry.
        is_replaced[:-1] &= (places[1:] > places[:-1]) | ~is_own[1:]
        wrong = np.flatnonzero(has_epoch & ~is_own & ~is_replaced)
        if len(wrong):
            self._is_epoch_wrong = True
            batch = int(wrong[0])
            expected = (
                f"leader epoch {epochs[places[batch]]} at offset {table.base_offsets[batch]}, "
                f"as {layout.LEADER_EPOCH_CHECKPOINT} says"
            )
            found = f"leader epoch {table.leader_epochs[batch]}"
            yield Finding(self.path, chunk.position_of(batch), expected, found)


def _records(chunk: ScannedBatches) -> Iterator[Finding]:
    table = chunk.table
    codecs = table.attributes & layout.CODEC_MASK
    wanted = chunk.is_valid & (table.counts != 0) & (codecs <= layout.CODEC_ZSTD)
    selection = np.flatnonzero(wanted)
    while len(selection):
        try:
            for _ in chunk.records(selection):
                pass
        except CorruptBatchError as fault:
            is_damage = not isinstance(fault, OversizedBatchError)
            words = str(fault.expected), str(fault.found)
            yield Finding(Path(chunk.path), fault.position, *words, is_damage=is_damage)
            rest = table.positions[selection] + chunk.file_position > fault.position
            selection = selection[rest]
        else:
            return
