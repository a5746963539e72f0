"""Reading a partition: every range, chunk size, index state and damage against a plain list."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafkalog.errors import (
    CorruptBatchError,
    InvalidInputError,
    OffsetOutOfRangeError,
    StorageError,
)
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading import directory_snapshot
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment import listing, open_segment
from kafkalog.storage_engine.segment.swaps import retire
from tests.builders.batch_builder import (
    GZIP,
    BatchBuilder,
    BuiltBatch,
    Record,
    batch,
    data_records,
    empty,
    marker,
)
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine.times import offset_since

SCHEMA = changelog_schema()
UNLISTED = 2**63 - 1
"""As in a broker's directory: nobody has listed where offsets have gaps (see test_gaps.py)."""
Segments = dict[int, list[BuiltBatch]]


class Partition:
    """A partition's directory, the records in it, and the state it is read with."""

    def __init__(self, directory: Path, segments: Segments, **write: object) -> None:
        self.directory = directory
        self.segments = segments
        self.loads = 0
        for base, batches in segments.items():
            write_segment(directory, base, batches, **write)
        active = max(segments)
        last = [b for base in sorted(segments) for b in segments[base]][-1:]
        self.state = PartitionState(
            high_watermark=max([active, *(b.last_offset + 1 for b in last)]),
            active_base=active,
            active_size=self.log(active).stat().st_size,
            log_start_offset=min(segments),
            listed_from=UNLISTED,
        )

    def log(self, base: int) -> Path:
        return self.directory / name(base, ".log")

    def load_state(self) -> PartitionState:
        self.loads += 1
        return self.state

    def snapshot(self, **options: object) -> DirectorySnapshot:
        return open_snapshot(self.directory, "t", 3, self.load_state, **options)

    def expected(self, start: int, end: int) -> list[Record]:
        batches = [b for base in sorted(self.segments) for b in self.segments[base]]
        return [r for r in data_records(batches) if start <= r.offset < end]


def records_of(batches: Iterator[pa.RecordBatch]) -> list[Record]:
    found = []
    for table in batches:
        assert table.schema == SCHEMA
        assert table.num_rows
        times = table.column("timestamp").cast(pa.int64()).to_pylist()
        times = [time // 1000 for time in times]
        columns = [table.column(name).to_pylist() for name in ("offset", "key", "value")]
        rows = zip(columns[0], times, *columns[1:], strict=True)
        found += [Record(*row) for row in rows]
    return found


def read(snapshot: DirectorySnapshot, start: int, end: int) -> list[Record]:
    return records_of(snapshot.read(start, end, schema=SCHEMA))


def varied() -> Segments:
    """Gaps, empty batches, markers, compression, emptied segments, large and small batches."""
    return {
        0: [batch(0, 10), batch(10, 5, step=2), empty(20, 29), batch(30, 1, size=5000)],
        40: [],
        50: [marker(50), batch(51, 4, codec=GZIP), marker(55), batch(60, 20, size=300)],
        80: [empty(80, 89)],
        90: [batch(95, 3, last=110), batch(111, 30, codec=GZIP, size=100)],
        150: [batch(150, 2), batch(152, 1, size=100_000), batch(153, 7), batch(160, 1)],
    }


@pytest.fixture
def partition(tmp_path: Path) -> Partition:
    return Partition(tmp_path, varied())


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_range_holds_exactly_its_records(partition: Partition) -> None:
    edges = [0, 1, 9, 10, 11, 15, 20, 25, 30, 31, 39, 40, 50, 51, 54, 55, 56, 79, 80, 85, 95, 96]
    edges += [97, 98, 105, 111, 120, 140, 141, 149, 150, 151, 152, 153, 159, 160, 161]
    with partition.snapshot() as snapshot:
        for start in edges:
            for end in {start, start + 1, start + 7, start + 45, 161}:
                if end <= 161:
                    assert read(snapshot, start, end) == partition.expected(start, end)


@pytest.mark.parametrize("chunk_size", [1, 11, 12, 60, 61, 62, 100, 1000, 4096, 1 << 20])
def test_chunks_of_any_size_hold_each_batch_once(partition: Partition, chunk_size: int) -> None:
    with partition.snapshot() as snapshot:
        found = []
        for chunk in snapshot.chunks(0, 161, chunk_size=chunk_size):
            stored = chunk.path.read_bytes()[chunk.file_position :][: len(chunk.buffer)]
            assert chunk.buffer == stored
            assert chunk.path == partition.log(chunk.segment_base)
            for position, size in zip(chunk.table.positions, chunk.table.sizes, strict=True):
                found.append(chunk.buffer[position : position + size])
    batches = [b for base in sorted(partition.segments) for b in partition.segments[base]]
    assert found == [b.data for b in batches]


def test_chunks_are_bounded_unless_a_batch_is_larger(tmp_path: Path) -> None:
    sizes = [100] * 50 + [30_000] + [100] * 1000
    partition = Partition(tmp_path, {0: [batch(i, 1, size=s) for i, s in enumerate(sizes)]})
    with partition.snapshot() as snapshot:
        lengths = [len(chunk.buffer) for chunk in snapshot.chunks(0, 1051, chunk_size=1000)]
    assert max(lengths) <= 61_000
    assert max(lengths[-2:]) <= 1000


def test_only_batches_that_reach_into_the_range_are_returned(partition: Partition) -> None:
    with partition.snapshot() as snapshot:
        bases = [b for chunk in snapshot.chunks(14, 52) for b in chunk.table.base_offsets.tolist()]
    assert bases == [10, 20, 30, 50, 51]


def test_control_batches_and_empty_batches_have_no_records(tmp_path: Path) -> None:
    partition = Partition(tmp_path, {0: [marker(0), empty(1, 5), marker(6)], 7: []})
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 7) == []
        assert len(next(snapshot.chunks(0, 7)).table) == 3


@pytest.mark.parametrize("segments", [{0: []}, {7: []}])
def test_an_empty_partition_is_read_as_empty(tmp_path: Path, segments: Segments) -> None:
    partition = Partition(tmp_path, segments)
    with partition.snapshot() as snapshot:
        end = partition.state.high_watermark
        assert read(snapshot, end, end) == []
        assert (snapshot.position_of(end), offset_since(snapshot, 0)) == (None, None)


@pytest.mark.parametrize(("start", "end"), [(19, 30), (20, 162), (-2, 161), (162, 162)])
def test_offsets_outside_the_log_are_refused(partition: Partition, start: int, end: int) -> None:
    partition.state = replace(partition.state, log_start_offset=20)
    with (
        partition.snapshot() as snapshot,
        pytest.raises(OffsetOutOfRangeError, match=r"\[20, 161\]"),
    ):
        snapshot.read(start, end, schema=SCHEMA)


def test_a_range_that_ends_before_it_starts_is_refused(partition: Partition) -> None:
    with partition.snapshot() as snapshot, pytest.raises(InvalidInputError, match="ends before"):
        snapshot.read(5, 4, schema=SCHEMA)


def test_only_the_columns_of_the_schema_are_built(partition: Partition) -> None:
    schema = pa.schema([SCHEMA.field("offset"), SCHEMA.field("partition")])
    with partition.snapshot() as snapshot:
        table = pa.Table.from_batches(snapshot.read(0, 161, schema=schema), schema)
    assert table.column("offset").to_pylist() == [r.offset for r in partition.expected(0, 161)]
    assert set(table.column("partition").to_pylist()) == {3}


def test_compressed_batches_become_several_arrow_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", 64 << 10)
    shuffled = random.Random(5)
    batches = [
        BatchBuilder(
            base_offset=i * 10,
            codec=GZIP,
            records=[Record(i * 10 + j, 0, None, shuffled.randbytes(2000)) for j in range(10)],
        ).build()
        for i in range(20)
    ]
    partition = Partition(tmp_path, {0: batches})
    with partition.snapshot() as snapshot:
        found = list(snapshot.read(0, 200, schema=SCHEMA))
        assert 3 < len(found) < 20
        assert records_of(iter(found)) == partition.expected(0, 200)


@pytest.mark.slow
def test_values_of_100_mb_are_read(tmp_path: Path) -> None:
    huge = BatchBuilder(base_offset=3).add(b"k", bytes(100_000_000), timestamp=5).build()
    partition = Partition(tmp_path, {0: [batch(0, 3), huge, batch(4, 3)]})
    with partition.snapshot() as snapshot:
        rows = [
            (o, len(v))
            for b in snapshot.read(0, 7, schema=SCHEMA)
            for o, v in zip(b.column("offset").to_pylist(), b.column("value"), strict=True)
            for v in [v.as_buffer()]
        ]
    assert [o for o, _ in rows] == list(range(7))
    assert rows[3] == (3, 100_000_000)


# --- the committed range -------------------------------------------------------------------------


def test_bytes_past_the_committed_size_do_not_exist(partition: Partition) -> None:
    with partition.log(150).open("ab") as log:
        log.write(batch(161, 5).data + b"\xff" * 100)
    write_segment(partition.directory, 170, [batch(170, 5)])
    with partition.snapshot() as snapshot:
        assert read(snapshot, 140, 161) == partition.expected(140, 161)
        assert [s.base_offset for s in snapshot.segments] == [0, 40, 50, 80, 90, 150]
        assert (snapshot.position_of(161), offset_since(snapshot, 1000 + 1610)) == (None, None)


def test_what_lies_above_the_high_watermark_is_not_returned(partition: Partition) -> None:
    partition.state = replace(partition.state, high_watermark=153)
    with partition.log(150).open("r+b") as log:
        log.truncate(partition.state.active_size - 10)
    partition.state = replace(partition.state, active_size=partition.state.active_size - 10)
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 153) == partition.expected(0, 153)
        assert snapshot.position_of(153) is None
        with pytest.raises(OffsetOutOfRangeError):
            next(snapshot.chunks(0, 154))


@pytest.mark.parametrize("cut", [1, 200])
def test_a_file_shorter_than_what_was_committed_is_read_as_far_as_it_goes(
    partition: Partition, cut: int
) -> None:
    with partition.log(150).open("r+b") as log:
        log.truncate(partition.state.active_size - cut)
    end = 160 if cut == 1 else 153
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, end) == partition.expected(0, end)
        with pytest.raises(StorageError, match="bytes are committed, but the file has"):
            read(snapshot, 0, 161)
        with pytest.raises(StorageError, match="bytes are committed, but the file has"):
            snapshot.position_of(160)


@pytest.mark.parametrize("whole", [False, True])
def test_a_missing_first_segment_is_a_storage_error_where_it_is_needed(
    partition: Partition, whole: bool
) -> None:
    partition.log(0).unlink()
    with partition.snapshot(whole=whole) as snapshot:
        assert read(snapshot, 40, 161) == partition.expected(40, 161)
        with pytest.raises(StorageError, match="segment of offset 39 is missing"):
            read(snapshot, 39, 161)


def test_a_missing_active_segment_is_a_storage_error_where_it_is_needed(
    partition: Partition,
) -> None:
    partition.log(150).unlink()
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 150) == partition.expected(0, 150)
        with pytest.raises(StorageError, match="segment of offset 150 is missing"):
            read(snapshot, 0, 151)


def test_a_batch_moved_in_the_gaps_hides_nothing_before_it(partition: Partition) -> None:
    data = bytearray(partition.log(0).read_bytes())
    data[:8] = struct.pack(">q", 15)  # behind the batch that follows it
    partition.log(0).write_bytes(data)
    with partition.snapshot() as snapshot:
        with pytest.raises(CorruptBatchError, match="offsets above"):
            read(snapshot, 0, 10)
        assert read(snapshot, 40, 161) == partition.expected(40, 161)


def test_a_missing_directory_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        open_snapshot(tmp_path / "t-0", "t", 0, PartitionState)


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_flipped_bit_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    batches = [batch(0, 2), batch(2, 2, codec=GZIP), batch(4, 2)]
    partition = Partition(tmp_path, {0: batches, 6: [batch(6, 1)]})
    sound = partition.log(0).read_bytes()
    starts = [0, len(batches[0].data), len(batches[0].data + batches[1].data)]
    outside_the_checksum = {
        start + place for start in starts for place in [*range(12, 16), *range(8)]
    }
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << (place % 8)
        partition.log(0).write_bytes(damaged)
        with partition.snapshot() as snapshot:
            try:
                found = read(snapshot, 0, 7)
            except CorruptBatchError as fault:
                assert fault.path == str(partition.log(0))
                assert 0 <= fault.position <= len(sound)
                continue
        # A leader epoch is not read; a base offset may move into a gap, of which here is none.
        assert found == partition.expected(0, 7)
        assert place in outside_the_checksum


def test_a_log_cut_at_any_byte_yields_whole_batches_and_then_an_error(tmp_path: Path) -> None:
    batches = [batch(0, 3), batch(3, 3, codec=GZIP), batch(6, 3)]
    partition = Partition(tmp_path, {0: batches, 9: []})
    sound = partition.log(0).read_bytes()
    whole = [0, *(len(b"".join(b.data for b in batches[: i + 1])) for i in range(3))]
    for size in range(len(sound) + 1):
        partition.log(0).write_bytes(sound[:size])
        kept = sum(end <= size for end in whole) - 1
        found: list[Record] = []
        with partition.snapshot() as snapshot:
            try:
                for table in snapshot.read(0, 9, schema=SCHEMA):
                    found += records_of(iter([table]))
                assert size in whole
            except CorruptBatchError as fault:
                assert size not in whole
                assert fault.position == whole[kept]
        expected = partition.expected(0, 3 * kept)
        assert found in ([], expected) if size not in whole else found == expected


def test_damage_outside_the_range_is_not_met(partition: Partition) -> None:
    data = bytearray(partition.log(150).read_bytes())
    data[-1] ^= 1
    partition.log(150).write_bytes(data)
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 160) == partition.expected(0, 160)
        with pytest.raises(CorruptBatchError, match="checksum"):
            read(snapshot, 0, 161)


@pytest.mark.parametrize(
    ("batches", "place"),
    [
        ([batch(0, 3), batch(2, 3)], 1),
        ([batch(3, 3), batch(0, 3)], 1),
        ([batch(0, 3), batch(3, 3, last=2)], 1),
        ([batch(0, 3), batch(3, 3, last=6)], 1),
        ([batch(0, 3, last=6), batch(7, 3)], 0),
    ],
)
def test_offsets_that_do_not_rise_within_their_segment_are_corrupt(
    tmp_path: Path, batches: list[BuiltBatch], place: int
) -> None:
    partition = Partition(tmp_path, {0: batches, 6: [batch(6, 1)]})
    with (
        partition.snapshot() as snapshot,
        pytest.raises(CorruptBatchError, match="offsets above") as it,
    ):
        read(snapshot, 0, 7)
    assert it.value.position == (len(batches[0].data) if place else 0)


@pytest.mark.parametrize("magic", [3, 127])
def test_another_format_is_refused_where_it_begins(tmp_path: Path, magic: int) -> None:
    good = batch(0, 3)
    partition = Partition(tmp_path, {0: [good, batch(3, 3, magic=magic)]})
    with partition.snapshot() as snapshot, pytest.raises(CorruptBatchError, match="magic") as it:
        read(snapshot, 0, 6)
    assert it.value.position == len(good.data)
    with partition.snapshot() as snapshot, pytest.raises(CorruptBatchError):
        snapshot.position_of(4)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("start", range(6))
def test_a_batch_that_claims_an_older_format_is_a_typed_error(
    tmp_path: Path, magic: int, start: int
) -> None:
    good = batch(0, 3)
    partition = Partition(tmp_path, {0: [good, batch(3, 3, magic=magic), batch(6, 3)]})
    with partition.snapshot() as snapshot, pytest.raises(CorruptBatchError) as it:
        read(snapshot, start, 9)
    assert it.value.position == len(good.data)


@pytest.mark.parametrize("chunk_size", [1, 1 << 20])
@pytest.mark.parametrize("indexes", [True, False])
def test_a_batch_that_claims_to_end_earlier_does_not_hide_its_records(
    tmp_path: Path, chunk_size: int, indexes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch(0, 3), batch(3, 3), batch(6, 3)]
    partition = Partition(tmp_path, {0: batches}, indexes=indexes, interval=1)
    damaged = bytearray(partition.log(0).read_bytes())
    start = len(batches[0].data)
    damaged[start + 23 : start + 27] = bytes(4)  # its last offset delta
    partition.log(0).write_bytes(damaged)
    monkeypatch.setattr(DirectorySnapshot.chunks, "__kwdefaults__", {"chunk_size": chunk_size})
    for first in range(3, 6):
        with (
            partition.snapshot() as snapshot,
            pytest.raises(CorruptBatchError, match="checksum") as it,
        ):
            read(snapshot, first, 9)
        assert it.value.position == start


# --- indexes are hints ---------------------------------------------------------------------------


@st.composite
def index_bytes(draw: st.DrawFn, real: list[bytes], size: int) -> bytes:
    """A damaged index: true entries shuffled, doubled and dropped, zeros, garbage, torn ends."""
    part = st.one_of(
        st.sampled_from(real),
        st.binary(min_size=size, max_size=size),
        st.just(bytes(size)),
        st.binary(max_size=size),
    )
    return b"".join(draw(st.lists(part, max_size=40)))


LOG: Segments = {
    100: [batch(100 + 5 * i, 3, last=104 + 5 * i) for i in range(40)],
    300: [batch(300, 1)],
}
LOG[100][7] = empty(135, 139, max_timestamp=LOG[100][7].max_timestamp)
LOG[100][11] = batch(155, 3, last=159, timestamp=9_000)  # the youngest of them all
REAL = [(item.last_offset - 100, item) for item in LOG[100]]
POSITIONS = [sum(len(b.data) for b in LOG[100][:i]) for i in range(len(LOG[100]))]
REAL_OFFSETS = [
    struct.pack(">ii", last, place) for (last, _), place in zip(REAL, POSITIONS, strict=True)
]
REAL_TIMES = [
    struct.pack(">qi", max(b.max_timestamp for b in LOG[100][: i + 1]), last)
    for i, (last, _) in enumerate(REAL)
]


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    offsets=st.none() | index_bytes(REAL_OFFSETS, 8),
    times=st.none() | index_bytes(REAL_TIMES, 12),
    start=st.integers(100, 301),
    timestamp=st.integers(1900, 9100),
)
def test_no_index_file_can_make_a_record_wrong_or_missing(
    tmp_path: Path, offsets: bytes | None, times: bytes | None, start: int, timestamp: int
) -> None:
    partition = Partition(tmp_path, LOG)
    for suffix, data in ((".index", offsets), (".timeindex", times)):
        path = tmp_path / name(100, suffix)
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
    with partition.snapshot() as snapshot:
        assert read(snapshot, start, 301) == partition.expected(start, 301)
        young = [r.offset for r in partition.expected(100, 301) if r.timestamp >= timestamp]
        assert offset_since(snapshot, timestamp) == (young[0] if young else None)
        place = snapshot.position_of(start)
        ends = {b.last_offset: at for b, at in zip(LOG[100], POSITIONS, strict=True)}
        if start < 300:
            assert place is not None
            assert place[1] == ends[min(end for end in ends if end >= start)]


def test_an_index_of_another_generation_costs_only_a_scan(partition: Partition) -> None:
    with partition.snapshot() as snapshot:
        write_segment(partition.directory, 150, [batch(150, 1)] * 9, stage=".other")
        for suffix in (".index", ".timeindex"):
            (partition.directory / name(150, suffix + ".other")).rename(
                partition.directory / name(150, suffix)
            )
        assert read(snapshot, 159, 161) == partition.expected(159, 161)


# --- times ---------------------------------------------------------------------------------------


def test_offset_for_time_is_the_first_record_that_is_young_enough(partition: Partition) -> None:
    batches = [b for base in sorted(partition.segments) for b in partition.segments[base]]
    records = [r for b in batches for r in b.records]  # markers count, as in Kafka
    partition.state = replace(partition.state, log_start_offset=5, high_watermark=160)
    with partition.snapshot() as snapshot:
        for timestamp in range(900, 2700, 5):
            young = [r.offset for r in records if r.timestamp >= timestamp and 5 <= r.offset < 160]
            assert offset_since(snapshot, timestamp) == (young[0] if young else None)


def test_an_empty_batch_keeps_its_timestamp_and_has_no_record(tmp_path: Path) -> None:
    partition = Partition(tmp_path, {0: [empty(0, 9), batch(10, 1, timestamp=50)]})
    with partition.snapshot() as snapshot:
        assert offset_since(snapshot, 60) is None
        assert offset_since(snapshot, 50) == 10


# --- one moment ----------------------------------------------------------------------------------


def test_a_view_keeps_its_moment_when_segments_are_retired(partition: Partition) -> None:
    with partition.snapshot() as snapshot:
        expected = partition.expected(0, 161)
        retire(partition.directory, [0, 50, 90])
        for path in partition.directory.glob("*.deleted"):
            path.unlink()
        assert read(snapshot, 0, 161) == expected


def test_a_half_finished_swap_is_read_as_finished(partition: Partition) -> None:
    cleaned = [batch(14, 1), batch(70, 3, last=79)]
    write_segment(partition.directory, 0, cleaned, stage=".swap")
    partition.segments = {
        base: batches for base, batches in partition.segments.items() if base >= 80
    } | {0: cleaned}
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 161) == partition.expected(0, 161)


def test_the_state_is_loaded_under_the_shared_lock(partition: Partition) -> None:
    taken: list[bool] = []

    def load_state() -> PartitionState:
        lock = locks.FileLock(partition.directory / "kl-segments.lock")
        with lock.exclusive(wait=False) as got:
            taken.append(got)
        return partition.state

    with open_snapshot(partition.directory, "t", 3, load_state):
        pass
    with locks.FileLock(partition.directory / "kl-segments.lock").exclusive(wait=False) as got:
        taken.append(got)
    assert taken == [False, True]


def vanishing(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, acts: list[Callable[[], None]]
) -> None:
    """Let a broker, which has no lock of ours, act between a listing and the opening."""
    listed = listing.list_segments

    def list_and_lose(directory: Path) -> object:
        found = listed(directory)
        if acts:
            acts.pop(0)()
        return found

    monkeypatch.setattr(listing, "list_segments", list_and_lose)


def test_a_file_that_vanishes_before_it_is_opened_is_listed_again(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[Callable[[], None]] = [
        lambda: retire(partition.directory, [50]),
        lambda: retire(partition.directory, [80]),
    ]
    vanishing(partition, monkeypatch, acts)
    with partition.snapshot() as snapshot:
        assert [s.base_offset for s in snapshot.segments] == [0, 40, 90, 150]


def test_a_directory_that_changes_while_it_is_opened_is_listed_again(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def roll() -> None:
        write_segment(partition.directory, 161, [])
        partition.state = replace(partition.state, active_base=161, active_size=0)

    vanishing(partition, monkeypatch, [roll])
    with partition.snapshot() as snapshot:
        assert snapshot.segments[-1].base_offset == 161
    assert partition.loads == 2


def test_a_directory_that_never_rests_is_a_storage_error(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = partition.directory / name(500, ".index")

    def flip() -> None:
        if other.exists():
            other.unlink()
        else:
            other.touch()

    vanishing(partition, monkeypatch, [flip] * 1000)
    with pytest.raises(StorageError, match="changed during"):
        partition.snapshot()


# --- windows -------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(directory_snapshot, "WINDOW", 2)
    return 2


def open_logs(directory: Path) -> int:
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(link.startswith(str(directory)) and ".log" in link for link in links)


def test_a_partition_of_many_segments_is_opened_window_by_window(
    partition: Partition, narrow: int
) -> None:
    with partition.snapshot() as snapshot:
        assert len(snapshot.segments) == 6
        assert open_logs(partition.directory) == narrow
        reader = snapshot.read(0, 161, schema=SCHEMA)
        found = []
        for table in reader:
            assert open_logs(partition.directory) <= 2 * narrow
            found += records_of(iter([table]))
        assert found == partition.expected(0, 161)
        assert partition.loads == 3
        for start in range(0, 161, 10):
            assert read(snapshot, start, 161) == partition.expected(start, 161)
        assert offset_since(snapshot, 1000 + 1600) == 160
        assert snapshot.position_of(155) is not None
    assert open_logs(partition.directory) == 0


def test_a_window_begins_where_reading_will(partition: Partition, narrow: int) -> None:
    with partition.snapshot(start=100) as snapshot:
        assert read(snapshot, 100, 161) == partition.expected(100, 161)
        assert partition.loads == 1
        assert read(snapshot, 0, 161) == partition.expected(0, 161)


def test_a_whole_view_opens_all_and_never_lists_again(partition: Partition, narrow: int) -> None:
    with partition.snapshot(whole=True) as snapshot:
        assert open_logs(partition.directory) == 6
        retire(partition.directory, [50, 80, 90])
        assert read(snapshot, 0, 161) == partition.expected(0, 161)
        assert partition.loads == 1
    assert open_logs(partition.directory) == 0


def counted_listings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Gather the directories that are listed."""
    found, list_segments = list[Path](), listing.list_segments

    def list_counted(directory: Path) -> object:
        found.append(directory)
        return list_segments(directory)

    monkeypatch.setattr(listing, "list_segments", list_counted)
    return found


def test_windows_of_a_directory_that_rests_share_one_listing(
    partition: Partition, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = counted_listings(monkeypatch)
    monkeypatch.setattr(listing, "REST_S", 0.0)
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 161) == partition.expected(0, 161)
    assert partition.loads == 3  # the state is that of each window's own moment
    assert len(listings) == 1


def test_a_listing_soon_after_a_change_is_not_shared(
    partition: Partition, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next change might bear the same time."""
    listings = counted_listings(monkeypatch)
    monkeypatch.setattr(listing, "REST_S", 3600.0)
    with partition.snapshot() as snapshot:
        assert read(snapshot, 0, 161) == partition.expected(0, 161)
    assert len(listings) == 3


@pytest.mark.parametrize("rest_s", [0.0, 3600.0])
def test_later_windows_see_what_was_cleaned_and_rolled_meanwhile(
    partition: Partition, narrow: int, monkeypatch: pytest.MonkeyPatch, rest_s: float
) -> None:
    monkeypatch.setattr(listing, "REST_S", rest_s)
    with partition.snapshot() as snapshot:
        reader = snapshot.read(0, 161, schema=SCHEMA)
        first = next(reader)
        time.sleep(0.05)  # longer than a tick of the file system's clock
        # Meanwhile: all but the first segment merged, batches too; two commits and a roll.
        merged = BatchBuilder(base_offset=60, last_offset=159)
        merged.records += [r for r in partition.expected(0, 160) if r.offset in (65, 95)]
        retire(partition.directory, [0, 40, 50, 80, 90, 150])
        write_segment(partition.directory, 0, [batch(0, 10), merged.build(), batch(160, 1)])
        write_segment(partition.directory, 161, [batch(161, 5)])
        size = partition.log(161).stat().st_size
        partition.state = replace(
            partition.state, high_watermark=166, active_base=161, active_size=size
        )
        found = records_of(iter([first])) + records_of(reader)
    old, new = partition.expected(0, 40), partition.expected(60, 161)
    assert found == old + [r for r in new if r.offset in (65, 95, 160)]


def test_what_retention_took_before_a_later_window_is_an_error_and_no_gap(
    partition: Partition, narrow: int
) -> None:
    with partition.snapshot() as snapshot:
        reader = snapshot.read(0, 161, schema=SCHEMA)
        next(reader)
        retire(partition.directory, [0, 40, 50, 80])
        partition.state = replace(partition.state, log_start_offset=92)
        with pytest.raises(OffsetOutOfRangeError, match=r"offset 50 .*\[92, 161\]"):
            list(reader)


def test_an_iterator_left_behind_meets_a_closed_file(partition: Partition) -> None:
    with partition.snapshot() as snapshot:
        chunks = snapshot.chunks(0, 161, chunk_size=100)
        next(chunks)
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(chunks)
