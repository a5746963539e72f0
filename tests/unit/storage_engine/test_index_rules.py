"""What Kafka's OffsetIndex and TimeIndex guarantee, of index files that are read, written and cut.

Files are built by hand. There is no index object that lives in memory here: a file is opened for a
lookup and closed, so a rule about an index that stays open is one about the next lookup.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex, offset_entry, time_entry
from tests.builders.batch_builder import at_times, batch, joined
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import index_entries, segment_bases, time_index_entries
from tests.builders.segment_files import name
from tests.unit.storage_engine.test_index import cut, entries, file_of, time_lookup

BASE = 45
COUNT = 30


def write_offsets(directory: Path, entries: list[tuple[int, int]], base: int = BASE) -> OffsetIndex:
    path = directory / name(base, ".index")
    path.write_bytes(b"".join(struct.pack(">ii", offset - base, at) for offset, at in entries))
    return OffsetIndex(path, base)


def write_times(directory: Path, entries: list[tuple[int, int]]) -> TimeIndex:
    path = directory / name(BASE, ".timeindex")
    path.write_bytes(b"".join(struct.pack(">qi", time, offset - BASE) for time, offset in entries))
    return TimeIndex(path, BASE)


# --- offsets -------------------------------------------------------------------------------------


def test_random_lookups_find_the_largest_offset_at_or_below(tmp_path: Path) -> None:
    assert write_offsets(tmp_path, []).lookup(92) == 0
    rng = random.Random(7)
    offsets = sorted(rng.sample(range(BASE + 1, BASE + 500), COUNT))
    positions = sorted(rng.sample(range(1, 5000), COUNT))
    entries = list(zip(offsets, positions, strict=True))
    index = write_offsets(tmp_path, entries)
    for offset in range(BASE, BASE + 510):
        below = [position for end, position in entries if end <= offset]
        assert index.lookup(offset) == (below[-1] if below else 0)


def test_entries_are_returned_in_the_order_of_the_file(tmp_path: Path) -> None:
    entries = [(BASE + i, i) for i in range(1, COUNT + 1)]
    index = write_offsets(tmp_path, entries)
    assert [next(index.hints(offset)) for offset, _ in entries] == entries
    assert index.last_entry() == entries[-1]


def test_an_index_without_entries_has_no_first_and_no_last(tmp_path: Path) -> None:
    index, times = write_offsets(tmp_path, []), write_times(tmp_path, [])
    assert (index.last_entry(), times.last_entry()) == (None, None)
    assert (index.lookup(BASE), time_lookup(times, 100)) == (0, BASE)


def test_an_entry_of_the_base_offset_is_not_damage(tmp_path: Path) -> None:
    index = write_offsets(tmp_path, [(BASE, 0)])
    assert [index.lookup(offset) for offset in (BASE, BASE + 1, 10**6)] == [0, 0, 0]
    index = write_offsets(tmp_path, [(BASE, 90), (BASE + 5, 180)])
    assert [index.lookup(offset) for offset in (BASE, BASE + 5)] == [90, 180]


@pytest.mark.parametrize("relative", [-1, 2**31, 2**40])
def test_an_offset_below_the_base_or_past_31_bits_is_not_an_entry(
    tmp_path: Path, relative: int
) -> None:
    if relative > 0:
        with pytest.raises(struct.error):
            offset_entry(BASE, BASE + relative, 1)
        with pytest.raises(struct.error):
            time_entry(BASE, 1, BASE + relative)
    else:
        assert write_offsets(tmp_path, [(BASE - 1, 5)]).last_entry() is None
        assert write_times(tmp_path, [(5, BASE - 1)]).last_entry() is None


@pytest.mark.parametrize(("end", "last"), [(12, 9), (10, 9), (9, 8), (5, 4), (1, None), (0, None)])
def test_a_cut_index_ends_below_the_cut_and_takes_the_next_entry(
    tmp_path: Path, end: int, last: int | None
) -> None:
    index = write_offsets(tmp_path, [(i, i) for i in range(1, 10)], base=0)
    cut(tmp_path, 0, end)
    data = file_of(index).read_bytes()
    assert index.last_entry() == (None if last is None else (last, last))
    assert index.lookup(10) == (last or 0)
    file_of(index).write_bytes(data + struct.pack(">ii", end + 1, end + 1))
    assert index.last_entry() == (end + 1, end + 1)


def test_a_full_truncation_leaves_no_entries(tmp_path: Path) -> None:
    written = [(i * 10, BASE + i * 10) for i in range(1, COUNT)]
    times = write_times(tmp_path, written)
    log = joined(at_times(offset, [ms]) for ms, offset in written)
    for end, count in ((10**6, COUNT - 1), (BASE + 11, 1), (BASE + 10, 0)):
        cut(tmp_path, BASE, end, log=log)
        assert entries(times) == written[:count]


# --- times ---------------------------------------------------------------------------------------


def test_time_lookups_never_pass_a_record_that_is_young_enough(tmp_path: Path) -> None:
    times = write_times(tmp_path, [(i * 10, BASE + i * 10) for i in range(1, COUNT)])
    # Every record up to the offset found is older than what is asked for.
    found = {at: time_lookup(times, at) for at in (9, 10, 11, 25, 30, 31, 10**6)}
    assert found == {9: 45, 10: 45, 11: 55, 25: 65, 30: 65, 31: 75, 10**6: BASE + 290}


def test_time_entries_are_pairs_of_time_and_offset(tmp_path: Path) -> None:
    written = [(10, 55), (20, 65), (30, 75), (40, 85)]
    times = write_times(tmp_path, written)
    assert [next(times.hints(at + 1)) for at, _ in written] == written
    assert times.last_entry() == (40, 85)
    assert time_entry(BASE, 10, 55) == struct.pack(">qi", 10, 10)


def test_entry_sizes_are_8_12(tmp_path: Path) -> None:
    assert (OffsetIndex.entry_size, TimeIndex.entry_size) == (8, 12)
    assert (len(offset_entry(0, 1, 1)), len(time_entry(0, 1, 1))) == (8, 12)


# --- what is written -----------------------------------------------------------------------------


def append(engine: DirectoryLog, *timestamps: int, size: int = 10) -> None:
    """Append a batch of one record for each timestamp, in one append."""
    with engine.transaction() as transaction:
        items = [batch(i, 1, timestamp=at, size=size) for i, at in enumerate(timestamps)]
        data = bytearray(b"".join(item.data for item in items))
        transaction.appender("t", 0, 1).append([(len(items), [data])])
        transaction.publish(1)


def test_the_first_batch_gets_no_entry_and_each_batch_of_an_append_is_decided_alone(
    tmp_path: Path,
) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    append(engine, 10, 20, 15, 30)
    size = len(batch(0, 1).data)
    assert index_entries(engine) == [(1, size), (2, 2 * size), (3, 3 * size)]
    # The third batch is older than the second: the largest time so far has its entry already.
    assert time_index_entries(engine) == [(20, 1), (30, 3)]


def test_an_entry_needs_more_than_the_interval_behind_it(tmp_path: Path) -> None:
    size = len(batch(0, 1).data)
    engine = LogBuilder(tmp_path / "on").topic(index_interval_bytes=size).engine
    append(engine, *[5] * 5)
    assert [at for _, at in index_entries(engine)] == [2 * size, 4 * size]
    engine = LogBuilder(tmp_path / "below").topic(index_interval_bytes=size - 1).engine
    append(engine, *[5] * 5)
    assert [at for _, at in index_entries(engine)] == [size, 2 * size, 3 * size, 4 * size]


def test_a_reopened_index_goes_on_after_its_last_entry(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    append(engine, 1, 2, 3)
    before = index_entries(engine), time_index_entries(engine)
    engine.close()
    append(DirectoryLog(tmp_path), 4)
    assert index_entries(engine)[:-1] == before[0]
    assert time_index_entries(engine) == [*before[1], (4, 3)]


def test_a_full_offset_index_begins_a_segment(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1, segment_index_bytes=64).engine
    append(engine, *[5] * 30)  # one time, so the time index does not fill up
    assert segment_bases(engine) == [0, 9, 18, 27]
    assert len(index_entries(engine)) == 8


def test_a_time_index_is_full_one_entry_early_and_the_roll_takes_that_one(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1, segment_index_bytes=60).engine
    append(engine, *range(1, 31))
    (_, second, *_) = segment_bases(engine)
    entries = time_index_entries(engine)
    assert len(entries) in (4, 5)  # of 5 slots
    assert second == 5
    assert entries[-1] == (5, 4)


def test_a_time_that_does_not_rise_is_not_written_nor_minus_one(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    append(engine, -1, -1, -1)
    assert time_index_entries(engine) == []
    append(engine, 7, 7, 6)
    assert time_index_entries(engine) == [(7, 3)]
    assert len(index_entries(engine)) == 5


def test_index_files_of_any_size_ahead_are_taken_by_their_entries(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    append(engine, 1, 2, 3)
    offsets, times = index_entries(engine), time_index_entries(engine)
    for suffix, slots in ((".index", 8 * 100), (".timeindex", 12 * 100)):
        path = engine.partition_directory("t", 0) / name(0, suffix)
        path.write_bytes(path.read_bytes().ljust(slots, b"\0"))  # as a broker keeps them
    append(engine, 4)
    assert index_entries(engine)[:-1] == offsets
    assert time_index_entries(engine)[:-1] == times
