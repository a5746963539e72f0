"""Bugs in which records stay: deletions, the last batch, transactions and producers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from importlib import import_module
from typing import Any, Final

import numpy as np
import pytest

from kafkalog.cleaner.dedup import kernels, log_to_clean, transactions
from kafkalog.cleaner.rewrite import active_producers, retention_rules
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.reading import partition_snapshot
from tests.torture.old_bug import OldBug, replace

__all__ = ["RECORDS"]

Patch = pytest.MonkeyPatch
clean: Any = import_module(
    "kafkalog.cleaner.rewrite.clean"
)  # the package has a function of that name
_FILE: Final = "cleaner/test_regressions.py::"


# --- deletions -----------------------------------------------------------------------------------


def _kafka_4529(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, run: Any, *arguments: Any) -> Any:
            now_ms, written_ms = self.now_ms, run.path.stat().st_mtime_ns // 1_000_000
            if written_ms + self.new_delete_horizon_ms - now_ms < now_ms:
                self.now_ms = layout.INT64_MAX
            try:
                return original(self, run, *arguments)
            finally:
                self.now_ms = now_ms

        return decide

    replace(patch, retention_rules.RetentionRules, "_decide", make)


def _kafka_8522(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, *arguments: Any) -> Any:
            found = original(self, *arguments)
            return changed(found, gets_horizon=found.tombstones > 0)

        return decide

    replace(patch, retention_rules.RetentionRules, "_decide", make)


def _kafka_quiet(patch: Patch) -> None:
    patch.setattr(log_to_clean, "read_delete_horizon", lambda *_: None)


# --- the end of the log --------------------------------------------------------------------------


def _kafka_17076(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, run: Any, records: Any, seen: Any, place: Any, stays: Any) -> Any:
            is_end = run.table.last_offsets + 1 == self.snapshot.state.high_watermark
            return original(self, run, records, seen, place, stays & ~is_end)

        return decide

    replace(patch, retention_rules.RetentionRules, "_decide", make)


# --- transactions and producers ------------------------------------------------------------------


def _kafka_8335(patch: Patch) -> None:
    class BySequence(active_producers.ActiveProducers):
        def __init__(self, entries: Any = ()) -> None:
            entries = list(entries)
            super().__init__(entries)
            self._lasts = {(entry.producer_id, entry.last_sequence) for entry in entries}

        def are_last(self, table: Any) -> Any:
            lasts = table.base_sequences + table.last_offsets - table.base_offsets
            pairs = zip(table.producer_ids.tolist(), lasts.tolist(), strict=True)
            return np.array([pair in self._lasts for pair in pairs], dtype=np.bool_)

    patch.setattr(active_producers, "ActiveProducers", BySequence)


def _kafka_8351(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(self: Any, *arguments: Any) -> Any:
            self.rules.transactions = transactions.CleanedTransactions(self.rules.snapshot)
            return original(changed(self), *arguments)

        return write

    replace(patch, clean._SecondPass, "_write", make)


def _kafka_13727(patch: Patch) -> None:
    class KnownBelow:
        """Outcomes of transactions that begin where the round has looked."""

        def __init__(self, outcomes: Any, latest_offset: int) -> None:
            self._outcomes, self._latest_offset = outcomes, latest_offset

        def is_aborted(self, chunk: Any) -> Any:
            aborted = self._outcomes.is_aborted(chunk)
            return aborted & (chunk.table.base_offsets <= self._latest_offset)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def rules(**fields: Any) -> Any:
            known = fields["transactions"]
            known._outcomes = KnownBelow(known._outcomes, fields["latest"].latest_offset)
            return original(**fields)

        return rules

    replace(patch, clean, "RetentionRules", make)


def _kafka_14055(patch: Patch) -> None:
    def mapped(snapshot: Any) -> Callable[[Any], Any]:
        outcomes = snapshot.transaction_outcomes()
        return lambda chunk: ~outcomes.is_aborted(chunk)

    patch.setattr(clean, "mapped_batches", mapped)


def _crabka_528(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def keep_records(*arguments: Any) -> Any:
            before, is_control, after = arguments[:5], arguments[5], arguments[6:]
            return original(*before, np.zeros_like(is_control), *after)

        return keep_records

    replace(patch, kernels, "keep_records", make)


def _kafka_6854(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, run: Any, records: Any, seen: Any, place: Any, stays: Any) -> Any:
            if seen.can_discard[place].any() and (run.table.sizes > self.chunk_size).any():
                raise ValueError("no message was read: the buffer is too small")
            return original(self, run, records, seen, place, stays)

        return decide

    replace(patch, retention_rules.RetentionRules, "_decide", make)


def _kafka_5490(patch: Patch) -> None:
    patch.setattr(clean, "active_producers", lambda *_: active_producers.ActiveProducers())


def _kafka_5490_readers(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, start: int, end: int, *options: Any) -> Iterator[Any]:
            for chunk in self.chunks(start, end):
                for base in chunk.table.base_offsets[chunk.table.counts == 0].tolist():
                    end = min(end, max(start, base))
            yield from original(self, start, end, *options)

        return read

    replace(patch, partition_snapshot.PartitionSnapshot, "_read", make)


def _kafka_7467(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def types(chunk: Any, is_control: Any) -> Any:
            if (is_control & (chunk.table.counts == 0)).any():
                raise LookupError("next on empty iterator")
            return original(chunk, is_control)

        return types

    replace(patch, transactions, "_types", make)


_RUNNING: Final = "cleaner/test_regressions_running.py::"
RECORDS: Final = (
    OldBug(
        name="KAFKA-4529",
        what="a tombstone goes when its file is old, whenever it was cleaned first",
        patch=_kafka_4529,
        tests=(_FILE + "test_a_tombstone_in_an_old_file_waits_for_its_full_time",),
        sign=r"assert b'a' in \{",
    ),
    OldBug(
        name="KAFKA-8522",
        what="each cleaning gives a tombstone a new delete horizon",
        patch=_kafka_8522,
        tests=(_FILE + "test_a_tombstone_goes_in_time_however_often_its_segment_is_written",),
        sign=r"assert True == \(24 < 24\)",
    ),
    OldBug(
        name="a quiet partition",
        what="a delete horizon that has come brings no cleaner back, as in Kafka",
        patch=_kafka_quiet,
        tests=(
            _FILE + "test_a_tombstone_of_a_quiet_partition_goes_in_time",
            _RUNNING + "test_tombstones_are_not_lost_between_two_cleaners",
        ),
        sign=r"assert \[(1, 2|9, 10)\] == \[",
    ),
    OldBug(
        name="KAFKA-17076",
        what="the last batch of the log goes with its last record",
        patch=_kafka_17076,
        tests=(
            _FILE + "test_the_log_end_survives_a_tail_that_is_cleaned_away_whole",
            _FILE + "test_the_log_end_survives_without_its_journal_right_after_the_roll",
        ),
        sign=r"\(left,\) = dump\(log.engine\)|assert \(\[\], \[\], 8\) == \(\[\], \[7\], 8\)",
    ),
    OldBug(
        name="KAFKA-8335",
        what="a producer's last batch is known by its sequence numbers, not by its offset",
        patch=_kafka_8335,
        tests=(
            "cleaner/test_transactions.py::test_old_empty_batches_go_though_sequences_begin_anew",
            _FILE + "test_batches_of_a_producer_whose_sequences_begin_anew_do_not_pile_up",
        ),
        sign=r"assert max\(counts\) <= 5|\[0, 1, 2, 3, 4, 5\]\) == \(.*, \[1, 2, 3, 4, 5\]\)",
    ),
    OldBug(
        name="KAFKA-8351",
        what="of transactions nothing is remembered from one group of segments to the next",
        patch=_kafka_8351,
        tests=(_FILE + "test_a_transaction_over_many_segments_is_whole_or_gone",),
        sign=r"assert \(5 in log.offsets\(\)\) ==",
    ),
    OldBug(
        name="KAFKA-13727",
        what="a round takes transactions that begin beyond its end for committed",
        patch=_kafka_13727,
        tests=(
            "cleaner/test_transactions.py::"
            "test_rounds_that_end_within_transactions_keep_what_the_next_ones_need",
            _FILE + "test_an_abort_marker_stays_while_a_later_round_may_need_it",
        ),
        sign=(
            r"assert latest_records\(log.engine\) == expected"
            r"|assert \[0, 2, 4, 6, 7, 8, ...\] == \[0, 2, 4, 6, 7, 10, ...\]"
        ),
    ),
    OldBug(
        name="KAFKA-14055",
        what="the key of a marker counts as a record's, and removes an older record",
        patch=_kafka_14055,
        tests=(_FILE + "test_records_with_the_key_of_a_marker_and_markers_pass_each_other_by",),
        sign=r"assert \(\{.*\}, True\) == \(\{.*: 0.*\}, True\)",
    ),
    OldBug(
        name="crabka 528",
        what="a newer record with the key of a marker removes the marker",
        patch=_crabka_528,
        tests=(_FILE + "test_records_with_the_key_of_a_marker_and_markers_pass_each_other_by",),
        sign=r"assert 2 in log.offsets\(\)",
    ),
    OldBug(
        name="KAFKA-6854",
        what="a batch that is dropped whole is taken for a buffer that is too small",
        patch=_kafka_6854,
        tests=(_FILE + "test_aborted_batches_larger_than_all_buffers_go",),
        sign="the buffer is too small",
    ),
    OldBug(
        name="KAFKA-5490",
        what="a producer's last batch goes with its last record",
        patch=_kafka_5490,
        tests=(_FILE + "test_a_producers_last_batch_stays_and_readers_pass_over_it",),
        sign=r"== \(5, 0, 1, \(\)\)",
    ),
    OldBug(
        name="KAFKA-5490, of readers",
        what="a reader stops at a batch without records",
        patch=_kafka_5490_readers,
        tests=(_FILE + "test_a_producers_last_batch_stays_and_readers_pass_over_it",),
        sign=r"assert \[\] == \[2, 3, 4\]",
    ),
    OldBug(
        name="KAFKA-7467",
        what="a control batch without a record is read as if it had one",
        patch=_kafka_7467,
        tests=(
            _FILE + "test_a_control_batch_without_a_record_is_no_fault",
            _RUNNING + "test_a_control_batch_without_a_record_does_not_end_the_thread",
        ),
        sign=r"next on empty iterator|eventually\(lambda: thread.cleanings > 0\)",
    ),
)
