"""What became of a transaction is told by its marker, whatever the transaction index says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import CorruptBatchError, CorruptLogError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading import directory_snapshot
from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot
from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
from kafkalog.storage_engine.transactions import transaction_index, transaction_markers
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    IndexedTransactions,
    aborted_transactions,
)
from kafkalog.storage_engine.transactions.transaction_outcomes import TransactionOutcomes
from tests.builders.batch_builder import ABORT, COMMIT, BuiltBatch, batch, empty, marker
from tests.builders.segment_files import aborted_entry, name, write_segment


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    transaction_markers.known_markers.clear()


class Log:
    """Segments of batches, and the offsets that a committed read must give."""

    def __init__(self, directory: Path, segments: list[list[BuiltBatch]]) -> None:
        self.directory = directory
        self.segments = segments
        self.batches = [item for items in segments for item in items]
        for items in segments:
            write_segment(directory, items[0].base_offset, items)
        active = segments[-1]
        end = active[-1].last_offset + 1
        size = sum(len(item.data) for item in active)
        self.state = PartitionState(
            end, active[0].base_offset, size, last_stable_offset=end, listed_from=2**63 - 1
        )

    def snapshot(self) -> PartitionSnapshot:
        return open_snapshot(self.directory, "t", 0, lambda: self.state)

    def offsets(self, start: int = 0, end: int | None = None) -> list[int]:
        end = self.state.high_watermark if end is None else end
        with self.snapshot() as snapshot:
            batches = list(snapshot.read(start, end, schema=changelog_schema()))
        return [offset for rows in batches for offset in rows["offset"].to_pylist()]

    def expected(self, start: int, end: int) -> list[int]:
        """Walk backwards: what a marker says holds for its producer's batches before it."""
        ends: dict[int, bool] = {}
        found: list[int] = []
        for item in reversed(self.batches):
            producer = item.producer[0]
            if item.is_control:
                ends[producer] = item.records[0].key == b"\0\0\0\0"
            elif not (item.is_transactional and ends.get(producer, False)):
                found += [r.offset for r in reversed(item.records) if start <= r.offset < end]
        return found[::-1]


def random_log(directory: Path, seed: int) -> Log:
    """Transactions of five producers, interleaved, over several segments; some stay open."""
    dice = random.Random(seed)
    segments: list[list[BuiltBatch]] = [[]]
    offset = 0
    for _ in range(dice.randrange(1, 120)):
        producer = dice.randrange(5)
        kind = dice.random()
        if kind < 0.25:
            item = marker(offset, dice.choice([ABORT, COMMIT]), producer)
        elif kind < 0.35:
            item = batch(offset, dice.randrange(1, 4))
        else:
            item = batch(offset, dice.randrange(1, 4), size=dice.randrange(300), of=producer)
        segments[-1].append(item)
        offset = item.last_offset + 1 + dice.choice([0, 0, 0, 2])
        if dice.random() < 0.05:
            segments.append([])
    return Log(directory, [items for items in segments if items])


@pytest.mark.parametrize("seed", range(20))
def test_any_range_in_chunks_of_any_size_leaves_out_what_its_markers_abort(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = random_log(tmp_path, seed)
    dice = random.Random(seed)
    end = log.state.high_watermark
    chunks = PartitionSnapshot.chunks
    for chunk_size in (100, 700, 1 << 20):
        monkeypatch.setattr(
            PartitionSnapshot,
            "chunks",
            lambda snapshot, *places, size=chunk_size, **_: chunks(
                snapshot, *places, chunk_size=size
            ),
        )
        for _ in range(5):
            start = dice.randrange(end)
            stop = dice.choice([end, dice.randrange(start, end + 1)])
            assert log.offsets(start, stop) == log.expected(start, stop)


def test_looking_ahead_passes_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_snapshot, "WINDOW", 2)
    segments = [[batch(10 * i, 2, of=1), batch(10 * i + 2, 2, of=2)] for i in range(9)]
    segments.append([marker(90, ABORT, 1), marker(91, COMMIT, 2)])
    log = Log(tmp_path, segments)
    assert log.offsets() == log.expected(0, 92) == [10 * i + j for i in range(9) for j in (2, 3)]


PASSED_OVER = [
    b"",
    aborted_entry(7, 0, 5)[:-1],
    aborted_entry(7, 0, 8),
    aborted_entry(9, 0, 5),
    b"\0\1" + b"x" * 32,
    bytes(34),
]
CONTRADICTIONS = [
    aborted_entry(8, 2, 5),
    aborted_entry(7, 0, 5) + aborted_entry(8, 0, 6),
    aborted_entry(7, 1, 5),
]


@pytest.fixture
def indexed(tmp_path: Path) -> Log:
    """Offsets 0-1 aborted by producer 7, 2-3 committed by 8, 4 of none, 7 not ended."""
    batches = [batch(0, 2, of=7), batch(2, 2, of=8), batch(4, 1)]
    batches += [marker(5, ABORT, 7), marker(6, COMMIT, 8), batch(7, 1, of=7)]
    return Log(tmp_path, [batches])


@pytest.mark.parametrize("index", PASSED_OVER)
def test_a_transaction_index_without_the_entry_changes_nothing(indexed: Log, index: bytes) -> None:
    (indexed.directory / name(0, ".txnindex")).write_bytes(index)
    assert indexed.offsets() == [2, 3, 4, 7]


@pytest.mark.parametrize("index", CONTRADICTIONS)
def test_a_transaction_index_that_contradicts_a_marker_is_an_error(
    indexed: Log, index: bytes
) -> None:
    (indexed.directory / name(0, ".txnindex")).write_bytes(index)
    with pytest.raises(CorruptLogError, match=r"by the marker at offset \d"):
        indexed.offsets()


def test_a_log_that_lost_a_marker_without_a_trace_is_an_error(tmp_path: Path) -> None:
    first = [batch(0, 2, of=7), marker(2, COMMIT, 7), batch(3, 2, of=7)]
    log = Log(tmp_path, [first, [batch(10, 2, of=7), marker(12, ABORT, 7)]])
    (tmp_path / name(10, ".txnindex")).write_bytes(aborted_entry(7, 3, 12))
    assert log.offsets() == [0, 1]
    path = tmp_path / name(0, ".log")
    path.write_bytes(first[0].data)
    with pytest.raises(CorruptLogError, match="a batch that is aborted by the marker at offset 12"):
        log.offsets()


def test_a_log_that_lost_the_last_marker_of_an_aborted_transaction_is_an_error(
    tmp_path: Path,
) -> None:
    first = [batch(0, 2, of=7), marker(2, ABORT, 7)]
    log = Log(tmp_path, [first, [batch(3, 2), batch(5, 1, of=8), marker(6, COMMIT, 8)]])
    (tmp_path / name(0, ".txnindex")).write_bytes(aborted_entry(7, 0, 2))
    assert log.offsets() == [3, 4, 5]
    path = tmp_path / name(0, ".log")
    path.write_bytes(first[0].data)
    with pytest.raises(CorruptLogError, match="found none up to the end of the log"):
        log.offsets()
    assert log.offsets(3) == [3, 4, 5]
    cleaned = empty(0, 1, producer=first[0].producer, transactional=True)  # as its marker was
    path.write_bytes(cleaned.data)
    assert log.offsets() == [3, 4, 5]


def test_a_committed_transaction_whose_marker_was_cleaned_away_is_read(tmp_path: Path) -> None:
    log = Log(tmp_path, [[batch(0, 2, of=7), batch(6, 1)]])
    (tmp_path / name(0, ".txnindex")).write_bytes(aborted_entry(7, 3, 5))
    assert log.offsets() == [0, 1, 6]


def test_where_the_marker_is_damaged_the_index_decides(tmp_path: Path) -> None:
    batches = [batch(0, 2, of=7), batch(2, 2, of=8), marker(4, ABORT, 7)]
    log = Log(tmp_path, [[*batches, marker(5, COMMIT, 8)]])
    (tmp_path / name(0, ".txnindex")).write_bytes(aborted_entry(7, 0, 4))
    data = (tmp_path / name(0, ".log")).read_bytes()
    (tmp_path / name(0, ".log")).write_bytes(data[:-90] + b"?" + data[-89:])
    assert log.offsets(0, 4) == [2, 3]
    with pytest.raises(CorruptBatchError):
        log.offsets()


def test_an_emptied_marker_says_nothing(tmp_path: Path) -> None:
    emptied = empty(2, 2, max_timestamp=5, producer=(7, 0, -1), transactional=True, control=True)
    log = Log(tmp_path, [[batch(0, 2, of=7), emptied, marker(3, ABORT, 7)]])
    assert log.offsets() == []


def indexed_nowhere() -> IndexedTransactions:
    return IndexedTransactions(list)


def test_without_transactions_nothing_is_looked_at_ahead(tmp_path: Path) -> None:
    log = Log(tmp_path, [[batch(0, 3), marker(3), batch(4, 2)]])

    def never(*_: object) -> Any:
        raise AssertionError

    with (
        log.snapshot() as snapshot,
        TransactionOutcomes(never, IndexedTransactions(never), never) as found,
    ):
        for chunk in snapshot.chunks(0, 6):
            assert not found.is_aborted(chunk).any()


def test_markers_that_are_passed_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_markers, "_SLACK", 5000)
    items = []
    for i in range(0, 400, 2):
        items += [batch(i, 1, of=i), marker(i + 1, COMMIT, i)]
    log = Log(tmp_path, [items])
    with log.snapshot() as snapshot:
        outcomes = TransactionOutcomes(lambda start: snapshot.chunks(start, 400), indexed_nowhere())
        known = []
        for chunk in snapshot.chunks(0, 400, chunk_size=500):
            outcomes.is_aborted(chunk)
            assert outcomes._markers is not None
            known.append(len(outcomes._markers))
    assert len(known) > 50
    assert max(known) < 20


# --- what later reads know of earlier ones -------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets from which chunks were asked for, one batch a chunk."""
    chunks = PartitionSnapshot.chunks
    starts: list[int] = []

    def counted(snapshot: PartitionSnapshot, start: int, end: int, **_: int) -> Iterator[Chunk]:
        for chunk in chunks(snapshot, start, end, chunk_size=1):
            starts.append(int(chunk.table.base_offsets[0]))
            yield chunk

    monkeypatch.setattr(PartitionSnapshot, "chunks", counted)
    return starts


def long_transaction(directory: Path, size: int = 100) -> Log:
    """One transaction of single records in segments of ten, aborted, and a batch after it."""
    segments = [[batch(i + j, 1, of=7) for j in range(10)] for i in range(0, size, 10)]
    return Log(directory, [*segments, [marker(size, ABORT, 7), batch(size + 1, 1)]])


def test_many_short_reads_look_ahead_once(tmp_path: Path, looked_at: list[int]) -> None:
    log = long_transaction(tmp_path)
    for offset in range(100):
        assert log.offsets(offset, offset + 1) == []
    assert len(looked_at) < 3 * 100


def test_the_same_range_again_looks_ahead_no_more(tmp_path: Path, looked_at: list[int]) -> None:
    log = long_transaction(tmp_path)
    for _ in range(5):
        assert log.offsets(10, 20) == []
    assert len(looked_at) < 5 * 10 + 100


def test_a_read_that_is_given_up_leaves_what_it_learned(
    tmp_path: Path, looked_at: list[int]
) -> None:
    items = [batch(0, 1, of=7), batch(1, 1), *(batch(i, 1, of=7) for i in range(2, 50))]
    log = Log(tmp_path, [[*items, marker(50, ABORT, 7)]])
    with log.snapshot() as snapshot:
        rows = snapshot.read(0, 40, schema=changelog_schema())
        assert next(rows)["offset"].to_pylist() == [1]
        rows.close()
    looked_at.clear()
    assert log.offsets(2, 4) == []
    assert looked_at == [2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_a_growing_log_is_read_on_as_if_nothing_were_known(tmp_path: Path, seed: int) -> None:
    log = random_log(tmp_path, seed)
    dice = random.Random(seed)
    whole = log.state
    ends = sorted({item.last_offset + 1 for item in log.batches})
    sizes = {segment[0].base_offset: segment for segment in log.segments}
    start = 0
    for end in ends:
        base = max(base for base in sizes if base < end)
        size = sum(len(item.data) for item in sizes[base] if item.last_offset < end)
        log.state = replace(whole, high_watermark=end, active_base=base, active_size=size)
        log.batches = [item for items in log.segments for item in items if item.last_offset < end]
        start = dice.choice([start, 0, dice.randrange(end)])
        stop = dice.randrange(start, end + 1)
        assert log.offsets(start, stop) == log.expected(start, stop)


def test_threads_read_one_partition_at_once(tmp_path: Path) -> None:
    log = random_log(tmp_path, 3)
    end = log.state.high_watermark

    def read(seed: int) -> bool:
        dice = random.Random(seed)
        ranges = [sorted((dice.randrange(end), dice.randrange(end + 1))) for _ in range(20)]
        return all(log.offsets(a, b) == log.expected(a, b) for a, b in ranges)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(12)))


def test_a_log_that_went_back_is_asked_again(tmp_path: Path) -> None:
    """As a broker's does when a leader is elected that was not in sync."""
    first = [batch(0, 2, of=7), batch(2, 2, of=7)]
    log = Log(tmp_path, [[*first, marker(4, COMMIT, 7)]])
    assert log.offsets(0, 4) == [0, 1, 2, 3]
    log = Log(tmp_path, [first])
    assert log.offsets(0, 2) == [0, 1]
    log = Log(tmp_path, [[*first, marker(4, ABORT, 7)]])
    assert log.offsets(0, 4) == []


def test_a_new_leader_is_asked_again(tmp_path: Path) -> None:
    first = [batch(0, 2, of=7), batch(2, 2, of=7)]
    log = Log(tmp_path, [[*first, marker(4, COMMIT, 7)]])
    assert log.offsets(0, 4) == [0, 1, 2, 3]
    log = Log(tmp_path, [[*first, marker(4, ABORT, 7)]])
    log.state = replace(log.state, leader_epoch=1)
    assert log.offsets(0, 4) == []


def test_another_topic_in_the_same_directory_is_asked_again(tmp_path: Path) -> None:
    first = [batch(0, 2, of=7), batch(2, 2, of=7)]
    metadata = tmp_path / "partition.metadata"
    metadata.write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAg")
    assert Log(tmp_path, [[*first, marker(4, COMMIT, 7)]]).offsets(0, 4) == [0, 1, 2, 3]
    metadata.write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAABg")
    assert Log(tmp_path, [[*first, marker(4, ABORT, 7)]]).offsets(0, 4) == []


def test_a_closed_segment_that_was_cut_and_put_back_is_asked_again(tmp_path: Path) -> None:
    first = [batch(0, 2, of=7), marker(2, ABORT, 7)]
    log = Log(tmp_path, [first, [batch(10, 2, of=7), marker(12, COMMIT, 7)]])
    path = tmp_path / name(0, ".log")
    whole = path.read_bytes()
    path.write_bytes(first[0].data)
    assert log.offsets() == [0, 1, 10, 11]  # nothing tells that a marker was lost
    path.write_bytes(whole)
    assert log.offsets() == [10, 11]


def test_a_read_that_failed_leaves_nothing(indexed: Log) -> None:
    index = indexed.directory / name(0, ".txnindex")
    index.write_bytes(CONTRADICTIONS[0])
    with pytest.raises(CorruptLogError):
        indexed.offsets()
    assert len(transaction_markers.known_markers) == 0
    index.unlink()
    assert indexed.offsets() == [2, 3, 4, 7]
    assert len(transaction_markers.known_markers) == 1


def test_damage_after_what_is_known_changes_nothing_of_it(tmp_path: Path) -> None:
    log = long_transaction(tmp_path)
    assert log.offsets(0, 10) == []
    path = tmp_path / name(90, ".log")
    path.write_bytes(b"?" * path.stat().st_size)
    assert log.offsets(10, 80) == []
    with pytest.raises(CorruptBatchError):
        log.offsets(80, 95)


def test_only_the_indexes_that_a_read_concerns_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = []
    for base in range(0, 100, 10):
        segments.append([batch(base, 2, of=7), marker(base + 2, ABORT, 7)])
        (tmp_path / name(base, ".txnindex")).write_bytes(aborted_entry(7, base, base + 2))
    log = Log(tmp_path, segments)
    asked: list[Path] = []

    def noted(path: Path) -> list[AbortedTransaction]:
        asked.append(path)
        return aborted_transactions(path)

    monkeypatch.setattr(transaction_index, "aborted_transactions", noted)
    assert log.offsets(30, 50) == []
    assert [path.name for path in asked] == [name(30, ".txnindex"), name(40, ".txnindex")]


@pytest.mark.parametrize("first", [ABORT, COMMIT])
def test_a_log_that_is_restored_in_place_is_read_by_its_own_markers(
    tmp_path: Path, first: int
) -> None:
    """The directory, the topic and the sizes are those of before."""
    for kind in (first, COMMIT if first == ABORT else ABORT):
        log = Log(tmp_path, [[batch(0, 2, of=7), marker(2, kind, 7)]])
        for _ in range(2):
            assert log.offsets() == ([] if kind == ABORT else [0, 1])
    assert len(transaction_markers.known_markers)
