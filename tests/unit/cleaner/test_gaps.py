"""What the cleaner lists of gaps: exactly those of the files it leaves, wherever it dies."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage
from tests.builders.segment_files import gaps_of
from tests.unit.cleaner.naive import Batch, batch, dump, foreign_log, latest_values, records_of
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.test_gaps import Pairs, parsed

SMALL = {"segment.bytes": "700", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "500"}


def directory(engine: DirectoryLog) -> Path:
    return engine.partition_directory("t", 0)


def check_lists(engine: DirectoryLog) -> dict[tuple[int, int], list[Pairs]]:
    """Every live segment is listed as its batches are, or has no gap and is not listed."""
    listed: dict[tuple[int, int], list[Pairs]] = {}
    path = directory(engine) / "kl-gaps"
    if path.exists():
        for base, size, pairs in parsed(path):
            if base < 0:
                continue  # a number of the journal
            listed.setdefault((base, size), []).append(pairs)
    batches = dump(engine)
    found = list_segments(directory(engine))
    ends = [s.base_offset for s in found[1:]] + [engine.offsets("t")[0][1]]
    for segment, end in zip(found, ends, strict=True):
        ranges = [(b.base, b.last) for b in batches if segment.base_offset <= b.base < end]
        expected = gaps_of(segment.base_offset, ranges, end)
        candidates = listed.get((segment.base_offset, segment.size), [[]])
        # Sources that outlived a swap that died may begin within the last gap.
        cut = [[(a, min(b, end)) for a, b in pairs if a < end] for pairs in candidates]
        assert expected in cut, segment
    assert damage(engine.root) == []
    return listed


def check_moved(engine: DirectoryLog) -> None:
    """No batch whose base offset has a flipped bit is read, in any closed segment."""
    for segment in list_segments(directory(engine))[:-1]:
        data = segment.log.read_bytes()
        position = 0
        while position < len(data):
            for bit in range(6):
                moved = bytearray(data)
                moved[position + 7] ^= 1 << bit
                segment.log.write_bytes(moved)
                with pytest.raises(CorruptBatchError):
                    dump(engine)
            position += 12 + int.from_bytes(data[position + 8 : position + 12], "big")
        segment.log.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_after_every_round_each_segment_is_listed_as_it_is(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engine = DirectoryLog(tmp_path)
    is_merged = bool(seed % 2)
    merges = {"kafkalog.cleaner.merge.batches": str(is_merged).lower()}
    engine.create_topic("t", 1, SMALL | merges)
    for now_ms in (1_000, 1_400, 2_000, 5_000):
        LogBuilder(engine, now_ms=now_ms).random_commits(rng, 12, keys=9, rows_max=4)
        config = CleanerConfig(dedupe_buffer_size=24 * rng.choice([20, 5_000]))
        assert clean(engine, "t", force=rng.random() < 0.7, now_ms=now_ms, config=config)
        listed = check_lists(engine)
        assert is_merged or any(pairs for found in listed.values() for pairs in found)
    check_moved(engine)


def test_a_section_goes_when_its_file_has_gone(tmp_path: Path) -> None:
    rng = random.Random(1)
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, SMALL)
    for now_ms in range(1_000, 9_000, 1_000):
        LogBuilder(engine, now_ms=now_ms).random_commits(rng, 12, keys=9, rows_max=4)
        clean(engine, "t", force=True, now_ms=now_ms)
    live = {(s.base_offset, s.size) for s in list_segments(directory(engine))}
    listed = {(base, size) for base, size, _ in parsed(directory(engine) / "kl-gaps")}
    assert list(directory(engine).glob("*.log.deleted"))
    assert {key for key in listed if key[0] >= 0} <= live


@pytest.mark.slow
def test_a_cleaner_that_died_anywhere_leaves_what_is_live_listed(tmp_path: Path) -> None:
    template = tmp_path / "template"
    engine = DirectoryLog(template)
    engine.create_topic("t", 1, SMALL)
    rng = random.Random(3)
    LogBuilder(engine, now_ms=1_000).random_commits(rng, 20, keys=9, rows_max=4)
    clean(engine, "t", force=True, now_ms=1_000)
    LogBuilder(engine, now_ms=1_400).random_commits(rng, 20, keys=9, rows_max=4)
    before = latest_values(records_of(dump(engine)))
    engine.close()
    n, fired = 0, True
    while fired:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(template, root)
        engine = DirectoryLog(root)
        fired = each_act(lambda e=engine: clean(e, force=True, now_ms=1_400), n, Died(), after=True)
        reader = DirectoryLog(root)
        check_lists(reader)
        assert latest_values(records_of(dump(reader))) == before, n
        again = clean(reader, force=True, now_ms=1_450)
        assert [stats.error for stats in again if stats.error] == [], n
        check_lists(reader)
        assert latest_values(records_of(dump(reader))) == before, n
        shutil.rmtree(root)
    assert n > 40


def twins(root: Path) -> DirectoryLog:
    """Two closed segments of the same keys and sizes: what is cleaned is as large as the first."""
    segments: dict[int, list[Batch]] = {
        base: [batch(base + i, [(f"k{i}", f"v{base + i:02}")]) for i in range(10)]
        for base in (0, 10)
    }
    return foreign_log(root, {**segments, 20: [batch(20, [("x", "y")])]}, config={
        "min.cleanable.dirty.ratio": "0", "kafkalog.cleaner.merge.batches": "false",
    })  # fmt: skip


@pytest.mark.slow
def test_a_segment_as_large_as_the_one_it_replaces_is_told_from_it(tmp_path: Path) -> None:
    n, fired, outcomes = 0, True, set()
    while fired:
        n += 1
        engine = twins(tmp_path / str(n))
        first = list_segments(directory(engine))[0]
        fired = each_act(lambda e=engine: clean(e, now_ms=1), n, Died())
        listed = check_lists(DirectoryLog(tmp_path / str(n)))
        outcomes.add(len(listed.get((0, first.size), [])))
        if not fired:
            assert list_segments(directory(engine))[0].size == first.size
            assert listed[0, first.size] == [[(0, 10)]]
            check_moved(engine)
    assert outcomes == {0, 1, 2}


def test_a_view_of_before_reads_the_files_of_before(tmp_path: Path) -> None:
    engine = twins(tmp_path)
    with engine.snapshot("t", 0) as snapshot:
        before = dump(engine)
        clean(engine, now_ms=1)
        found = [int(b) for chunk in snapshot.chunks(0, 21) for b in chunk.table.base_offsets]
        assert found == [item.base for item in before]
    rng = random.Random(2)
    for now_ms in (2, 3, 4):
        with engine.snapshot("t", 0) as snapshot:
            expected = [item.base for item in dump(engine)]
            for _ in range(2):
                LogBuilder(engine, now_ms=now_ms).random_commits(rng, 12, keys=9, rows_max=4)
                clean(engine, force=True, now_ms=now_ms)
            end = snapshot.state.high_watermark
            found = [int(b) for chunk in snapshot.chunks(0, end) for b in chunk.table.base_offsets]
            assert found == expected


def test_several_outputs_of_a_group_are_each_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = twins(tmp_path)
    monkeypatch.setattr(
        "kafkalog.cleaner.rewrite.cleaned_segment.CleanedSegment.count_fitting",
        lambda self, _, last_offsets: int((last_offsets - self.base_offset < 14).sum()),
    )
    config = CleanerConfig(io_buffer_size=200)
    (stats,) = clean(engine, "t", force=True, now_ms=1, config=config)
    assert stats.error is None
    check_lists(engine)
    monkeypatch.undo()
    assert len(list_segments(directory(engine))) > 2
    check_moved(engine)


def test_a_damaged_list_makes_a_partition_uncleanable(tmp_path: Path) -> None:
    engine = twins(tmp_path)
    clean(engine, now_ms=1)
    path = directory(engine) / layout.GAPS
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    engine.append("t", [("k1", "new")], now_ms=2)
    (stats,) = clean(engine, "t", force=True, now_ms=2)
    assert stats.error is not None and "kl-gaps" in stats.error
    path.write_bytes(data)
    (stats,) = clean(engine, "t", force=True, now_ms=3)
    assert stats.error is None
    check_lists(engine)


def test_what_a_broker_wrote_is_listed_once_it_is_cleaned(tmp_path: Path) -> None:
    segments = {
        0: [batch(3, [("a", "1")]), batch(7, [("b", "1")])],
        10: [batch(12, [("c", "1")])],
        20: [batch(20, [("d", "1")])],
    }
    config = {"min.cleanable.dirty.ratio": "0", "kafkalog.cleaner.merge.batches": "false"}
    engine = foreign_log(tmp_path, segments, config=config)
    clean(engine, "t", now_ms=1)
    assert check_lists(engine) == {
        (0, list_segments(directory(engine))[0].size): [[(0, 3), (4, 7), (8, 12), (13, 20)]],
    }
    check_moved(engine)


@pytest.mark.slow
def test_a_swap_whose_offsets_were_changed_takes_nothing_along(tmp_path: Path) -> None:
    template = tmp_path / "template"
    engine = DirectoryLog(template)
    engine.create_topic("t", 1, SMALL)
    LogBuilder(engine, now_ms=1_000).random_commits(random.Random(5), 30, keys=9, rows_max=4)
    engine.close()
    root, n = tmp_path / "0", 0
    while not root.exists() or not list(root.glob("t-0/*.log.swap")) or any(root.glob("t-0/*.cl*")):
        n += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        engine = DirectoryLog(root)
        each_act(lambda e=engine: clean(e, force=True, now_ms=1_400), n, Died(), after=True)
    engine = DirectoryLog(root)
    expected = records_of(dump(engine))
    live = {path.name for path in directory(engine).glob("*.log")}
    swaps = sorted(directory(engine).glob("*.log.swap"))
    assert len(swaps) > 1
    fault = "a batch from offset|expected offsets above"
    for swap in swaps[:1] + swaps[-1:]:
        before = swap.read_bytes()
        position = 0
        while position < len(before):
            for bit in range(8, 40):
                moved = bytearray(before)
                moved[position + 7 - bit // 8] ^= 1 << bit % 8
                swap.write_bytes(moved)
                with pytest.raises(CorruptBatchError, match=fault):
                    dump(engine)
                (stats,) = clean(engine, force=True, now_ms=1_450)
                assert stats.error is not None
                assert "a batch from offset" in stats.error
                assert {path.name for path in directory(engine).glob("*.log")} == live
            position += 12 + int.from_bytes(before[position + 8 : position + 12], "big")
        swap.write_bytes(before)
    assert records_of(dump(engine)) == expected
    assert [stats.error for stats in clean(engine, force=True, now_ms=1_450)] == [None]
