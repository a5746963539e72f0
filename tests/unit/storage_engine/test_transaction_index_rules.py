"""What Kafka's TransactionIndex guarantees: which aborted transactions a read leaves out.

The index is never held open here: a view reads the entries of all its segments when it is opened.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.swaps import retire, sweep_deleted
from kafkalog.storage_engine.transactions.control_record import read_control_record
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    aborted_transactions,
    transaction_entry,
)
from tests.builders.batch_builder import (
    ABORT,
    COMMIT,
    BuiltBatch,
    Record,
    at_times,
    batch,
    joined,
    marker,
)
from tests.builders.segment_files import aborted_entry, name, write_segment

TRANSACTIONAL, CONTROL = 0x10, 0x20
FOUR = [
    AbortedTransaction(0, 0, 10, 11),
    AbortedTransaction(1, 5, 15, 13),
    AbortedTransaction(2, 18, 35, 25),
    AbortedTransaction(3, 32, 50, 40),
]


def write_index(directory: Path, base: int, entries: Sequence[AbortedTransaction]) -> Path:
    path = directory / name(base, ".txnindex")
    path.write_bytes(
        b"".join(
            aborted_entry(t.producer_id, t.first_offset, t.last_offset, t.last_stable_offset)
            for t in entries
        )
    )
    return path


# --- entries -------------------------------------------------------------------------------------


def test_an_entry_is_34_bytes_of_version_producer_first_last_and_stable_offset() -> None:
    transaction = AbortedTransaction(983493, 137, 299, 200)
    data = transaction_entry(transaction)
    assert data == aborted_entry(983493, 137, 299, 200)
    assert len(data) == 34


def test_entries_appended_after_reopening_follow_those_that_were_there(tmp_path: Path) -> None:
    path = write_index(tmp_path, 0, FOUR)
    later = AbortedTransaction(3, 50, 60, 55)
    with path.open("ab") as index:
        index.write(transaction_entry(later))
    assert aborted_transactions(path) == [*FOUR, later]


def test_entries_of_several_segments_are_read_in_their_order(tmp_path: Path) -> None:
    paths = [write_index(tmp_path, 0, FOUR[:2]), tmp_path / name(16, ".txnindex")]
    paths.append(write_index(tmp_path, 30, FOUR[2:]))
    found = [entry for path in paths for entry in aborted_transactions(path)]
    assert found == FOUR  # the one in the middle has none, and no file


def test_a_renamed_index_is_read_under_its_new_name(tmp_path: Path) -> None:
    path = write_index(tmp_path, 0, FOUR[:1])
    renamed = path.rename(tmp_path / name(0, ".txnindex.swap"))
    assert (aborted_transactions(path), aborted_transactions(renamed)) == ([], FOUR[:1])


# --- what a log of transactions says -------------------------------------------------------------


@dataclass
class Transactions:
    """A log written by several producers, and a model of what it means."""

    batches: list[BuiltBatch] = field(default_factory=list)
    aborted: list[AbortedTransaction] = field(default_factory=list)
    open: dict[int, list[Record]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)
    """Offsets of records of aborted transactions."""
    end: int = 0

    def data(self, producer_id: int, count: int) -> None:
        item = batch(self.end, count, of=producer_id)
        self.batches.append(item)
        self.starts.setdefault(producer_id, self.end)
        self.open.setdefault(producer_id, []).extend(item.records)
        self.end += count

    def plain(self, count: int) -> None:
        self.batches.append(batch(self.end, count))
        self.end += count

    def finish(self, producer_id: int, *, abort: bool) -> None:
        self.batches.append(marker(self.end, ABORT if abort else COMMIT, producer_id))
        start = self.starts.pop(producer_id, None)
        records = self.open.pop(producer_id, [])
        if abort and start is not None:
            stable = min(self.starts.values(), default=self.end + 1)
            self.aborted.append(AbortedTransaction(producer_id, start, self.end, stable))
            self.hidden |= {record.offset for record in records}
        self.end += 1

    def write(self, directory: Path, per_segment: int) -> PartitionState:
        """Write segments of so many batches, and the transaction index of each."""
        base = 0
        for place in range(0, len(self.batches), per_segment):
            items = self.batches[place : place + per_segment]
            base = items[0].base_offset
            write_segment(directory, base, items)
            ends = {item.last_offset for item in items}
            aborted = [t for t in self.aborted if t.last_offset in ends]
            if aborted:
                write_index(directory, base, aborted)
        size = (directory / name(base, ".log")).stat().st_size
        return PartitionState(self.end, base, size)


def written(seed: int) -> Transactions:
    rng = random.Random(seed)
    log = Transactions()
    for _ in range(60):
        producer_id = rng.randrange(4)
        choice = rng.random()
        if choice < 0.55:
            log.data(producer_id, rng.randrange(1, 4))
        elif choice < 0.7:
            log.plain(rng.randrange(1, 3))
        else:
            log.finish(producer_id, abort=rng.random() < 0.6)
    return log


def offsets(
    snapshot: DirectorySnapshot, start: int, end: int, *, read_committed: bool
) -> list[int]:
    rows = snapshot.read(start, end, schema=changelog_schema(), read_committed=read_committed)
    return [offset for table in rows for offset in table["offset"].to_pylist()]


@pytest.mark.parametrize("per_segment", [3, 17, 100])
@pytest.mark.parametrize("seed", range(3))
def test_a_read_of_any_range_leaves_out_the_aborted_records_in_it_and_no_other(
    tmp_path: Path, seed: int, per_segment: int
) -> None:
    log = written(seed)
    state = log.write(tmp_path, per_segment)
    everything = [
        record.offset
        for item in log.batches
        if not item.attributes & CONTROL
        for record in item.records
    ]
    assert log.hidden
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        for start in range(0, log.end, 3):
            for end in {start + 1, min(start + 10, log.end), log.end}:
                inside = [offset for offset in everything if start <= offset < end]
                assert offsets(snapshot, start, end, read_committed=False) == inside
                stays = [offset for offset in inside if offset not in log.hidden]
                assert offsets(snapshot, start, end, read_committed=True) == stays


@pytest.mark.parametrize("seed", range(5))
def test_replaying_a_log_finds_the_entries_of_its_index(seed: int) -> None:
    log = written(seed)
    producers = Producers()
    found = []
    for item in log.batches:
        data = item.data
        header = parse_header(data)
        found.append(producers.append(header, read_control_record(data, 0, header)))
    aborted = [transaction for transaction in found if transaction is not None]
    assert aborted == log.aborted
    ends = [transaction.last_offset for transaction in aborted]
    assert ends == sorted(set(ends))  # they only rise: an entry has its marker's offset
    assert producers.first_unstable_offset() == min(log.starts.values(), default=None)


def test_a_view_that_is_open_keeps_what_it_read_of_a_renamed_or_deleted_index(
    tmp_path: Path,
) -> None:
    log = written(0)
    state = log.write(tmp_path, 100)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        (tmp_path / name(0, ".txnindex")).rename(tmp_path / name(0, ".txnindex.deleted"))
        found = offsets(snapshot, 0, log.end, read_committed=True)
    assert not log.hidden & set(found)


# --- files ---------------------------------------------------------------------------------------


def test_a_segments_index_is_retired_and_removed_with_it(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [batch(0, 1)])
    path = write_index(tmp_path, 0, FOUR)
    retire(tmp_path, [0])
    retired = tmp_path / name(0, ".txnindex.deleted")
    assert (path.exists(), retired.exists()) == (False, True)
    now_ms = retired.stat().st_ctime_ns // 1_000_000
    assert sweep_deleted(tmp_path, older_than_ms=0, now_ms=now_ms + 60_000) == 4
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("end", "kept"), [(51, 4), (50, 3), (36, 3), (35, 2), (1, 0)])
def test_entries_from_the_first_without_its_marker_on_go(
    tmp_path: Path, end: int, kept: int
) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    directory = engine.partition_directory("t", 0)
    ended = [entry for entry in FOUR if entry.last_offset < end]
    batches = [marker(t.last_offset, ABORT, t.producer_id) for t in ended]
    data = joined(batches) + at_times(end, [5]).data
    (directory / name(0, ".log")).write_bytes(data)
    path = write_index(directory, 0, FOUR)
    with engine.transaction() as transaction:
        transaction.change_partition("t", 0, high_watermark=end + 1, active_size=len(data))
        transaction.publish(1)
    engine.append("t", [("k", "v")], now_ms=1)
    assert aborted_transactions(path) == FOUR[:kept]
