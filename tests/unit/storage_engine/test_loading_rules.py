"""What Kafka's LogLoader and LogSegment.recover guarantee, of logs a broker left in any state.

Logs are built by `BatchBuilder`. The indexes that a broker would rebuild are computed here.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.broker.recovery import repair_partition
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.segment.swaps import sweep_deleted
from kafkalog.storage_engine.transactions.producer_snapshot import (
    read_snapshot,
    snapshot_offsets,
    write_snapshot,
)
from kafkalog.storage_engine.transactions.producers import ProducerEntry, Producers
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    aborted_transactions,
)
from tests.builders.batch_builder import (
    ABORT,
    COMMIT,
    NO_PRODUCER,
    BatchBuilder,
    Record,
    batch_data,
    marker,
)
from tests.builders.message_builder import message, wrapper
from tests.builders.segment_files import name
from tests.unit.storage_engine import naive
from tests.unit.storage_engine.times import offset_since

NOW_MS = 1_700_000_000_000
INT32_MAX = 2**31 - 1
INTERVAL = 4096
TRANSACTIONAL, CONTROL, GZIP = 0x10, 0x20, 0x01


@dataclass
class Log:
    """Batches as a broker appends them, in segments."""

    directory: Path
    segments: dict[int, list[bytes]] = field(default_factory=lambda: {0: []})
    ends: list[int] = field(default_factory=list)
    """The last offset of every batch."""
    end: int = 0
    sequences: dict[int, int] = field(default_factory=dict)

    def append(
        self,
        count: int = 1,
        *,
        producer_id: int = -1,
        transactional: bool = False,
        epoch: int = 0,
        size: int = 10,
    ) -> None:
        sequence = self.sequences.get(producer_id, 0)
        self.sequences[producer_id] = sequence + count
        builder = BatchBuilder(
            base_offset=self.end,
            leader_epoch=epoch,
            transactional=transactional,
            producer=NO_PRODUCER if producer_id < 0 else (producer_id, 0, sequence),
        )
        for offset in range(self.end, self.end + count):
            builder.add(b"k%d" % offset, b"v" * size, timestamp=NOW_MS + 10 * offset)
        self.add(builder.build().data, self.end + count - 1)

    def mark(self, producer_id: int, *, abort: bool, coordinator_epoch: int = 0) -> None:
        ended = marker(
            self.end,
            ABORT if abort else COMMIT,
            producer_id,
            timestamp=NOW_MS + 10 * self.end,
            coordinator_epoch=coordinator_epoch,
            leader_epoch=-1,
        )
        self.add(ended.data, self.end)

    def add(self, data: bytes, last_offset: int) -> None:
        self.segments[max(self.segments)].append(data)
        self.ends.append(last_offset)
        self.end = last_offset + 1

    def roll(self, base: int | None = None) -> None:
        self.segments[self.end if base is None else base] = []

    def write(self, *, indexes: bool = True) -> None:
        for base, batches in self.segments.items():
            self.path(base, ".log").write_bytes(b"".join(batches))
            if indexes:
                offsets, times = rebuilt_indexes(base, batches)
                self.path(base, ".index").write_bytes(offsets)
                self.path(base, ".timeindex").write_bytes(times)

    def path(self, base: int, suffix: str) -> Path:
        return self.directory / name(base, suffix)

    def load(
        self,
        *,
        is_clean: bool = False,
        recovery_point: int | None = 0,
        log_start: int = 0,
        end: int | None = None,
    ) -> LoadedPartition:
        return load_partition(
            self.directory,
            "t",
            0,
            log_start=log_start,
            recovery_point=recovery_point,
            is_clean=is_clean,
            end=end,
            now_ms=NOW_MS,
        )

    def repair(self, **how: Any) -> LoadedPartition:
        """Load, bring to the disk, and see that a second time finds nothing more to do."""
        loaded = self.load(**how)
        repair_partition(loaded)
        files = contents(self.directory)
        again = self.load(**how)
        repair_partition(again)
        assert contents(self.directory) == files
        assert again.state.high_watermark == loaded.state.high_watermark
        assert again.producers == loaded.producers
        return again

    def snapshot(self, loaded: LoadedPartition) -> DirectorySnapshot:
        return open_snapshot(self.directory, "t", 0, lambda: loaded.state)

    def read(self, loaded: LoadedPartition) -> list[int]:
        state = loaded.state
        with self.snapshot(loaded) as snapshot:
            rows = snapshot.read(
                state.log_start_offset, state.high_watermark, schema=changelog_schema()
            )
            return [offset for table in rows for offset in table["offset"].to_pylist()]

    def bases(self) -> list[int]:
        return [segment.base_offset for segment in list_segments(self.directory)]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        entry.name: Path(entry.path).read_bytes()
        for entry in os.scandir(directory)
        if not entry.name.endswith(".deleted")
    }


def rebuilt_indexes(base: int, batches: list[bytes]) -> tuple[bytes, bytes]:
    """What a broker's recovery makes: a decision for each batch, a last time at the end."""
    offsets = times = b""
    position = indexed = 0
    largest, largest_end, written = -1, base, -1
    for data in batches:
        fields = naive.HEADER.unpack_from(data)
        last, time = fields[0] + fields[6], fields[8]
        if time > largest:
            largest, largest_end = time, last
        if position - indexed > INTERVAL:
            offsets += struct.pack(">ii", last - base, position)
            if largest > written:
                times += struct.pack(">qi", largest, largest_end - base)
                written = largest
            indexed = position
        position += len(data)
    if largest > written:
        times += struct.pack(">qi", largest, largest_end - base)
    return offsets, times


def filled(directory: Path, *, segments: int = 3, per_segment: int = 8, size: int = 1500) -> Log:
    log = Log(directory)
    for place in range(segments):
        if place:
            log.roll()
        for _ in range(per_segment):
            log.append(size=size)
    return log


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


# --- what is checked -----------------------------------------------------------------------------


def test_a_clean_shutdown_is_believed_and_no_other_end_is(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    damage(log.path(8, ".log"), 100)
    clean = log.load(is_clean=True)
    assert (clean.state.high_watermark, clean.damage, clean.recovered) == (24, (), ())
    unclean = log.load()
    assert (unclean.state.high_watermark, unclean.recovered) == (8, (0, 8))
    assert len(unclean.damage) == 1


@pytest.mark.parametrize("recovery_point", [0, 1, 7, 8, 12, 16, 23, 24, 999])
def test_segments_are_recovered_from_the_one_with_the_recovery_point_on(
    tmp_path: Path, recovery_point: int
) -> None:
    log = filled(tmp_path)
    log.write()
    before = contents(tmp_path)
    loaded = log.repair(recovery_point=recovery_point)
    bases = [base for base in (0, 8, 16) if base + 8 > recovery_point]
    assert loaded.recovered == tuple(bases or [16])
    assert loaded.state.high_watermark == 24
    after = contents(tmp_path)
    assert {key: after[key] for key in before} == before  # as many index entries as before


def test_damage_below_the_recovery_point_is_not_looked_for(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    damage(log.path(0, ".log"), 100)
    assert log.load(recovery_point=8).state.high_watermark == 24


# --- the end of the log --------------------------------------------------------------------------


def test_a_log_ends_before_the_first_byte_that_is_wrong(tmp_path: Path) -> None:
    rng = random.Random(3)
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        log = filled(directory, segments=1, per_segment=20, size=10)
        log.write()
        wrong = rng.randrange(20)
        position = sum(map(len, log.segments[0][:wrong])) + rng.randrange(15)
        path = log.path(0, ".log")
        data = path.read_bytes()
        path.write_bytes(data[:position] + rng.randbytes(len(data) - position))
        loaded = log.repair()
        assert log.read(loaded) == list(range(wrong))
        assert path.read_bytes() == b"".join(log.segments[0][:wrong])


def test_damage_in_the_middle_takes_all_later_segments(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    damage(log.path(8, ".log"), len(log.segments[8][0]) * 3 + 70)
    loaded = log.repair()
    assert loaded.state.high_watermark == 11
    assert log.bases() == [0, 8]
    assert log.read(loaded) == list(range(11))


@pytest.mark.parametrize("magic", [0, 1])
def test_checksums_of_messages_before_v2_are_compared_too(tmp_path: Path, magic: int) -> None:
    log = Log(tmp_path)
    for offset in range(6):
        crc = 1234 if offset == 4 else None
        log.add(message(magic, offset, b"k", b"v", timestamp=NOW_MS, crc=crc), offset)
    log.write(indexes=False)
    assert log.read(log.repair()) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_a_log_ends_before_a_batch_whose_offsets_do_not_rise(tmp_path: Path, wrong: int) -> None:
    log = filled(tmp_path)
    odd = batch_data([Record(wrong, NOW_MS, b"k", b"v")])
    log.segments[0].insert(4, odd)
    log.write()
    loaded = log.repair()
    assert loaded.state.high_watermark == 4
    assert (log.bases(), log.read(loaded)) == ([0], [0, 1, 2, 3])


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("wrong", [8, 15, 500, 2**24 + 3])
def test_a_log_ends_before_a_batch_that_reaches_into_the_next_segment(
    tmp_path: Path, place: int, wrong: int
) -> None:
    log = filled(tmp_path)
    log.segments[0][place] = batch_data([Record(wrong, NOW_MS, b"k", b"v")])
    log.write()
    told = f"where the next segment begins, found one up to offset {wrong}"
    assert told in log.load().damage[0]
    loaded = log.repair()
    assert loaded.state.high_watermark == place
    assert log.read(loaded) == list(range(place))


@pytest.mark.parametrize("is_clean", [True, False])
def test_zeros_of_a_preallocated_file_are_not_batches(tmp_path: Path, is_clean: bool) -> None:
    log = filled(tmp_path, segments=1)
    log.write()
    path = log.path(0, ".log")
    size = path.stat().st_size
    os.truncate(path, size + 512 * 1024)
    loaded = log.repair(is_clean=is_clean, recovery_point=8)
    assert (loaded.state.high_watermark, loaded.state.active_size) == (8, size)
    assert path.stat().st_size == size
    assert log.read(loaded) == list(range(8))


def test_garbage_behind_log_and_index_is_cut_off(tmp_path: Path) -> None:
    rng = random.Random(5)
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        count = 10 + rng.randrange(10)
        log = filled(directory, segments=5, per_segment=count, size=4)
        log.write()
        for suffix in (".index", ".log"):
            with log.path(max(log.segments), suffix).open("ab") as file:
                file.write(rng.randbytes(rng.randrange(1, 1024)))
        loaded = log.repair(recovery_point=count)
        assert log.read(loaded) == list(range(5 * count))


def test_a_log_that_ends_below_its_start_begins_anew_there(tmp_path: Path) -> None:
    log = filled(tmp_path, segments=6, per_segment=1)
    log.write()
    for offset in range(1, 6):
        write_snapshot(tmp_path, Producers([ProducerEntry(7, 0, 0, 0)], offset))
    log.path(1, ".log").write_bytes(b"corruptRecord")
    loaded = log.repair(log_start=4, recovery_point=0)
    state = loaded.state
    assert (state.log_start_offset, state.high_watermark, state.active_base) == (4, 4, 4)
    assert log.bases() == [4]
    assert log.path(4, ".index").exists() and log.path(4, ".timeindex").exists()
    assert [offset for offset in snapshot_offsets(tmp_path) if offset <= 4] == []
    assert loaded.producers.entries == {}


def test_an_empty_active_segment_stays_and_gets_its_indexes(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    log.path(24, ".log").write_bytes(b"")
    loaded = log.repair(recovery_point=24)
    assert (loaded.state.high_watermark, loaded.state.active_base) == (24, 24)
    assert log.bases() == [0, 8, 16, 24]
    assert log.path(24, ".index").read_bytes() == b""
    assert log.read(loaded) == list(range(24))


def test_a_directory_without_segments_begins_at_the_log_start(tmp_path: Path) -> None:
    loaded = Log(tmp_path).load(log_start=7)
    assert (loaded.state.log_start_offset, loaded.state.high_watermark) == (7, 7)
    assert (loaded.producers.end_offset, len(loaded.producers)) == (7, 0)


@pytest.mark.parametrize(("checkpoint", "expected"), [(0, 8), (8, 8), (11, 11)])
def test_the_log_starts_at_the_later_of_checkpoint_and_first_segment(
    tmp_path: Path, checkpoint: int, expected: int
) -> None:
    log = filled(tmp_path)
    log.write()
    for suffix in (".log", ".index", ".timeindex"):
        log.path(0, suffix).unlink()
    loaded = log.repair(log_start=checkpoint)
    assert loaded.state.log_start_offset == expected
    assert log.read(loaded) == list(range(expected, 24))


@pytest.mark.parametrize("count", [1, 3])
def test_a_live_log_ends_where_it_is_told_to_whatever_batches_are_indexed(
    tmp_path: Path, count: int
) -> None:
    """A batch of one record that begins at the end has an index entry of that very offset."""
    log = Log(tmp_path)
    for number in range(40):
        if number == 20:
            log.roll()
        log.append(count, size=5000, epoch=number)
    log.write()
    for number, end in enumerate(range(0, log.end + 1, count)):
        state = log.load(end=end).state
        assert (state.high_watermark, state.active_base) == (end, 0 if number < 20 else 20 * count)
        below = log.segments[state.active_base][: number % 20 if number < 40 else None]
        assert state.active_size == sum(map(len, below))
        assert state.leader_epoch == (number - 1 if below else 0)


# --- files ---------------------------------------------------------------------------------------


def test_deleted_files_are_not_part_of_the_log(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    for suffix in (".log", ".index", ".timeindex"):
        log.path(0, suffix).rename(log.path(0, suffix + ".deleted"))
    loaded = log.repair()
    assert log.bases() == [8, 16]
    assert loaded.state.log_start_offset == 8
    now_ms = max(path.stat().st_ctime_ns for path in tmp_path.iterdir()) // 1_000_000
    assert sweep_deleted(tmp_path, older_than_ms=0, now_ms=now_ms + 60_000) == 3


def test_indexes_without_a_log_are_removed(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    for suffix in (".index", ".timeindex", ".txnindex"):
        log.path(5, suffix).write_bytes(b"")
    log.repair(is_clean=True)
    assert not [path for path in tmp_path.glob(name(5, ".*")) if path.suffix != ".deleted"]
    assert log.bases() == [0, 8, 16]


# --- indexes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_missing_offset_index_is_built_anew_whatever_the_shutdown(
    tmp_path: Path, is_clean: bool
) -> None:
    log = filled(tmp_path)
    log.write()
    before = contents(tmp_path)
    for base in log.segments:
        log.path(base, ".index").unlink()
        log.path(base, ".timeindex").unlink()
    loaded = log.repair(is_clean=is_clean, recovery_point=24)
    after = contents(tmp_path)
    assert {key: after[key] for key in before} == before
    with log.snapshot(loaded) as snapshot:
        for offset in range(24):
            assert offset_since(snapshot, NOW_MS + 10 * offset) == offset


def test_a_time_index_that_alone_is_missing_is_made_empty_after_a_clean_shutdown(
    tmp_path: Path,
) -> None:
    log = filled(tmp_path)
    log.write()
    for base in log.segments:
        log.path(base, ".timeindex").unlink()
    loaded = log.repair(is_clean=True)
    assert [log.path(base, ".timeindex").read_bytes() for base in log.segments] == [b""] * 3
    with log.snapshot(loaded) as snapshot:
        assert offset_since(snapshot, NOW_MS + 10 * 13) == 13


@pytest.mark.parametrize("junk", [b"", b"\xff" * 5, b"  nonsense  " * 9, bytes(8000)])
def test_damaged_indexes_of_recovered_segments_are_built_anew(tmp_path: Path, junk: bytes) -> None:
    log = filled(tmp_path)
    log.write()
    before = contents(tmp_path)
    for base in log.segments:
        for suffix in (".index", ".timeindex"):
            log.path(base, suffix).write_bytes(log.path(base, suffix).read_bytes()[:5] + junk)
    log.repair(recovery_point=0)
    after = contents(tmp_path)
    assert {key: after[key] for key in before} == before


def test_the_time_index_of_messages_without_times_is_empty(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for offset in range(20):
        log.add(message(0, offset, b"k", b"v" * 900), offset)
    log.write(indexes=False)
    loaded = log.repair()
    assert log.path(0, ".timeindex").read_bytes() == b""
    assert len(log.path(0, ".index").read_bytes()) > 8
    assert log.read(loaded) == list(range(20))


# --- offsets far apart ---------------------------------------------------------------------------


def gzipped(first: int, count: int, magic: int) -> tuple[bytes, int]:
    records = [Record(first + i, NOW_MS, b"k%d" % i, b"v") for i in range(count)]
    last = first + count - 1
    if magic == 1:
        return wrapper(1, GZIP, records), last
    return batch_data(records, codec=GZIP), last


@pytest.mark.parametrize(
    ("magic", "count", "second"), [(2, 1, INT32_MAX + 2), (2, 2, INT32_MAX + 2), (1, 2, 3)]
)
def test_segments_whose_offsets_lie_far_apart_reopen_as_they_are(
    tmp_path: Path, magic: int, count: int, second: int
) -> None:
    log = Log(tmp_path)
    log.add(*gzipped(0, 1, magic))
    log.roll(second)
    for place in range(3):
        first = INT32_MAX + 2 + place * count
        if magic == 1 and place == 1:
            log.roll(first)
        log.add(*gzipped(first, count, magic))
    log.write(indexes=False)
    loaded = log.repair()
    assert log.bases() == list(log.segments)
    assert loaded.state.high_watermark == INT32_MAX + 2 + 3 * count
    assert log.read(loaded) == [0, *range(INT32_MAX + 2, INT32_MAX + 2 + 3 * count)]
    for base in log.segments:
        data = log.path(base, ".index").read_bytes()
        assert all(relative >= 0 for relative, _ in struct.iter_unpack(">ii", data))


def test_a_segment_that_its_indexes_cannot_address_is_split_and_loses_no_record(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path)
    offsets = [0, 5, INT32_MAX, INT32_MAX + 10, 2**33, 2**33 + 1]
    for offset in offsets:
        item = Record(offset, NOW_MS, b"k", b"v" * 5000)
        log.add(batch_data([item]), offset)
    log.write(indexes=False)
    stored = log.path(0, ".log").read_bytes()
    assert log.read(log.load()) == offsets  # as it was found, too
    loaded = log.repair()
    assert log.read(loaded) == offsets
    assert log.bases() == [0, INT32_MAX + 10, 2**33]
    assert b"".join(segment.log.read_bytes() for segment in list_segments(tmp_path)) == stored
    for segment in list_segments(tmp_path):
        data = segment.index.read_bytes()
        assert all(relative >= 0 for relative, _ in struct.iter_unpack(">ii", data))


# --- leader epochs -------------------------------------------------------------------------------


def test_leader_epochs_are_those_of_the_batches(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for epoch in (1, 2, 2, 3):
        log.append(epoch=epoch)
    log.write()
    checkpoints.write_leader_epochs(tmp_path, [(1, 0)])
    loaded = log.repair()
    assert checkpoints.read_leader_epochs(tmp_path) == [(1, 0), (2, 1), (3, 3)]
    assert loaded.state.leader_epoch == 3


def test_leader_epochs_outside_of_the_log_go(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for epoch in (1, 2, 2, 3, 4):
        log.append(epoch=epoch)
    log.write()
    damage(log.path(0, ".log"), len(log.segments[0][0]) * 4 + 70)
    checkpoints.write_leader_epochs(tmp_path, [(1, 0), (2, 1), (3, 3), (4, 4), (9, 9)])
    log.repair(log_start=2)
    assert checkpoints.read_leader_epochs(tmp_path) == [(2, 2), (3, 3)]


# --- producers and transactions ------------------------------------------------------------------


def mixed(directory: Path) -> Log:
    """Transactions of four producers over many segments: two are aborted."""
    log = Log(directory)
    steps: list[tuple[int, int] | tuple[int, bool]] = [
        (1, 5), (-1, 3), (2, 2), (1, 4), (3, 3), (-1, 2), (1, 10), (1, True), (2, 6), (4, 3),
        (-1, 10), (3, 9), (3, False), (4, 8), (2, 7), (2, True), (-1, 10), (4, 4), (4, False),
    ]  # fmt: skip
    for place, (producer_id, step) in enumerate(steps):
        if place and place % 4 == 0:
            log.roll()
        if isinstance(step, bool):
            log.mark(producer_id, abort=step)
        else:
            for _ in range(step):
                log.append(producer_id=producer_id, transactional=producer_id > 0)
    return log


ABORTED = [AbortedTransaction(1, 0, 29, 8), AbortedTransaction(2, 8, 74, 36)]


def all_aborted(log: Log, loaded: LoadedPartition) -> list[AbortedTransaction]:
    """As the files say it, which is what memory said of them."""
    indexes = [segment.transaction_index for segment in list_segments(log.directory)]
    found = [entry for index in indexes for entry in aborted_transactions(index)]
    assert loaded.aborted is None or list(loaded.aborted) == found
    return found


def snapshots_at_segments(log: Log) -> None:
    """Write a snapshot of what precedes each segment, as a broker does when it rolls."""
    for base in list(log.segments)[1:]:
        loaded = log.load(end=base)
        write_snapshot(log.directory, loaded.producers)


def test_a_missing_transaction_index_is_built_anew(tmp_path: Path) -> None:
    log = mixed(tmp_path)
    log.write(indexes=False)
    loaded = log.repair()
    assert all_aborted(log, loaded) == ABORTED
    assert loaded.producers.end_offset == log.end == 90
    assert loaded.producers.first_unstable_offset() is None


@pytest.mark.parametrize("with_snapshots", [True, False])
def test_the_last_segments_transaction_index_is_built_from_what_precedes_it(
    tmp_path: Path, with_snapshots: bool
) -> None:
    log = mixed(tmp_path)
    log.write(indexes=False)
    if with_snapshots:
        snapshots_at_segments(log)
    log.repair()
    if not with_snapshots:
        for offset in snapshot_offsets(tmp_path):
            log.path(offset, ".snapshot").unlink()
    for base in (max(log.segments), sorted(log.segments)[-2]):
        log.path(base, ".index").unlink()
        log.path(base, ".txnindex").unlink(missing_ok=True)
    loaded = log.repair(recovery_point=sorted(log.segments)[-2])
    assert all_aborted(log, loaded) == ABORTED


def test_an_abort_takes_its_first_offset_from_the_state_before_its_segment(tmp_path: Path) -> None:
    log = Log(tmp_path, {100: []}, end=100)
    for producer_id in (5, 10, -1):
        log.append(2, producer_id=producer_id, transactional=producer_id > 0)
    log.mark(10, abort=True)
    log.mark(5, abort=False)
    log.write()
    loaded = log.repair(log_start=100)
    assert all_aborted(log, loaded) == [AbortedTransaction(10, 102, 106, 100)]
    assert loaded.producers.end_offset == 108


def test_an_abort_reaches_back_to_where_the_snapshot_says_it_began(tmp_path: Path) -> None:
    log = Log(tmp_path, {40: [], 100: []}, end=100)
    for producer_id in (5, 10, -1):
        log.append(2, producer_id=producer_id, transactional=producer_id > 0)
    log.mark(10, abort=True)
    log.mark(5, abort=False)
    log.write()
    began = ProducerEntry(10, 0, 10, 80, 5, NOW_MS, -1, 75)
    write_snapshot(tmp_path, Producers([began], 100))
    loaded = log.repair(log_start=40, recovery_point=100)
    assert all_aborted(log, loaded) == [AbortedTransaction(10, 75, 106, 100)]


def test_a_transaction_index_below_its_segment_is_damaged_and_built_anew(tmp_path: Path) -> None:
    log = mixed(tmp_path)
    log.write()
    log.repair()
    base = max(log.segments)
    log.path(base, ".txnindex").write_bytes(struct.pack(">hqqqq", 0, 1, 0, base - 1, 5))
    loaded = log.repair(is_clean=True)
    assert base in loaded.recovered or all_aborted(log, loaded) == ABORTED
    assert all_aborted(log, loaded) == ABORTED


def test_a_coordinator_epoch_that_falls_is_taken_as_it_is(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.mark(1, abort=True, coordinator_epoch=5)
    log.mark(1, abort=True, coordinator_epoch=4)
    log.write()
    entry = log.load().producers.entries[1]
    assert (entry.coordinator_epoch, entry.timestamp) == (4, NOW_MS + 10)


@pytest.mark.parametrize("is_clean", [True, False])
def test_an_open_transaction_holds_back_what_is_stable_until_its_marker(
    tmp_path: Path, is_clean: bool
) -> None:
    log = Log(tmp_path)
    log.append()
    log.append(producer_id=7, transactional=True)
    log.roll()
    log.append()
    log.write()
    write_snapshot(tmp_path, log.load().producers)
    loaded = log.load(is_clean=is_clean, recovery_point=log.end)
    assert (loaded.state.high_watermark, loaded.state.last_stable_offset) == (3, 1)
    log.mark(7, abort=False)
    log.write()
    assert log.load(is_clean=is_clean, recovery_point=2).state.last_stable_offset == 4


@pytest.mark.parametrize("version", [1, -1, 77])
def test_a_snapshot_of_another_version_is_passed_over(tmp_path: Path, version: int) -> None:
    log = Log(tmp_path)
    log.append(producer_id=7)
    log.roll()
    log.append(producer_id=7)
    log.write()
    full = log.load().producers
    write_snapshot(tmp_path, log.load(end=1).producers)
    path = log.path(1, ".snapshot")
    data = path.read_bytes()
    path.write_bytes(struct.pack(">h", version) + data[2:])
    assert log.load(recovery_point=2).producers == full


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_producers_are_those_of_a_full_replay_whatever_snapshots_are_left(
    tmp_path: Path, kept: int
) -> None:
    log = Log(tmp_path)
    for place in range(6):
        if place:
            log.roll()
        for producer_id in (1, 2, 3)[: 1 + place % 3]:
            log.append(2, producer_id=producer_id)
    log.write()
    full = log.load().producers
    snapshots_at_segments(log)
    for offset in snapshot_offsets(tmp_path)[: 5 - kept]:
        log.path(offset, ".snapshot").unlink()
    for recovery_point in (0, log.end - 5, log.end):
        loaded = log.load(recovery_point=recovery_point)
        assert loaded.producers == full
    repaired = log.repair(recovery_point=log.end - 5)
    assert snapshot_offsets(tmp_path)[-1] == log.end
    assert read_snapshot(tmp_path, log.end) == repaired.producers == full


def test_a_clean_log_without_snapshots_has_no_producers(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(producer_id=1)
    log.write()
    loaded = log.load(is_clean=True)
    assert (len(loaded.producers), loaded.producers.end_offset) == (0, 1)


def test_a_log_without_producers_has_none_up_to_its_end(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.write()
    loaded = log.load()
    assert (len(loaded.producers), loaded.producers.end_offset) == (0, 24)


def test_deleting_records_within_a_segment_forgets_no_producer(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(producer_id=1)
    log.append(producer_id=2)
    log.write()
    loaded = log.repair(log_start=1)
    assert sorted(loaded.producers.entries) == [1, 2]


def test_producers_of_deleted_segments_are_forgotten_by_a_load_without_snapshots(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path, {1: []}, end=1)
    log.append(producer_id=2)
    log.write()
    loaded = log.repair(log_start=1)
    assert {pid: entry.last_sequence for pid, entry in loaded.producers.entries.items()} == {2: 0}


def test_stray_snapshots_go_and_the_largest_stays(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for place, base in enumerate((0, 1, 2, 2)):
        if place in (1, 2):
            log.roll(base)
        log.append(producer_id=1)
    log.write()
    for offset in (1, 2, 4):
        write_snapshot(tmp_path, log.load(end=offset).producers)
    log.path(3, ".snapshot").write_bytes(b"")
    log.repair()
    assert snapshot_offsets(tmp_path) == [1, 2, 4]


def test_snapshots_of_cut_off_segments_go_and_later_ones_may_come(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for place in range(5):
        if place:
            log.roll()
        log.append(producer_id=1)
    log.write()
    snapshots_at_segments(log)
    damage(log.path(2, ".log"), 70)
    loaded = log.repair()
    assert loaded.state.high_watermark == 2
    assert [offset for offset in snapshot_offsets(tmp_path) if offset > 2] == []
    write_snapshot(tmp_path, Producers([ProducerEntry(1, 0, 2, 2)], 3))
    assert 3 in snapshot_offsets(tmp_path)


@pytest.mark.parametrize("missing", [[0], [4], [0, 4], [8]])
def test_a_clean_log_without_snapshots_is_replayed_if_an_offset_index_is_missing(
    tmp_path: Path, missing: list[int]
) -> None:
    """A broker recovers that segment, and so knows the open transaction."""
    log = Log(tmp_path)
    for first in (0, 4, 8):
        if first:
            log.roll()
        log.append(2, producer_id=7, transactional=True)
        log.append(2)
    log.write()
    assert log.load(is_clean=True).state.last_stable_offset == 12
    for base in missing:
        log.path(base, ".index").unlink()
    loaded = log.load(is_clean=True)
    assert loaded.state.last_stable_offset == 0
    assert loaded.producers.entries[7].last_sequence == 5
