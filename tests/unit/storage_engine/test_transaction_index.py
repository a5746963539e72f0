"""Aborted transactions are left out of a read_committed read, and only there."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.errors import CorruptLogError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.records.tables import BatchTable
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedRanges,
    AbortedTransaction,
    aborted_transactions,
)
from kafkalog.storage_engine.writing.staged_message import Run, StagedMessage
from tests.builders.batch_builder import ABORT, COMMIT, batch, joined, marker
from tests.builders.segment_files import aborted_entry

ABORTED, COMMITTED = 7, 8


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    """Offsets 0-1 aborted, 2-3 committed, 4 without transaction, 5-6 the markers, 7 by ABORTED."""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"cleanup.policy": "delete"})
    batches = [
        batch(0, 2, of=ABORTED),
        batch(2, 2, of=COMMITTED),
        batch(4, 1),
        marker(5, ABORT, ABORTED),
        marker(6, COMMIT, COMMITTED),
        batch(7, 1, of=ABORTED),
    ]
    data = joined(batches)
    engine.commit([StagedMessage(runs=(Run("t", 0, -1, 0, len(data), 8),), rows=8, data=data)])
    index = layout.segment_file(0, layout.TRANSACTION_INDEX)
    (engine.partition_directory("t", 0) / index).write_bytes(aborted_entry(ABORTED, 0, 5))
    return engine


def offsets(engine: DirectoryLog, *, read_committed: bool, start: int = 0) -> list[int]:
    schema = changelog_schema()
    with engine.snapshot("t", 0) as snapshot:
        batches = list(snapshot.read(start, 8, schema=schema, read_committed=read_committed))
    return [offset for rows in batches for offset in rows["offset"].to_pylist()]


def test_read_committed_leaves_out_aborted_data_and_markers(engine: DirectoryLog) -> None:
    assert offsets(engine, read_committed=True) == [2, 3, 4, 7]


def test_read_committed_begins_amid_an_aborted_transaction(engine: DirectoryLog) -> None:
    assert offsets(engine, read_committed=True, start=1) == [2, 3, 4, 7]


def test_read_uncommitted_leaves_out_markers_only(engine: DirectoryLog) -> None:
    assert offsets(engine, read_committed=False) == [0, 1, 2, 3, 4, 7]


def test_a_missing_index_has_no_entries_and_a_torn_entry_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert aborted_transactions(path) == []
    path.write_bytes(aborted_entry(7, 0, 5) + aborted_entry(8, 6, 9)[:-1])
    assert aborted_transactions(path) == [AbortedTransaction(7, 0, 5, 6)]


def test_an_entry_of_an_unknown_version_is_an_error_that_names_its_position(
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    path.write_bytes(aborted_entry(7, 0, 5) + aborted_entry(8, 6, 9, version=1))
    with pytest.raises(CorruptLogError, match=r"at byte 34: expected entry version 0, found 1"):
        aborted_transactions(path)


# --- which batches they cover --------------------------------------------------------------------

RANGE = st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 12))


@given(
    st.lists(RANGE, max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=20),
)
def test_a_batch_is_covered_if_any_transaction_of_its_producer_holds_all_of_it(
    ranges: list[tuple[int, int, int]], shapes: list[tuple[int, int, bool]]
) -> None:
    """Also where the ranges of a producer overlap, as in a file that was changed."""
    entries = [AbortedTransaction(p, first, first + length) for p, first, length in ranges]
    offset, batches = 0, []
    for producer, length, is_transactional in shapes:
        batches.append((producer, offset, offset + length, is_transactional))
        offset += length + 1
    table = table_of(batches)
    expected = [
        is_transactional
        and any(
            e.producer_id == producer and e.first_offset <= base and last <= e.last_offset
            for e in entries
        )
        for producer, base, last, is_transactional in batches
    ]
    assert AbortedRanges.of(entries).cover(table).tolist() == expected
    low, high = 5, 20
    reaching = AbortedRanges.of(entries).overlapping(low, high)
    assert sorted(reaching.last_offsets.tolist()) == sorted(
        e.last_offset for e in entries if e.first_offset <= high and e.last_offset >= low
    )


def table_of(batches: list[tuple[int, int, int, bool]]) -> BatchTable:
    """A table of (producer, first offset, last offset, is transactional); the rest is zero."""
    columns = {field.name: np.zeros(len(batches), np.int64) for field in fields(BatchTable)}
    columns["producer_ids"] = np.array([b[0] for b in batches], np.int64)
    columns["base_offsets"] = np.array([b[1] for b in batches], np.int64)
    columns["last_offsets"] = np.array([b[2] for b in batches], np.int64)
    columns["attributes"] = np.array([0x10 if b[3] else 0 for b in batches], np.int16)
    return BatchTable(**columns)


def test_a_chunk_full_of_aborts_does_not_cost_their_square() -> None:
    count = 100_000
    entries = AbortedRanges.of([AbortedTransaction(n % 50, n, n) for n in range(count)])
    table = table_of([(n % 50, n, n, True) for n in range(count)])
    begin = time.process_time()
    assert entries.cover(table).all()
    assert time.process_time() - begin < 3  # 0.1 as a rule; one by one it is more than 10
