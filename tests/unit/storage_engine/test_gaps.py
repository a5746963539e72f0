"""Offsets run without a gap that is not listed: the lists, and what readers make of them.

The bytes of the lists come from `segment_files.gap_list`, which knows none of kafkalog's code.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kafkalog.errors import CorruptBatchError, CorruptLogError, KafkaLogError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot
from kafkalog.storage_engine.segment import gaps
from kafkalog.storage_engine.segment.gaps import GapCollector, GapFile, Section
from tests.builders.batch_builder import BuiltBatch, at_times, batch, data_records, empty
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, offsets
from tests.builders.segment_files import gap_list, gaps_of, name, write_segment
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.times import offset_since

NOW_MS = 1_700_000_000_000
NEVER_DELETED = {"policy": "delete", "segment_bytes": 300, "retention_ms": -1}
Pairs = list[tuple[int, int]]
SECTIONS: list[tuple[int, int, Pairs]] = [
    (0, 100, [(3, 5), (9, 12)]),
    (12, 0, [(12, 40)]),
    (40, 700, []),
    (2**40, 2**31, [(2**40 + 1, 2**62)]),
]


def array(pairs: Pairs) -> np.ndarray:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def parsed(path: Path) -> list[tuple[int, int, Pairs]]:
    """Everything a list holds, each checksum compared."""
    file = GapFile(path)
    try:
        return [
            (s.base_offset, s.size, [tuple(pair) for part in s.all() for pair in part.tolist()])
            for s in file.sections()
        ]
    finally:
        file.close()


def listed(directory: Path, sections: list[tuple[int, int, Pairs]], present: Pairs) -> None:
    made = [Section(base, size, array(pairs)) for base, size, pairs in sections]
    gaps.list_sections(directory, made, present=set(present))


# --- the files -----------------------------------------------------------------------------------


def test_sections_are_written_as_the_format_says_and_read_back(tmp_path: Path) -> None:
    listed(tmp_path, SECTIONS, [])
    assert (tmp_path / "kl-gaps").read_bytes() == gap_list(SECTIONS)
    assert parsed(tmp_path / "kl-gaps") == SECTIONS
    assert [path.name for path in tmp_path.iterdir()] == ["kl-gaps"]


def test_sections_stay_as_long_as_their_file_and_none_is_listed_twice(tmp_path: Path) -> None:
    listed(tmp_path, SECTIONS, [])
    new: list[tuple[int, int, Pairs]] = [(40, 600, [(41, 50)]), (40, 700, []), (0, 100, [(3, 5)])]
    listed(tmp_path, new, [(0, 100), (40, 700)])
    # The segment at 40 is listed alike, that at 0 otherwise.
    assert parsed(tmp_path / "kl-gaps") == [SECTIONS[0], new[2], SECTIONS[2], new[0]]


def test_a_long_section_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "GAPS_PART_MAX", 3)
    for count in range(11):
        pairs = [(10 * n, 10 * n + 1 + n % 4) for n in range(count)]
        listed(tmp_path, [(0, 1, [(1, 2)]), (5, 6, pairs)], [])
        assert parsed(tmp_path / "kl-gaps") == [(0, 1, [(1, 2)]), (5, 6, pairs)]
        file = GapFile(tmp_path / "kl-gaps")
        (section,) = file.sections_of(5)
        for low in range(-1, 115, 4):
            for high in (low - 1, low, low + 9, low + 10, low + 35, 2**40):
                expected = [list(pair) for pair in pairs if low <= pair[0] <= high]
                assert section.between(low, high).tolist() == expected
        assert section.last_to() == (pairs[-1][1] if pairs else -1)
        file.close()


@pytest.mark.parametrize("file_name", ["kl-gaps", "kl-raw-gaps"])
def test_every_prefix_and_every_flipped_byte_is_a_typed_error(
    tmp_path: Path, file_name: str
) -> None:
    path = tmp_path / file_name
    data = gap_list(SECTIONS)
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(CorruptLogError, match=file_name):
            parsed(path)
        for bit in (0x01, 0x80):
            path.write_bytes(data[:end] + bytes([data[end] ^ bit]) + data[end + 1 :])
            with pytest.raises(CorruptLogError, match=file_name):
                parsed(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptLogError):
        parsed(path)


def test_gaps_are_gathered_from_batches_however_they_come() -> None:
    rng = random.Random(5)
    for _ in range(200):
        base = offset = rng.randrange(50)
        ranges = []
        for _ in range(rng.randrange(12)):
            first = offset + rng.choice([0, 0, 1, 7])
            offset = first + rng.randrange(1, 5)
            ranges.append((first, offset - 1))
        end = offset + rng.choice([0, 3])
        collector = GapCollector(base)
        rest = list(ranges)
        while rest:
            count = rng.randrange(len(rest) + 1)
            firsts, lasts = array(rest[:count]).T
            collector.add(np.ascontiguousarray(firsts), np.ascontiguousarray(lasts))
            rest = rest[count:]
        assert [tuple(pair) for pair in collector.gaps(end).tolist()] == gaps_of(base, ranges, end)


def test_raw_gaps_are_added_cut_and_dropped_with_their_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "GAPS_PART_MAX", 3)
    rng = random.Random(8)
    known: Pairs = []
    first_base = end = 0
    for _ in range(120):
        new = []
        for _ in range(rng.randrange(1, 6)):
            new.append((end, end + 5))
            end += 10
        gaps.add_raw_gaps(tmp_path, array(new), first_base=first_base)
        known += new
        found = [pair for _, _, pairs in parsed(tmp_path / "kl-raw-gaps") for pair in pairs]
        assert found == known[len(known) - len(found) :]
        assert set(found) >= {pair for pair in known if pair[1] > first_base}
        assert len(found) <= len([pair for pair in known if pair[1] > first_base]) + 3
        known = found
        if rng.random() < 0.5:
            end = rng.choice([end, end - 10, end - 30, first_base])
            end = max(end, first_base)
            gaps.truncate_raw_gaps(tmp_path, end)
            known = [pair for pair in known if pair[1] <= end]
            assert [p for _, _, ps in parsed(tmp_path / "kl-raw-gaps") for p in ps] == known
        first_base = rng.choice([first_base, max(first_base, end - 60)])


# --- readers -------------------------------------------------------------------------------------

Segments = dict[int, list[BuiltBatch]]


def cleaned() -> Segments:
    """Gaps at the beginning, the middle and the end of segments, and a segment that is one gap."""
    return {
        0: [batch(0, 3), batch(3, 2), batch(9, 3), empty(12, 14), batch(16, 2, last=20)],
        30: [],
        40: [batch(44, 4), batch(48, 2, size=300), batch(64, 4)],
        70: [batch(70, 2), batch(72, 4), batch(76, 4)],
    }


class Log:
    """A directory of ours with its lists, and the records in it."""

    def __init__(self, directory: Path, segments: Segments, *, interval: int = 100) -> None:
        self.directory = directory
        self.segments = segments
        self.sections: list[tuple[int, int, Pairs]] = []
        bases = sorted(segments)
        for base, end in pairwise(bases):
            ranges = [(b.base_offset, b.last_offset) for b in segments[base]]
            size = sum(len(b.data) for b in segments[base])
            self.sections.append((base, size, gaps_of(base, ranges, end)))
        for base in bases:
            write_segment(directory, base, segments[base], interval=interval)
        self.list()
        active = segments[bases[-1]]
        end = active[-1].last_offset + 1
        size = sum(len(b.data) for b in active)
        self.state = PartitionState(end, bases[-1], size, last_stable_offset=end)

    def list(self, *more: tuple[int, int, Pairs]) -> None:
        (self.directory / "kl-gaps").write_bytes(gap_list([*self.sections, *more]))

    def path(self, base: int) -> Path:
        return self.directory / name(base, ".log")

    def read(self, start: int = 0, end: int | None = None, **options: object) -> list[int]:
        end = self.state.high_watermark if end is None else end
        with open_snapshot(self.directory, "t", 0, lambda: self.state, **options) as snapshot:
            tables = list(snapshot.read(start, end, schema=changelog_schema()))
        return [offset for table in tables for offset in table["offset"].to_pylist()]

    def end_below(self, offset: int) -> int:
        """Where the last batch below an offset ends."""
        batches = [b for base in sorted(self.segments) for b in self.segments[base]]
        return max((b.last_offset + 1 for b in batches if b.last_offset < offset), default=0)

    def expected(self, start: int = 0, end: int | None = None) -> list[int]:
        end = self.state.high_watermark if end is None else end
        batches = [b for base in sorted(self.segments) for b in self.segments[base]]
        return [r.offset for r in data_records(batches) if start <= r.offset < end]


@pytest.mark.parametrize("interval", [0, 100, 10**6])
@pytest.mark.parametrize("window", [2, 128])
def test_listed_gaps_are_passed_from_anywhere_to_anywhere(
    tmp_path: Path, interval: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.reading.directory_snapshot.WINDOW", window)
    log = Log(tmp_path, cleaned(), interval=interval)
    for start in range(81):
        for end in {start, start + 1, start + 9, 45, 80}:
            if start <= end <= 80:
                assert log.read(start, end) == log.expected(start, end), (start, end)
    assert log.read(held=True) == log.expected()


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 100, 10**6])
def test_a_batch_whose_base_offset_is_changed_is_never_read(tmp_path: Path, interval: int) -> None:
    log = Log(tmp_path, cleaned(), interval=interval)
    for base, batches in log.segments.items():
        before = log.path(base).read_bytes()
        position = 0
        for item in batches:
            below = log.end_below(item.base_offset)
            for bit in range(64):
                moved = bytearray(before)
                moved[position + 7 - bit // 8] ^= 1 << bit % 8
                log.path(base).write_bytes(moved)
                with pytest.raises(CorruptBatchError):
                    log.read()
                for start in (item.base_offset, item.last_offset):
                    with pytest.raises(CorruptBatchError):
                        log.read(start)
                assert log.read(0, below) == log.expected(0, below)
            position += len(item.data)
        log.path(base).write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 10**6])
def test_a_time_is_never_looked_up_in_a_batch_whose_base_offset_is_changed(
    tmp_path: Path, interval: int
) -> None:
    log = Log(tmp_path, cleaned(), interval=interval)
    times = sorted({r.timestamp for items in log.segments.values() for r in data_records(items)})

    def looked_up() -> list[int | str | None]:
        found: list[int | str | None] = []
        with open_snapshot(log.directory, "t", 0, lambda: log.state) as snapshot:
            for at_ms in times:
                try:
                    found.append(offset_since(snapshot, at_ms))
                except CorruptBatchError:
                    found.append("refused")
        return found

    expected = looked_up()
    assert None not in expected
    refused = 0
    for base, batches in log.segments.items():
        before = log.path(base).read_bytes()
        position = 0
        for item in batches:
            for bit in range(64):
                moved = bytearray(before)
                moved[position + 7 - bit // 8] ^= 1 << bit % 8
                log.path(base).write_bytes(moved)
                found = looked_up()
                refused += found.count("refused")
                wrong = [
                    f
                    for f in zip(times, found, expected, strict=True)
                    if f[1] not in (f[2], "refused")
                ]
                assert not wrong, (item, bit)
            position += len(item.data)
        log.path(base).write_bytes(before)
    assert refused


def test_a_segment_that_is_missing_in_the_middle_is_an_error(tmp_path: Path) -> None:
    log = Log(tmp_path, cleaned())
    for base, start, end in ((30, 20, 41), (30, 33, 35), (40, 30, 64), (40, 45, 80)):
        log.path(base).rename(tmp_path / "aside")
        with pytest.raises(CorruptBatchError, match="what follows begins at offset"):
            log.read(start, end)
        below = log.end_below(base)
        assert log.read(0, below) == log.expected(0, below)
        (tmp_path / "aside").rename(log.path(base))
    assert log.read() == log.expected()


@pytest.mark.parametrize("with_list", [False, True])
def test_a_closed_segment_that_was_cut_between_two_batches_is_an_error(
    tmp_path: Path, with_list: bool
) -> None:
    contiguous = {0: [batch(0, 4), batch(4, 4)], 8: [batch(8, 4), batch(12, 4)], 16: [batch(16, 4)]}
    log = Log(tmp_path, cleaned() if with_list else contiguous)
    if not with_list:
        (tmp_path / "kl-gaps").unlink()
    for base in sorted(log.segments)[:-1]:
        before = log.path(base).read_bytes()
        position = 0
        for item in log.segments[base]:
            log.path(base).write_bytes(before[:position])
            with pytest.raises(CorruptBatchError):
                log.read()
            below = log.end_below(item.base_offset)
            assert log.read(0, below) == log.expected(0, below)
            position += len(item.data)
        log.path(base).write_bytes(before)
    assert log.read() == log.expected()


def test_an_unlisted_gap_and_a_listed_one_that_is_not_there_are_errors(tmp_path: Path) -> None:
    log = Log(tmp_path, cleaned())
    whole = list(log.sections)
    for place, (base, size, pairs) in enumerate(whole):
        for number in range(len(pairs)):
            others = pairs[:number] + pairs[number + 1 :]
            for changed in (others, [*others, (pairs[number][0], pairs[number][1] - 1)]):
                log.sections[place] = base, size, sorted(changed)
                log.list()
                with pytest.raises(CorruptBatchError):
                    log.read()
        log.sections[place] = base, size, sorted([*pairs, (base + 1, base + 2)])
        log.list()
        with pytest.raises(CorruptBatchError):
            log.read()
        log.sections[place] = base, size, pairs
    (tmp_path / "kl-gaps").unlink()
    with pytest.raises(CorruptBatchError):
        log.read()


def test_of_two_sections_for_files_as_large_as_each_other_either_may_be_true(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path, cleaned())
    base, size, _ = log.sections[2]
    log.list((base, size, []), (base, size + 1, [(41, 42)]))
    assert log.read() == log.expected()
    assert log.read(48) == log.expected(48)


def test_what_a_broker_wrote_need_not_be_listed_and_is_checked_where_it_is(tmp_path: Path) -> None:
    log = Log(tmp_path, cleaned())
    log.state = replace(log.state, listed_from=80)
    log.sections.clear()
    log.list()
    assert log.read() == log.expected()
    log.state = replace(log.state, listed_from=70)
    assert log.read() == log.expected()
    log.state = replace(log.state, listed_from=69)
    with pytest.raises(CorruptBatchError, match="a batch from offset 68 on"):
        log.read()
    log.state = replace(log.state, listed_from=80)
    log.sections.append((0, log.path(0).stat().st_size, [(5, 9)]))
    log.list()
    with pytest.raises(CorruptBatchError, match="a batch from offset 15 on"):
        log.read()


def test_a_view_reads_on_with_the_list_of_its_moment(tmp_path: Path) -> None:
    log = Log(tmp_path, cleaned())
    with open_snapshot(log.directory, "t", 0, lambda: log.state) as snapshot:
        log.sections.clear()
        (tmp_path / "new").write_bytes(gap_list([]))
        (tmp_path / "new").rename(tmp_path / "kl-gaps")
        tables = list(snapshot.read(0, 80, schema=changelog_schema()))
    assert [o for t in tables for o in t["offset"].to_pylist()] == log.expected()


# --- raw appends ---------------------------------------------------------------------------------


def raw_gaps(root: Path) -> Pairs:
    path = root / "t-0" / "kl-raw-gaps"
    return [pair for _, _, pairs in parsed(path) for pair in pairs]


def test_a_raw_append_lists_what_it_leaves_out(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(**NEVER_DELETED).append_raw(at_times(5), at_times(6)).engine
    assert raw_gaps(tmp_path) == [(0, 5)]
    engine.append("t", [("k", "own")], now_ms=NOW_MS)
    LogBuilder(engine).append_raw(*(at_times(10 * n, (0, 0)) for n in range(1, 9)))
    engine.append("t", [("k", "own")], now_ms=NOW_MS)
    pairs = [(0, 5), (8, 10), *((10 * n + 2, 10 * n + 10) for n in range(1, 8))]
    assert raw_gaps(tmp_path) == pairs
    whole = [5, 6, 7, *(o for n in range(1, 9) for o in (10 * n, 10 * n + 1)), 82]
    assert offsets(engine) == whole
    assert len(list((tmp_path / "t-0").glob("*.log"))) > 3
    assert damage(tmp_path) == []


def test_a_partition_without_gaps_has_no_list(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(**NEVER_DELETED)
        .append_raw(at_times(0), at_times(1, (0, 0)))
        .engine
    )
    engine.append("t", [("k", "own")], now_ms=NOW_MS)
    assert not list((tmp_path / "t-0").glob("kl-*gaps*"))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Died, lambda: OSError(28, "No space left on device")])
def test_a_raw_append_that_died_anywhere_leaves_no_gap(
    tmp_path: Path, make: Callable[[], BaseException]
) -> None:
    first = tmp_path / "template"
    engine = LogBuilder(first).topic(**NEVER_DELETED).append_raw(at_times(3), at_times(8)).engine
    engine.close()
    n, fired = 0, True
    while fired:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(first, root)
        engine = DirectoryLog(root)
        many = [at_times(10 * k) for k in range(2, 9)]
        fired = each_act(lambda e=engine, b=many: LogBuilder(e).append_raw(*b), n, make())
        engine = DirectoryLog(root)
        before = offsets(engine)
        assert before in ([3, 8], [3, 8, 20, 30, 40, 50, 60, 70, 80]), n
        end = engine.offsets("t")[0][1]
        engine.append("t", [("k", str(i)) for i in range(30)], now_ms=NOW_MS)
        assert offsets(engine) == [*before, *range(end, end + 30)], n
        expected = [(0, 3), (4, 8)]
        if end > 9:
            expected += [(9, 20), *((10 * k + 1, 10 * k + 10) for k in range(2, 8))]
        assert raw_gaps(root) == expected, n
        assert damage(root) == [], n
        shutil.rmtree(root)
    assert n > 8


def test_gaps_of_segments_that_are_deleted_are_forgotten(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(**NEVER_DELETED)
        .append_raw(*(at_times(10 * n) for n in range(1, 20)))
        .engine
    )
    engine.delete_records("t", 0, 150)
    engine.apply_retention(now_ms=NOW_MS)
    first = min(int(path.stem) for path in (tmp_path / "t-0").glob("*.log"))
    assert first > 100
    assert offsets(engine) == [150, 160, 170, 180, 190]
    LogBuilder(engine).append_raw(at_times(300))
    assert raw_gaps(tmp_path)[0][1] > first
    assert offsets(engine) == [150, 160, 170, 180, 190, 300]


def test_a_damaged_list_of_raw_gaps_is_refused_by_reads_and_appends(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(**NEVER_DELETED).append_raw(at_times(3)).engine
    path = tmp_path / "t-0" / "kl-raw-gaps"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(KafkaLogError, match="kl-raw-gaps"):
        offsets(engine)
    with DirectoryLog(tmp_path) as other, pytest.raises(KafkaLogError, match="kl-raw-gaps"):
        other.append("t", [("k", "v")], now_ms=NOW_MS)
    path.write_bytes(data)
    assert offsets(engine) == [3]


# --- a broker's log ------------------------------------------------------------------------------


def test_an_adopted_log_is_listed_from_its_end_on_and_a_released_one_nowhere(
    tmp_path: Path,
) -> None:
    root = BrokerRoot(tmp_path / "root")
    directory = root.partition("t-0")
    write_segment(directory, 0, [batch(0, 5), batch(20, 5), batch(40, 5)])
    root.shut_down()
    adopt(root.path, config={"t": {"cleanup.policy": "delete"}}, now_ms=NOW_MS)
    engine = DirectoryLog(root.path)
    state = engine.describe("t").partitions[0]
    assert state.listed_from == state.high_watermark == 100
    LogBuilder(engine).append_raw(at_times(110))
    whole = [*range(5), *range(20, 25), *range(40, 45), *range(50, 100), 110]
    assert offsets(engine) == whole
    engine.close()
    release(root.path, now_ms=NOW_MS)
    assert not list(directory.glob("kl-*"))
    assert offsets(DirectoryLog(root.path, read_only=True)) == whole
    (directory / "kl-gaps").write_bytes(b"stale")
    adopt(root.path, config={"t": {"cleanup.policy": "delete"}}, now_ms=NOW_MS)
    engine = DirectoryLog(root.path)
    assert engine.describe("t").partitions[0].listed_from == 111
    assert offsets(engine) == whole
    assert not list(directory.glob("kl-*gaps*"))


# --- verify --------------------------------------------------------------------------------------


def test_verify_names_unlisted_gaps_missing_ones_and_damaged_lists(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(**NEVER_DELETED).engine
    LogBuilder(engine).append_raw(
        at_times(5, (0, 0)), at_times(9), at_times(10), at_times(20), at_times(30)
    )
    directory = tmp_path / "t-0"
    assert damage(tmp_path) == []
    path = directory / "kl-raw-gaps"
    whole = path.read_bytes()
    path.write_bytes(gap_list([(0, -1, [(0, 5), (7, 8), (11, 20), (21, 30)])]))
    (found,) = damage(tmp_path)
    assert "expected a batch from offset 8 on" in found and "the offsets 9 to 9" in found
    path.write_bytes(gap_list([(0, -1, [(0, 5), (7, 9), (10, 12), (11, 20), (21, 30)])]))
    (found,) = damage(tmp_path)
    assert "expected a batch from offset 12 on" in found and "the offsets 10 to 10" in found
    path.unlink()
    assert len(damage(tmp_path)) >= 3  # behind a break the next batch is believed
    path.write_bytes(whole[:-1])
    (found,) = damage(tmp_path)
    assert str(path) in found
    path.write_bytes(whole[:-1] + b"\xff")
    (found,) = damage(tmp_path)
    assert str(path) in found
    path.write_bytes(whole)
    second = sorted(directory.glob("*.log"))[1]
    for file in directory.glob(second.stem + "*"):
        file.unlink()
    assert any("the segment's end, and what follows begins at" in line for line in damage(tmp_path))
