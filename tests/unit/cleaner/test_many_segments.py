"""What a cleaning of many small segments costs: counted calls, of which few grow with them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.cleaner.directory import swap
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import segment_bases

ROWS = 4
FEW, MANY = 12, 60
clean_module: Any = importlib.import_module("kafkalog.cleaner.directory.directory_round")


def small_segments(root: Path, count: int, key: Callable[[int], int]) -> DirectoryLog:
    """A log of full segments, so that no two of them fit into one."""
    log = LogBuilder(root, now_ms=1).topic(segment_bytes=200, min_cleanable_dirty_ratio=0)
    for first in range(0, count * ROWS, ROWS):
        log.append(*((f"{key(number):04d}", "v" * 20) for number in range(first, first + ROWS)))
    assert len(segment_bases(log.engine)) == count
    return log.engine


def half_overwritten(root: Path, count: int) -> DirectoryLog:
    """Every segment loses half of its records, but for the last ones."""
    return small_segments(root, count, lambda n: n if n % 2 else 0)


def distinct(root: Path, count: int) -> DirectoryLog:
    """No segment loses a record: each gets a key index, and stays."""
    return small_segments(root, count, lambda n: n)


def rows_of(engine: DirectoryLog) -> list[tuple[int, bytes, bytes | None]]:
    with engine.snapshot("t", 0, whole=True) as snapshot:
        columns = [
            tuple(rows[name].to_pylist() for name in ("offset", "key", "value"))
            for rows in snapshot.read(0, snapshot.state.high_watermark, schema=changelog_schema())
        ]
    return [row for found in columns for row in zip(*found, strict=True)]


@contextmanager
def counted(root: Path) -> Iterator[Counter[str]]:
    """Count what is done in a partition's directory as a whole, and to the lists of its gaps."""
    directory, calls = root / "t-0", Counter[str]()
    scan, sync_directory, rename = files.scan, files.sync_directory, files.rename

    def scan_counted(path: Path) -> Any:
        calls["listings"] += path == directory
        return scan(path)

    def sync_counted(path: Path) -> None:
        calls["directory syncs"] += path == directory
        sync_directory(path)

    def rename_counted(source: Path, target: Path) -> None:
        calls["gap writes"] += target.name == layout.GAPS
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "scan", scan_counted)
        patch.setattr(files, "sync_directory", sync_counted)
        patch.setattr(files, "rename", rename_counted)
        yield calls


def cleaned(engine: DirectoryLog) -> tuple[CleanerStats, Counter[str]]:
    with counted(engine.root) as calls:
        (stats,) = clean(engine, force=True, now_ms=2)
    return stats, calls


@pytest.mark.parametrize("write", [half_overwritten, distinct])
def test_a_round_lists_and_syncs_the_directory_as_often_for_many_segments_as_for_few(
    tmp_path: Path, write: Callable[[Path, int], DirectoryLog]
) -> None:
    few, of_few = cleaned(write(tmp_path / "few", FEW))
    many, of_many = cleaned(write(tmp_path / "many", MANY))
    assert (few.error, few.segments_before, few.segments_after) == (None, FEW, FEW)
    assert (many.error, many.segments_before, many.segments_after) == (None, MANY, MANY)
    assert of_many == of_few


def test_a_round_writes_the_gaps_of_all_segments_once_before_and_once_after_its_swaps(
    tmp_path: Path,
) -> None:
    stats, calls = cleaned(half_overwritten(tmp_path, MANY))
    assert stats.records_removed == MANY * ROWS // 2 - 1
    assert calls["gap writes"] == 2


def test_one_swap_replaces_a_bounded_number_of_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = half_overwritten(tmp_path / "at once", MANY)
    cleaned(expected)
    engine = half_overwritten(tmp_path / "one by one", MANY)
    replace, swaps = swap.replace_segments, list[int]()

    def replace_counted(directory: Path, groups: Any, **more: Any) -> None:
        swaps.append(sum(len(group.sources) for group in groups))
        replace(directory, groups, **more)

    monkeypatch.setattr(swap, "SEGMENTS_MAX", 7)
    monkeypatch.setattr(clean_module, "replace_segments", replace_counted)
    stats, calls = cleaned(engine)
    assert stats.error is None and len(swaps) > MANY // 8
    assert max(swaps) == 7
    assert calls["gap writes"] == 2
    assert rows_of(engine) == rows_of(expected)


def test_groups_with_a_segment_between_them_that_stays_are_not_swapped_together(
    tmp_path: Path,
) -> None:
    """A swap replaces all that its offsets span."""
    engine = small_segments(tmp_path, FEW, lambda n: n % 5 if n // ROWS % 3 else 1000 + n)
    stays = sorted((tmp_path / "t-0").glob("*.log"))[::3]
    before = {path: path.stat().st_ino for path in stays}
    latest = {row[1]: row for row in rows_of(engine)}
    stats, _ = cleaned(engine)
    assert stats.error is None and stats.records_removed > 0
    assert {path: path.stat().st_ino for path in stays} == before
    assert rows_of(engine) == sorted(latest.values())


def test_a_large_round_swaps_before_its_end_and_writes_the_gaps_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_module, "SWAP_SIZE", 1)
    stats, calls = cleaned(half_overwritten(tmp_path, 64))
    assert stats.error is None
    # Each time for as many bytes as all times before: 1, 1, 2, 4, 8, 16 and 32 segments.
    assert 4 <= calls["gap writes"] <= 8


def test_gaps_that_are_held_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_module, "GAPS_MAX", 10)
    engine = small_segments(tmp_path, 40, lambda n: 0)
    latest = {row[1]: row for row in rows_of(engine)}
    stats, calls = cleaned(engine)
    assert (
        stats.error is None and calls["gap writes"] == 4 + 1
    )  # a gap for each segment but the last
    assert rows_of(engine) == sorted(latest.values())


def test_a_round_that_fails_swaps_in_what_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = half_overwritten(tmp_path, FEW)
    latest = {row[1]: row for row in rows_of(engine)}
    create = files.create
    full = f"{ROWS * 6:020d}{layout.LOG}{layout.CLEANED}"

    def create_until_full(path: Path, data: bytes = b"") -> None:
        if path.name == full:
            raise OSError(28, "No space left on device", str(path))
        create(path, data)

    monkeypatch.setattr(files, "create", create_until_full)
    stats, _ = cleaned(engine)
    assert stats.error is not None and "No space left" in stats.error
    assert stats.records_removed == 6 * ROWS // 2
    assert len(list((tmp_path / "t-0").glob("*.log.deleted"))) == 6
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
    left = rows_of(engine)
    assert {row[1]: row for row in left} == latest and len(left) == FEW * ROWS - 6 * ROWS // 2
    monkeypatch.undo()
    stats, _ = cleaned(engine)
    assert stats.error is None
    assert rows_of(engine) == sorted(latest.values())
