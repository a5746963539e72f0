from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.storage_engine.directory.active_segment import ActiveSegment
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex, offset_entry, time_entry
from tests.builders.batch_builder import at_times, joined

BASE = 1000
OFFSETS = [(1009, 100), (1019, 250), (1040, 400), (1041, 999)]
TIMES = [(5, 1009), (7, 1019), (100, 1040)]


@pytest.fixture
def offset_index(tmp_path: Path) -> OffsetIndex:
    path = tmp_path / f"{BASE:020d}.index"
    path.write_bytes(b"".join(offset_entry(BASE, *entry) for entry in OFFSETS))
    return OffsetIndex(path, BASE)


@pytest.fixture
def time_index(tmp_path: Path) -> TimeIndex:
    path = tmp_path / f"{BASE:020d}.timeindex"
    path.write_bytes(b"".join(time_entry(BASE, *entry) for entry in TIMES))
    return TimeIndex(path, BASE)


BATCHES = joined(
    at_times(first, [ms], last_offset=last)
    for first, (ms, last) in zip((BASE, 1010, 1020), TIMES, strict=True)
)


def cut(directory: Path, base: int, end: int, *, size: int = 100_000, log: bytes = BATCHES) -> None:
    """Open a segment to append to it, as if the log ended at offset `end` and byte `size`."""
    (directory / f"{base:020d}.log").write_bytes(log.ljust(size, b"\0"))
    ActiveSegment(
        directory, "", TopicConfig.parse({}),
        base_offset=base, size=size, end_offset=end, has_transactions=False,
    ).close()  # fmt: skip


def file_of(index: OffsetIndex | TimeIndex) -> Path:
    assert isinstance(index.place, Path)
    return index.place


def entries(index: OffsetIndex | TimeIndex) -> list[tuple[int, int]]:
    """Return what an index file of whole entries has, offsets in both kinds counted from 0."""
    if isinstance(index, OffsetIndex):
        pairs = struct.iter_unpack(">ii", file_of(index).read_bytes())
        return [(index.base_offset + relative, position) for relative, position in pairs]
    pairs = struct.iter_unpack(">qi", file_of(index).read_bytes())
    return [(timestamp, index.base_offset + relative) for timestamp, relative in pairs]


def time_lookup(times: TimeIndex, timestamp: int) -> int:
    """Return the offset up to which every record is older, by the best hint."""
    return next((offset for _, offset in times.hints(timestamp)), times.base_offset)


def append(index: OffsetIndex | TimeIndex, data: bytes) -> None:
    file_of(index).write_bytes(file_of(index).read_bytes() + data)


def test_entries_are_kafkas_bytes() -> None:
    assert offset_entry(1000, 1009, 258) == bytes.fromhex("00000009 00000102")
    assert time_entry(1000, 1 << 33, 1009) == bytes.fromhex("0000000200000000 00000009")


def test_an_entry_that_does_not_fit_is_refused() -> None:
    with pytest.raises(struct.error):
        offset_entry(0, 1 << 31, 0)


def test_lookup_finds_the_last_entry_at_or_below_the_offset(offset_index: OffsetIndex) -> None:
    found = {o: offset_index.lookup(o) for o in (1000, 1008, 1009, 1018, 1019, 1040, 5000)}
    assert found == {1000: 0, 1008: 0, 1009: 100, 1018: 100, 1019: 250, 1040: 400, 5000: 999}


def test_time_lookup_finds_the_last_entry_that_is_older(time_index: TimeIndex) -> None:
    found = {t: time_lookup(time_index, t) for t in (-1, 5, 6, 7, 8, 100, 101)}
    assert found == {-1: 1000, 5: 1000, 6: 1009, 7: 1009, 8: 1019, 100: 1019, 101: 1040}


def test_a_missing_file_has_no_entries(tmp_path: Path) -> None:
    index = OffsetIndex(tmp_path / f"{7:020d}.index", 7)
    assert (index.last_entry(), index.lookup(9)) == (None, 0)
    times = TimeIndex(tmp_path / f"{7:020d}.timeindex", 7)
    assert (times.last_entry(), list(times.hints(9))) == (None, [])


@pytest.mark.parametrize("zeros", [1, 7, 8, 12, 24, 960])
def test_zero_padding_and_torn_entries_are_passed_over(
    offset_index: OffsetIndex, time_index: TimeIndex, zeros: int
) -> None:
    append(offset_index, bytes(zeros))
    append(time_index, bytes(zeros))
    assert offset_index.last_entry() == OFFSETS[-1]
    assert offset_index.lookup(1020) == 250
    assert time_index.last_entry() == TIMES[-1]
    assert time_lookup(time_index, 1000) == 1040


@pytest.mark.parametrize("offset", range(998, 1045))
def test_entries_at_or_above_a_cut_go(
    offset_index: OffsetIndex, time_index: TimeIndex, offset: int
) -> None:
    append(offset_index, bytes(80))
    cut(file_of(offset_index).parent, BASE, max(offset, BASE))
    assert entries(offset_index) == [entry for entry in OFFSETS if entry[0] < offset]
    assert entries(time_index) == [entry for entry in TIMES if entry[1] < offset]


def test_entries_of_bytes_that_are_cut_off_go_too(offset_index: OffsetIndex) -> None:
    cut(file_of(offset_index).parent, BASE, 2000, size=400)
    assert entries(offset_index) == OFFSETS[:2]


@given(
    data=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=60),
    offset=st.integers(0, 3000),
    zeros=st.integers(0, 50),
)
def test_lookup_is_what_a_linear_search_finds(
    tmp_path_factory: pytest.TempPathFactory,
    data: list[tuple[int, int]],
    offset: int,
    zeros: int,
) -> None:
    written = []
    last, position = 0, 0
    for rise, size in data:
        last, position = last + rise, position + size
        written.append((last, position))
    path = tmp_path_factory.mktemp("index") / f"{0:020d}.index"
    path.write_bytes(b"".join(offset_entry(0, *e) for e in written) + bytes(zeros))
    index = OffsetIndex(path, 0)
    assert index.last_entry() == (written[-1] if written else None)
    assert index.lookup(offset) == max((p for o, p in written if o <= offset), default=0)


@given(data=st.binary(max_size=400), offset=st.integers(0, 1 << 31))
def test_garbage_yields_only_hints_that_could_be_true(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, offset: int
) -> None:
    directory = tmp_path_factory.mktemp("index")
    (directory / f"{BASE:020d}.index").write_bytes(data)
    (directory / f"{BASE:020d}.timeindex").write_bytes(data)
    hints = list(OffsetIndex(directory / f"{BASE:020d}.index", BASE).hints(offset))
    assert all(BASE <= last <= offset and position > 0 for last, position in hints)
    times = list(TimeIndex(directory / f"{BASE:020d}.timeindex", BASE).hints(offset))
    assert all(time < offset and last >= BASE for time, last in times)


def test_what_may_not_be_read_gives_no_hints(
    offset_index: OffsetIndex, time_index: TimeIndex
) -> None:
    class Hidden(FileSystem):
        def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with file_system.replaced(Hidden()):
        assert (offset_index.lookup(1030), offset_index.last_entry()) == (0, None)
        assert (time_lookup(time_index, 100), time_index.last_entry()) == (BASE, None)
