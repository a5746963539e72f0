"""The first pass in any amount of memory, against a dict; and when it is Kafka's bounded one."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup.latest_records import LatestRecords, find_latest_records
from kafkalog.cleaner.dedup.offset_map import OffsetMap
from kafkalog.cleaner.dedup.spill.spilled import Spilled
from kafkalog.cleaner.directory.log_to_clean import log_to_clean
from kafkalog.cleaner.plan import Plan
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.reading.partition_snapshot import Chunk, PartitionSnapshot
from tests.builders.batch_builder import Record
from tests.unit.cleaner.naive import Batch, batch, foreign_log
from tests.unit.storage_engine.faults import Died

CONTROL = 0x20
ABORTED = 7
"""Batches of this producer do not count."""
Wanted = Callable[[Chunk], npt.NDArray[np.bool_]]


def random_log(
    rng: random.Random, count: int, keys: int, first: int = 0
) -> tuple[dict[int, Sequence[Batch]], int]:
    """Segments with gaps, keyless records, and batches that do not count; and where they end."""
    segments: dict[int, list[Batch]] = {}
    offset = base = first
    while offset < first + count:
        if not segments or rng.random() < 0.2:
            base = offset
            segments[base] = []
        pairs = [
            ("" if rng.random() < 0.05 else f"k{rng.randrange(keys)}", f"v{offset}")
            for _ in range(rng.randrange(1, 12))
        ]
        fields = {}
        if rng.random() < 0.1:
            fields = {"producer": ABORTED, "sequence": offset % 1000}
        item = batch(offset, pairs, **fields)
        if rng.random() < 0.3 and len(item.records) > 1:
            gone = rng.randrange(len(item.records))
            item = replace(item, records=item.records[:gone] + item.records[gone + 1 :])
        segments[base].append(item)
        offset = item.last + 1 + (rng.randrange(50) if rng.random() < 0.1 else 0)
    return {**segments, offset: []}, offset


def records_that_count(segments: Mapping[int, Sequence[Batch]]) -> Iterator[Record]:
    for batches in segments.values():
        for item in batches:
            if item.producer != ABORTED:
                yield from item.records


def naive_obsolete(
    segments: Mapping[int, Sequence[Batch]], first_dirty: int, end: int
) -> dict[int, bool]:
    """Per offset of a record that counts: whether a newer one lies in [first dirty, end)."""
    latest: dict[bytes, int] = {}
    for record in records_that_count(segments):
        if record.key is not None and first_dirty <= record.offset < end:
            latest[record.key] = record.offset
    return {
        record.offset: record.offset < end
        and record.key is not None
        and latest.get(record.key, -1) > record.offset
        for record in records_that_count(segments)
    }


def make_is_mapped(start: int) -> Wanted:
    last = -1

    def is_mapped(chunk: Chunk) -> npt.NDArray[np.bool_]:
        nonlocal last
        assert int(chunk.table.base_offsets[0]) > last, "out of order"
        assert int(chunk.table.last_offsets[-1]) >= start
        last = int(chunk.table.last_offsets[-1])
        return counted(chunk)

    return is_mapped


def counted(chunk: Chunk) -> npt.NDArray[np.bool_]:
    counts: npt.NDArray[np.bool_] = chunk.table.producer_ids != ABORTED
    return counts


def plan(engine: DirectoryLog, snapshot: PartitionSnapshot) -> Plan:
    return log_to_clean(
        "t",
        0,
        directory=snapshot.directory,
        config=TopicConfig.parse(engine.describe("t").config),
        state=snapshot.state,
        segments=snapshot.segments,
        now_ms=10_000,
    )


def found(
    engine: DirectoryLog,
    slots: int,
    *,
    stats: CleanerStats | None = None,
    check_abort: Callable[[], None] = lambda: None,
    spill: bool = True,
    look: Callable[[LatestRecords], None] = lambda latest: None,
    chunk_size: int = 2_000,
) -> tuple[dict[int, bool], int]:
    """What the first pass says of every record that counts, and where it ended."""
    with engine.snapshot("t", 0, whole=True) as snapshot:
        latest, end = find_latest_records(
            snapshot,
            plan(engine, snapshot),
            engine.partition_directory("t", 0),
            start=0,
            make_is_mapped=make_is_mapped,
            config=CleanerConfig(
                dedupe_buffer_size=24 * slots, spill=spill, io_buffer_size=chunk_size
            ),
            stats=CleanerStats("t", 0) if stats is None else stats,
            check_abort=check_abort,
        )
        try:
            look(latest)
            said: dict[int, bool] = {}
            for chunk in snapshot.chunks(0, snapshot.state.high_watermark, chunk_size=700):
                for run, records in chunk.runs(counted(chunk)):
                    flags = latest.obsolete(run, records).tolist()
                    said.update(zip(records.offsets.tolist(), flags, strict=True))
        finally:
            latest.close()
    return said, end


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "t-0").glob("kl-spill*"))


# --- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 7, 40, 300, 100_000])
@pytest.mark.parametrize("seed", range(6))
def test_who_is_obsolete_does_not_depend_on_the_memory(
    tmp_path: Path, seed: int, slots: int
) -> None:
    rng = random.Random(seed)
    segments, end = random_log(rng, 800, rng.choice([3, 40, 10_000]))
    first_dirty = rng.choice([0, 0, rng.randrange(end)])
    engine = foreign_log(tmp_path, segments, first_dirty=first_dirty)
    assert found(engine, slots) == (naive_obsolete(segments, first_dirty, end), end)
    assert leftovers(tmp_path) == []


def test_more_keys_than_memory_are_spilled_and_fewer_are_not(tmp_path: Path) -> None:
    segments, _ = random_log(random.Random(1), 500, 10_000)
    engine = foreign_log(tmp_path, segments)
    stats = CleanerStats("t", 0)
    kinds: list[type] = []
    found(engine, 5_000, stats=stats, look=lambda latest: kinds.append(type(latest)))
    assert stats.spilled_bytes == 0
    found(engine, 50, stats=stats, look=lambda latest: kinds.append(type(latest)))
    assert kinds == [OffsetMap, Spilled]
    keyed = sum(record.key is not None for record in records_that_count(segments))
    assert stats.spilled_bytes <= 24 * keyed


def test_a_clean_record_goes_only_if_a_dirty_one_is_newer(tmp_path: Path) -> None:
    # Two clean records of one key: a damaged checkpoint leaves such, and Kafka keeps both.
    names = ["a", "a", "b", *(f"k{i}" for i in range(30)), "b"]
    engine = foreign_log(
        tmp_path,
        {0: [batch(i, [(name, "v")]) for i, name in enumerate(names)], len(names): []},
        first_dirty=3,
    )
    said, _ = found(engine, 10)
    assert [said[i] for i in range(3)] == [False, False, True]


def test_runs_may_be_asked_for_out_of_order_and_twice(tmp_path: Path) -> None:
    segments, end = random_log(random.Random(2), 600, 30)
    engine = foreign_log(tmp_path, segments)
    expected = naive_obsolete(segments, 0, end)

    def look(latest: LatestRecords) -> None:
        with engine.snapshot("t", 0, whole=True) as snapshot:
            chunks = list(snapshot.chunks(0, end, chunk_size=500))
            random.Random(3).shuffle(chunks)
            for chunk in [*chunks, *chunks[:3]]:
                for run, records in chunk.runs(counted(chunk)):
                    flags = latest.obsolete(run, records).tolist()
                    assert flags == [expected[offset] for offset in records.offsets.tolist()]

    found(engine, 8, look=look)


def test_nothing_is_said_of_records_whose_batch_was_left_out(tmp_path: Path) -> None:
    segments, end = random_log(random.Random(10), 600, 30)
    engine = foreign_log(tmp_path, segments)

    def look(latest: LatestRecords) -> None:
        seen = 0
        with engine.snapshot("t", 0, whole=True) as snapshot:
            for chunk in snapshot.chunks(0, end):
                for run, records in chunk.runs(~counted(chunk)):
                    assert not latest.obsolete(run, records).any()
                    seen += len(records)
        assert seen > 30

    found(engine, 8, look=look)


def test_segments_that_retention_removes_between_the_passes_change_nothing(tmp_path: Path) -> None:
    segments, end = random_log(random.Random(4), 600, 100)
    engine = foreign_log(tmp_path, segments)
    expected = naive_obsolete(segments, 0, end)

    def look(latest: LatestRecords) -> None:
        with engine.snapshot("t", 0, whole=True) as snapshot:
            for chunk in snapshot.chunks(end // 2, end):
                for run, records in chunk.runs(counted(chunk)):
                    flags = latest.obsolete(run, records).tolist()
                    assert flags == [expected[offset] for offset in records.offsets.tolist()]

    found(engine, 8, look=look)


# --- bounded rounds ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_without_spilling_a_round_ends_where_kafkas_does(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    segments, _ = random_log(rng, 400, 200)
    engine = foreign_log(tmp_path, segments)
    said, end = found(engine, 40, spill=False)
    keyed = [r for r in records_that_count(segments) if r.key is not None]
    known: set[bytes] = set()
    for record in keyed:
        if len(known) == 36:
            break
        known.add(record.key or b"")
        last_put = record.offset
    # The round ends at the record that found the map full, or at its batch or segment before.
    assert last_put < end <= record.offset
    assert said == naive_obsolete(segments, 0, end)


def test_a_spill_that_died_twice_is_followed_by_a_bounded_round(tmp_path: Path) -> None:
    segments, end = random_log(random.Random(5), 400, 10_000)
    engine = foreign_log(tmp_path, segments)

    def die(latest: LatestRecords) -> None:
        assert isinstance(latest, Spilled)
        latest.files.pop_all()  # a death closes nothing
        raise Died

    for deaths in (1, 2):
        with pytest.raises(Died):
            found(engine, 40, look=die)
        assert json.loads((tmp_path / "t-0" / "kl-spilling").read_bytes())["deaths"] == deaths
        assert leftovers(tmp_path) == ["kl-spill-kept", "kl-spill-obsolete", "kl-spilling"]
    said, bounded_end = found(engine, 40)
    assert bounded_end < end
    assert said == naive_obsolete(segments, 0, bounded_end)
    assert leftovers(tmp_path) == []
    assert found(engine, 40) == (naive_obsolete(segments, 0, end), end)


def test_a_stop_on_demand_is_not_a_death(tmp_path: Path) -> None:
    segments, _ = random_log(random.Random(6), 400, 10_000)
    engine = foreign_log(tmp_path, segments)
    for stop_after in range(10_000):
        calls = 0

        def check_abort(stop_after: int = stop_after) -> None:
            nonlocal calls
            calls += 1
            if calls > stop_after:
                raise CleaningAborted("stopped")

        try:
            found(engine, 20, check_abort=check_abort)
        except CleaningAborted:
            assert leftovers(tmp_path) == []
        else:
            break
    assert stop_after > 20


# --- a full disk ---------------------------------------------------------------------------------


class FullDisk:
    """A disk on which the n-th write, and every later one, finds no room."""

    def __init__(self, patch: pytest.MonkeyPatch, n: int) -> None:
        self.left = n
        for name in ("write_at", "create"):
            patch.setattr(files, name, self._limited(getattr(files, name)))

    def _limited(self, write: Callable[..., None]) -> Callable[..., None]:
        def limited(*args: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(*args, **kwargs)

        return limited


def test_a_disk_that_is_full_at_any_write_leaves_no_file_and_says_so(tmp_path: Path) -> None:
    segments, end = random_log(random.Random(7), 400, 10_000)
    engine = foreign_log(tmp_path, segments)
    expected = naive_obsolete(segments, 0, end), end
    mark = tmp_path / "t-0" / "kl-spilling"
    for n in range(10_000):
        mark.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, n)
            try:
                assert found(engine, 20) == expected
            except StorageError as fault:
                assert "log.cleaner.dedupe.buffer.size" in str(fault)
                assert [name for name in leftovers(tmp_path) if name != "kl-spilling"] == []
            if disk.left >= 0:
                break
    assert n > 20
    assert leftovers(tmp_path) == []


def test_the_space_for_the_keys_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, _ = random_log(random.Random(8), 400, 10_000)
    engine = foreign_log(tmp_path, segments)
    keyed = sum(record.key is not None for record in records_that_count(segments))
    monkeypatch.setattr(files, "free_space", lambda directory: 16 * keyed)
    with pytest.raises(StorageError, match=r"t-0: .* bytes on disk, [0-9,]+ are free"):
        found(engine, 20)
    assert leftovers(tmp_path) == ["kl-spilling"]
    monkeypatch.setattr(files, "free_space", lambda directory: 64 * keyed)
    found(engine, 20)


@pytest.mark.parametrize("chunk_size", [2_000, 1 << 20])
def test_the_space_is_reckoned_from_what_the_map_has_taken_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    """A budget smaller than the keys of one run: the bytes behind them hold keys, too."""
    batches = [batch(50 * n, [(f"k{50 * n + i}", "v") for i in range(50)]) for n in range(40)]
    engine = foreign_log(tmp_path, {0: batches, 2000: []})
    rows = 2000 * (24 + 8)
    monkeypatch.setattr(files, "free_space", lambda directory: rows * 9 // 10)
    with pytest.raises(StorageError, match=r"bytes on disk, [0-9,]+ are free"):
        found(engine, 20, chunk_size=chunk_size)
    monkeypatch.setattr(files, "free_space", lambda directory: rows)  # no more keys than offsets
    found(engine, 20, chunk_size=chunk_size)


def test_a_full_disk_counts_as_a_death_so_that_bounded_rounds_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, end = random_log(random.Random(9), 400, 10_000)
    engine = foreign_log(tmp_path, segments)
    monkeypatch.setattr(files, "free_space", lambda directory: 0)
    for _ in range(2):
        with pytest.raises(StorageError):
            found(engine, 20)
    assert found(engine, 20)[1] < end
