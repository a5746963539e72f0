from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.builders.batch_builder import Record
from tests.unit.cleaner.naive import (
    Batch,
    batch,
    dump,
    foreign_log,
    latest_values,
    naive_clean,
    offsets,
    records_of,
    singles,
)
from tests.unit.cleaner.transactional_log import Log

DAY = 86_400_000


def kafkas(slots: int = 5_000) -> CleanerConfig:
    """What makes batches and rounds Kafka's own."""
    return CleanerConfig(dedupe_buffer_size=24 * slots, merge_batches=False, spill=False)


def cleaned(engine: DirectoryLog, now_ms: int = 10_000, slots: int = 5_000) -> CleanerStats:
    config = kafkas(slots)
    (stats,) = clean(engine, "t", force=True, now_ms=now_ms, config=config)
    assert stats.error is None
    return stats


def keys(batches: list[Batch]) -> list[bytes | None]:
    return [record.key for record in records_of(batches)]


# --- against the naive cleaner -------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("seed", range(3))
def test_cleaning_again_and_again_leaves_what_the_naive_cleaner_leaves(
    tmp_path: Path, codec: str, seed: int
) -> None:
    rng = random.Random(seed)
    engine = DirectoryLog(tmp_path)
    config = {"compression.type": codec, "segment.bytes": "1200", "delete.retention.ms": "500"}
    engine.create_topic("t", 1, config)
    expected: list[Batch] = []
    first_dirty = end = 0
    for now in (1_000, 1_400, 1_600, 5_000):
        for i in range(rng.randrange(8)):
            rows = [
                (f"k{rng.randrange(25)}", None if rng.random() < 0.3 else f"{now}-{i}-{j}" * 3)
                for j in range(rng.randrange(1, 12))
            ]
            engine.append("t", rows, now_ms=now)
        expected += [b for b in dump(engine) if b.base >= end]
        end = engine.offsets("t")[0][1]
        assert clean(engine, "t", force=True, now_ms=now, config=kafkas()) is not None
        expected = naive_clean(
            expected, first_dirty, end, now=now, retention=500, high_watermark=end
        )
        assert dump(engine) == expected
        first_dirty = end
    assert engine.describe("t").partitions[0].first_dirty_offset == end


@pytest.mark.slow
def test_reading_a_cleaned_log_gives_the_same_latest_values_in_any_budget(tmp_path: Path) -> None:
    for slots in (3, 30, 1000):
        rng = random.Random(5)
        engine = DirectoryLog(tmp_path / str(slots))
        engine.create_topic("t", 1, {"segment.bytes": "900"})
        for i in range(20):
            rows = [(f"k{rng.randrange(30)}", f"{i}-{j}") for j in range(8)]
            engine.append("t", rows, now_ms=1000)
        before = records_of(dump(engine))
        stats = cleaned(engine, slots=slots)
        after = records_of(dump(engine))
        assert latest_values(after) == latest_values(before)
        assert len(after) == len(latest_values(before))
        assert stats.end_offset == 160
        assert (stats.rounds > 1) == (slots < 1000)
        assert set(after) <= set(before)


# --- Kafka's rules and their numbers -------------------------------------------------------------


def test_a_segment_larger_than_the_map_is_cleaned_in_rounds(tmp_path: Path) -> None:
    # Kafka: testPartialSegmentClean. One key fits; cleaned from offset 2, then 3, then 4.
    engine = foreign_log(
        tmp_path, {0: singles(0, "0", "1", "0", "1", "0"), 5: []}, first_dirty=2,
        config={"min.cleanable.dirty.ratio": "0"},
    )  # fmt: skip
    config = kafkas(2)
    found = []
    for _ in range(3):
        from kafkalog.cleaner.schedule.manager import clean_filthiest

        assert clean_filthiest(engine, now_ms=1, config=config) is not None
        found.append(offsets(dump(engine)))
    assert found == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    assert clean_filthiest(engine, now_ms=1, config=config) is None


def test_the_statistics_of_a_cleaning_count_records_and_bytes(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "0", "1", "0", "1", "0"), 5: []}, first_dirty=2)
    log = tmp_path / "t-0" / f"{0:020d}.log"
    size = log.stat().st_size
    stats = cleaned(engine)
    assert (stats.end_offset, stats.records_read, stats.bytes_read) == (5, 5, size)
    assert (stats.records_kept, stats.keyless_records) == (2, 0)
    assert stats.bytes_written == log.stat().st_size


def test_obsolete_keys_go_and_all_others_stay_intact(tmp_path: Path) -> None:
    segments = {
        base: [batch(base, [(f"k{i % 8}", f"v{i}") for i in range(base, base + 4)])]
        for base in (0, 4, 8)
    }
    engine = foreign_log(tmp_path, segments | {12: []})
    cleaned(engine)
    assert offsets(dump(engine)) == list(range(4, 12))


def test_a_batch_in_which_all_records_stay_is_copied_byte_for_byte(tmp_path: Path) -> None:
    first, second = batch(0, [("a", "1"), ("b", "1")]), batch(2, [("c", "1")])
    segments = {0: [first, second], 3: [batch(3, [("d", "1"), ("c", "2")])], 5: []}
    engine = foreign_log(tmp_path, segments)
    cleaned(engine)
    data = (tmp_path / "t-0" / f"{0:020d}.log").read_bytes()
    assert data == first.data + segments[3][0].data


def test_offsets_timestamps_and_the_last_offset_of_a_filtered_batch_stay(tmp_path: Path) -> None:
    source = batch(0, [("a", "1"), ("b", "1"), ("a", "2"), ("c", "1"), ("b", "2")])
    engine = foreign_log(tmp_path, {0: [source], 5: [batch(5, [("b", "3")])], 6: []})
    cleaned(engine)
    (first, _) = dump(engine)
    assert (first.base, first.last) == (0, 4)
    assert [(r.offset, r.timestamp) for r in first.records] == [(2, 2000), (3, 3000)]


def test_records_without_a_key_go(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("", "x"), ("a", "y"), ("", "z")])], 3: []})
    stats = cleaned(engine)
    assert keys(dump(engine)) == [b"a"]
    assert stats.keyless_records == 2


def test_records_beyond_the_end_of_the_round_stay_also_without_a_key(tmp_path: Path) -> None:
    pairs = [("a", "1"), ("a", "2"), ("b", "1"), ("", "x"), ("b", "2")]
    engine = foreign_log(
        tmp_path, {0: [batch(0, pairs)], 5: []}, config={"min.cleanable.dirty.ratio": "0"}
    )
    from kafkalog.cleaner.schedule.manager import clean_filthiest

    clean_filthiest(engine, now_ms=1, config=kafkas(2))
    assert offsets(dump(engine)) == [0, 1, 2, 3, 4]  # the map took offset 0 alone
    clean_filthiest(engine, now_ms=1, config=kafkas(2))
    assert offsets(dump(engine)) == [1, 2, 3, 4]


def test_an_empty_value_is_data_and_no_tombstone(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("a", "")])], 2: []})
    for now in (1, DAY + 1, 3 * DAY):
        clean(engine, force=True, now_ms=now, config=kafkas())
    assert [(r.offset, r.value) for r in records_of(dump(engine))] == [(1, b"")]


# --- tombstones ----------------------------------------------------------------------------------


def test_a_tombstone_goes_only_in_the_second_cleaning_past_its_horizon(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("a", None), ("b", "1")])], 3: []})
    cleaned(engine, now_ms=1_000)
    assert [(b.horizon, offsets([b])) for b in dump(engine)] == [(1_000 + DAY, [1, 2])]
    assert clean(engine, force=True, now_ms=1_000 + DAY - 1) == []  # not due: nothing to do
    cleaned(engine, now_ms=1_000 + DAY)
    # Sticky: the batch keeps its horizon though no tombstone is left in it.
    assert [(b.horizon, offsets([b])) for b in dump(engine)] == [(1_000 + DAY, [2])]


def test_with_no_retention_a_tombstone_still_takes_two_cleanings(tmp_path: Path) -> None:
    config = {"delete.retention.ms": "0"}
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("a", None)])], 2: []}, config=config)
    cleaned(engine, now_ms=7)
    assert offsets(dump(engine)) == [1]
    cleaned(engine, now_ms=7)
    assert offsets(dump(engine)) == []


def test_the_horizon_is_the_cleaners_time_and_not_the_records(tmp_path: Path) -> None:
    future = Record(0, 10**14, b"a", None)
    engine = foreign_log(tmp_path, {0: [Batch(0, 0, (future,)), batch(1, [("b", "1")])], 2: []})
    cleaned(engine, now_ms=1_000)
    (first, _) = dump(engine)
    assert (first.horizon, first.records) == (1_000 + DAY, (future,))


def test_a_obsolete_tombstone_goes_at_once(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", None), ("a", "1")])], 2: []})
    cleaned(engine)
    assert offsets(dump(engine)) == [1]
    assert dump(engine)[0].horizon is None


def test_a_horizon_stays_when_the_retention_changes(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", None), ("b", "1")])], 2: []})
    cleaned(engine, now_ms=1_000)
    engine.alter_topic("t", {"delete.retention.ms": "5"})
    engine.append("t", [("b", "2")], now_ms=1)
    cleaned(engine, now_ms=2_000)
    assert [b.horizon for b in dump(engine)] == [1_000 + DAY, None]


def test_a_horizon_past_the_range_is_not_set(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", None)])], 1: []})
    cleaned(engine, now_ms=layout.INT64_MAX - DAY + 1)
    assert [b.horizon for b in dump(engine)] == [None]


# --- batches of any size -------------------------------------------------------------------------


@pytest.mark.parametrize("io_buffer_size", [1, 1024])
def test_a_batch_beyond_the_buffer_and_max_message_bytes_is_cleaned(
    tmp_path: Path, io_buffer_size: int
) -> None:
    large = "x" * (1 << 20)
    segments = {0: [batch(i, [(f"k{i % 3}", large + str(i))]) for i in range(6)], 6: []}
    engine = foreign_log(tmp_path, segments, config={"max.message.bytes": "1000"})
    config = CleanerConfig(io_buffer_size=io_buffer_size)
    (stats,) = clean(engine, force=True, now_ms=1, config=config)
    assert (stats.error, offsets(dump(engine))) == (None, [3, 4, 5])


@pytest.mark.parametrize("length", [0, 13, 48, 200, 10**6, 2**31 - 1])
def test_a_batch_whose_size_is_wrong_is_not_cleaned_away(tmp_path: Path, length: int) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "a", "a", "a"), 3: []})
    log = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(log.read_bytes())
    place = len(data) // 3
    data[place + 8 : place + 12] = struct.pack(">i", length)
    log.write_bytes(data)
    (stats,) = clean(engine, force=True, now_ms=1, config=kafkas())
    assert str(log) in str(stats.error)
    assert log.read_bytes() == data
    assert not list((tmp_path / "t-0").glob("*.cleaned"))


def test_a_cleaned_segment_takes_no_more_room_than_it_needs(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"preallocate": "true", "segment.bytes": "100000"})
    for i in range(9):
        engine.append("t", [(f"k{i % 2}", f"v{i}")], now_ms=1)
    cleaned(engine)
    first, active = listed(tmp_path / "t-0")
    assert first.log.stat().st_size == first.size < 200
    assert first.log.stat().st_blocks * 512 < 100_000
    assert active.base_offset == 9


# --- batches of which no record stays ------------------------------------------------------------


def test_the_batch_that_ends_at_the_high_watermark_stays_empty(tmp_path: Path) -> None:
    dead = batch(0, [("a", None), ("", "x")], horizon=5)
    engine = foreign_log(tmp_path, {0: [dead], 2: []})
    cleaned(engine, now_ms=10)
    (left,) = dump(engine)
    assert (left.base, left.last, left.records, left.horizon) == (0, 1, (), None)
    log = tmp_path / "t-0" / f"{0:020d}.log"
    assert log.stat().st_size == 61
    engine.append("t", [("b", "1")], now_ms=1)
    cleaned(engine, now_ms=20)
    assert [b.base for b in dump(engine)] == [2]


def test_an_empty_batch_keeps_its_producer_sequence_and_largest_timestamp(tmp_path: Path) -> None:
    segments = {
        0: [batch(0, [("a", "1"), ("b", "1")], producer=1, sequence=0)],
        2: [batch(2, [("a", "2")], producer=1, sequence=2)],
        3: [batch(3, [("a", "3"), ("b", "3")], producer=2, sequence=0)],
        5: [],
    }
    engine = foreign_log(tmp_path, segments)
    cleaned(engine)
    # Producer 1's last batch keeps its header, the one before it goes.
    found = dump(engine)
    assert [(b.base, b.last, b.producer, b.sequence, len(b.records)) for b in found] == [
        (2, 2, 1, 2, 0),
        (3, 4, 2, 0, 2),
    ]
    data = (tmp_path / "t-0" / f"{0:020d}.log").read_bytes()[:61]
    fields = layout.BATCH_HEADER.unpack(data)
    assert fields[5:9] == (0, 0, -1, 2000)
    assert clean(engine, force=True, now_ms=10_000) == []
    engine.append("t", [("c", "1")], now_ms=1)
    cleaned(engine)
    assert [b.base for b in dump(engine)] == [2, 3, 5]


def test_a_producers_last_batch_is_found_in_the_active_segment_too(tmp_path: Path) -> None:
    segments = {
        0: [batch(0, [("a", "1")], producer=1, sequence=0)],
        1: [batch(1, [("a", "2")])],
        2: [batch(2, [("z", "1")], producer=1, sequence=1)],
    }
    config = {"min.cleanable.dirty.ratio": "0"}
    engine = foreign_log(tmp_path, segments, config=config)
    clean(engine, now_ms=1, config=kafkas())
    assert [b.base for b in dump(engine)] == [1, 2]


def test_a_producers_last_batch_is_found_also_after_swaps_of_the_round(tmp_path: Path) -> None:
    segments = {
        0: [batch(0, [("a", "1")]), batch(1, [("z", "1")])],
        2: [batch(2, [("b", "1")], producer=1, sequence=0)],
        3: [batch(3, [("c", "1")], producer=2, sequence=0)],
        4: [batch(4, [("a", "2"), ("b", "2"), ("c", "2")], producer=2, sequence=1)],
        7: [],
    }
    engine = foreign_log(tmp_path, segments, config={"segment.bytes": "75"})
    cleaned(engine)
    assert [(b.base, b.producer, len(b.records)) for b in dump(engine)] == [
        (1, -1, 1),
        (2, 1, 0),
        (4, 2, 3),
    ]


def test_an_emptied_segment_stays_until_it_is_merged(tmp_path: Path) -> None:
    segments = {
        0: [batch(0, [("a", "1")])],
        1: [batch(1, [("b", "1")])],
        2: [batch(2, [("a", "2"), ("b", "2")])],
        4: [],
    }
    engine = foreign_log(tmp_path, segments, config={"segment.bytes": "75"})
    cleaned(engine)
    directory = tmp_path / "t-0"
    assert [s.size for s in listed(directory)] == [0, 0, listed(directory)[2].size, 0]
    engine.append("t", [("c", "1")], now_ms=1)
    cleaned(engine)
    assert [s.base_offset for s in listed(directory)] == [0, 2, 4, 5]


def listed(directory: Path):
    from kafkalog.storage_engine.segment.segments import list_segments

    return list_segments(directory)


# --- output files --------------------------------------------------------------------------------


def test_the_indexes_of_a_cleaned_segment_lead_to_its_batches(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"index.interval.bytes": "150", "segment.bytes": "100000"})
    rng = random.Random(3)
    for i in range(200):
        rows = [(f"k{rng.randrange(600)}", f"{i}") for _ in range(10)]
        engine.append("t", rows, now_ms=rng.randrange(1_000, 5_000))
    cleaned(engine)
    directory = tmp_path / "t-0"
    data = (directory / f"{0:020d}.log").read_bytes()
    # Kafka's rule said naively: one decision per batch, the bytes since the last entry first.
    position = since = 0
    top, top_offset = -1, 0
    entries, times = [], []
    while position < len(data):
        fields = layout.BATCH_HEADER.unpack_from(data, position)
        last, size = fields[0] + fields[6], fields[1] + 12
        if fields[8] > top:
            top, top_offset = fields[8], last
        if since > 150:
            entries.append((last, position))
            if not times or top > times[-1][0]:
                times.append((top, top_offset))
            since = 0
        since += size
        position += size
    if not times or top > times[-1][0]:
        times.append((top, top_offset))
    assert len(entries) > 50
    index, time_index = (directory / f"{0:020d}{suffix}" for suffix in (".index", ".timeindex"))
    assert [*struct.iter_unpack(">ii", index.read_bytes())] == entries
    assert [*struct.iter_unpack(">qi", time_index.read_bytes())] == times


def test_a_cleaned_segment_has_the_time_of_its_last_source(tmp_path: Path) -> None:
    segments = {0: [batch(0, [("a", "1")])], 1: [batch(1, [("a", "2")])], 2: []}
    engine = foreign_log(tmp_path, segments)
    for base in (0, 1):
        os.utime(tmp_path / "t-0" / f"{base:020d}.log", ns=(10**18 + base, 10**18 + base))
    cleaned(engine)
    assert (tmp_path / "t-0" / f"{0:020d}.log").stat().st_mtime_ns == 10**18 + 1
    assert (tmp_path / "t-0" / f"{0:020d}.index").stat().st_mtime_ns == 10**18 + 1
    assert (tmp_path / "t-0" / f"{0:020d}.timeindex").stat().st_mtime_ns == 10**18 + 1


def test_a_cleaned_segment_is_synced_before_it_is_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.create(tmp_path)
    log.transact(1, 1, 2)
    log.transact(2, 1, 2, time=5)
    log.abort(1)
    log.commit(2)
    log.roll()
    source = log.directory / f"{0:020d}.log"
    os.utime(source, ns=(10**18, 10**18))
    done: list[tuple[str, str]] = []
    sync_file, sync_path, rename = files.sync_file, files.sync_path, files.rename

    def synced(fd: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        sync_file(fd)

    def synced_path(path: Path) -> None:
        done.append(("sync", path.name))
        sync_path(path)

    def renamed(old: Path, new: Path) -> None:
        done.append(("rename", old.name))
        rename(old, new)

    monkeypatch.setattr(files, "sync_file", synced)
    monkeypatch.setattr(files, "sync_path", synced_path)
    monkeypatch.setattr(files, "rename", renamed)
    log.clean()
    for suffix in ("log", "index", "timeindex", "txnindex"):
        name = f"{0:020d}.{suffix}.cleaned"
        assert done.index(("sync", name)) < done.index(("rename", name))
    for suffix in ("log", "index", "timeindex"):
        assert source.with_suffix(f".{suffix}").stat().st_mtime_ns == 10**18
    assert source.with_suffix(".txnindex").stat().st_mtime_ns > 10**18  # as in Kafka its own
    entries = source.with_suffix(".timeindex").read_bytes()
    assert struct.unpack(">qi", entries[-12:])[0] == 5  # the largest time of what is in it


def test_kafkas_checkpoint_says_how_far_the_log_is_clean(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("a", "2")])], 2: []})
    cleaned(engine)
    assert (tmp_path / "cleaner-offset-checkpoint").read_text() == "0\n1\nt 0 2\n"


def test_a_clean_log_is_not_written_again(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "a", "b", "c"), 3: []})
    log = tmp_path / "t-0" / f"{0:020d}.log"
    inode = log.stat().st_ino
    cleaned(engine)
    assert log.stat().st_ino == inode
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
