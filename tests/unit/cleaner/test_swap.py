"""A swap that is cut short at any step: readers see the right records, the next cleaning heals."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.directory import swap
from kafkalog.cleaner.directory.swap import RewrittenGroup, list_gaps, replace_segments
from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.log_contents import latest_column
from tests.unit.cleaner.naive import (
    batch,
    dump,
    dump_snapshot,
    foreign_log,
    latest_values,
    records_of,
)
from tests.unit.storage_engine.faults import Died, each_act

Fault = Callable[[], BaseException]


def dirty_log(root: Path) -> DirectoryLog:
    """Five closed segments that become three, and an active one."""
    segments = {
        base: [batch(base, [(f"k{i % 7}", f"v{i}") for i in range(base, base + 5)])]
        for base in range(0, 25, 5)
    }
    return foreign_log(root, segments | {25: [batch(25, [("k1", "last")])]}, config={
        "segment.bytes": "170", "min.cleanable.dirty.ratio": "0",
    })  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("swap") / "log"
    dirty_log(root).close()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("segments_max", [1, 128])
@pytest.mark.parametrize("fault", [Died, lambda: OSError(28, "No space left on device")])
def test_a_cleaning_cut_short_at_any_durable_act_loses_nothing_and_heals(
    template: Path,
    tmp_path: Path,
    fault: Fault,
    segments_max: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(swap, "SEGMENTS_MAX", segments_max)  # several swaps, or one
    before = DirectoryLog(template, read_only=True)
    all_records, latest_offsets = records_of(dump(before)), latest_column(before)
    reference = tmp_path / "reference"
    shutil.copytree(template, reference)
    clean(DirectoryLog(reference), now_ms=1)
    healed_batches = dump(DirectoryLog(reference))

    n = 0
    is_cut_short = True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(template, root)
        engine = DirectoryLog(root)
        is_cut_short = each_act(lambda e=engine: clean(e, now_ms=1), n, fault())
        reader = DirectoryLog(root, read_only=True)
        left = records_of(dump(reader))
        assert latest_values(left) == latest_values(all_records), n
        assert set(left) <= set(all_records), n
        assert latest_column(reader) == latest_offsets, n
        # Whatever was left, another cleaner brings the log to where the first was heading.
        other = DirectoryLog(root)
        other.append("t", [("new", "1")], now_ms=1)
        clean(other, force=True, now_ms=90_000)
        assert latest_column(other) == latest_offsets | {b"new": 26}, n
        state = other.describe("t").partitions[0]
        assert (state.first_dirty_offset, state.cleaned_to) == (27, 27), n
        names = [path.name for path in (root / "t-0").iterdir()]
        assert not [name for name in names if name.endswith((".cleaned", ".swap"))], n
        assert "kl-uncleanable" not in names, n
        shutil.rmtree(root)
    assert n > 40
    assert len(healed_batches) < len(dump(before))


@pytest.mark.slow
def test_several_outputs_cut_short_at_any_rename_are_old_or_new_as_a_whole(tmp_path: Path) -> None:
    n = 0
    outcomes = set()
    is_cut_short = True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        engine = foreign_log(
            root, {0: [batch(0, [("a", "1")])], 1: [batch(1, [("a", "2"), ("b", "1")])], 3: []}
        )
        directory = root / "t-0"
        sources = list_segments(directory)[:2]
        config = TopicConfig.parse({})
        outputs = []
        gaps = []
        # A second output whose base is that of a source must not be taken for a vanished one.
        for base, pairs in ((0, [("x", "1")]), (1, [("a", "2"), ("b", "1")])):
            output = CleanedSegment(directory, base, config)
            item = batch(base, pairs)
            import numpy as np

            figures = [np.array([v]) for v in (len(item.data), base, item.last, 1000)]
            output.append([item.data], *figures)
            output.finish(10**18)
            outputs.append(output)
            gaps.append(output.section(item.last + 1))
        group = RewrittenGroup(sources, 3, outputs, gaps, [], True, 0, 0)
        live = {(source.base_offset, source.size) for source in sources}

        def swap_in() -> None:
            with locks.SegmentsLock(directory).exclusive():  # noqa: B023
                list_gaps(directory, [group], live)  # noqa: B023
                replace_segments(directory, [group])  # noqa: B023

        is_cut_short = each_act(swap_in, n, Died())
        keys = tuple(record.key for record in records_of(dump(engine)))
        outcomes.add(keys)
        assert keys in {(b"a", b"a", b"b"), (b"x", b"a", b"b")}, n
    assert len(outcomes) == 2
    assert [s.base_offset for s in list_segments(directory)] == [0, 1, 3]


def test_a_power_cut_may_lose_any_of_the_final_names(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new segment between two `.log.swap` files is no source of theirs."""
    reference, dead = tmp_path / "reference", tmp_path / "dead"
    shutil.copytree(template, reference)
    shutil.copytree(template, dead)
    clean(DirectoryLog(reference), now_ms=1)
    expected = dump(DirectoryLog(reference))

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(swap, "swap_in", die)
        clean(DirectoryLog(dead), now_ms=1)
    swaps = sorted(path.name for path in (dead / "t-0").glob("*.log.swap"))
    assert len(swaps) == 4
    for chosen in itertools.product((False, True), repeat=4):
        root = tmp_path / "".join(map(str, map(int, chosen)))
        shutil.copytree(dead, root)
        for name in itertools.compress(swaps, chosen):
            (root / "t-0" / name).rename(root / "t-0" / name.removesuffix(".swap"))
        assert dump(DirectoryLog(root, read_only=True)) == expected, chosen
        clean(DirectoryLog(root), now_ms=1)
        assert dump(DirectoryLog(root)) == expected, chosen
        assert not [*(root / "t-0").glob("*.swap")], chosen


def test_a_reader_that_is_open_during_a_cleaning_sees_its_moment(tmp_path: Path) -> None:
    engine = dirty_log(tmp_path)
    before = dump(engine)
    with engine.snapshot("t", 0, whole=True) as snapshot:
        first = next(iter(snapshot.chunks(0, 26)))
        assert clean(engine, force=True, now_ms=1)[0].error is None
        assert dump_snapshot(snapshot) == before
        assert first.segment_base == 0
    assert len(records_of(dump(engine))) == len(latest_values(records_of(before)))


def test_replaced_files_go_after_the_delay_and_the_canary_never(tmp_path: Path) -> None:
    import time

    engine = dirty_log(tmp_path)
    clean(engine, now_ms=1)
    directory = tmp_path / "t-0"
    assert list(directory.glob("*.log.deleted"))
    now = time.time_ns() // 1_000_000
    engine.append("t", [("a", "1")], now_ms=1)
    clean(engine, force=True, now_ms=now + 59_000)
    assert list(directory.glob("*.log.deleted"))
    engine.append("t", [("a", "2")], now_ms=1)
    clean(engine, force=True, now_ms=now + 10**7)
    # Only what this very cleaning replaced is left.
    assert len(list(directory.glob("*.log.deleted"))) <= 2
    assert (directory / "kl-canary.deleted").exists()


def test_names_of_the_last_swap_are_durable_before_a_cleaning_makes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who swapped may have died before that: a .swap that comes back is dead beside a .cleaned."""
    engine, done = dirty_log(tmp_path), list[str]()
    directory = engine.partition_directory("t", 0)
    sync, begin = files.sync_directory, CleanedSegment.__init__

    def sync_noted(path: Path) -> None:
        done.append("sync" if path == directory else "other")
        sync(path)

    def begin_noted(self: CleanedSegment, *args: Any, **kwargs: Any) -> None:
        done.append("begin")
        begin(self, *args, **kwargs)

    monkeypatch.setattr(files, "sync_directory", sync_noted)
    monkeypatch.setattr(CleanedSegment, "__init__", begin_noted)
    manager.clean(engine, now_ms=0)
    assert "sync" in done[: done.index("begin")]
