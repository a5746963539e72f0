from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner.dedup.log_to_clean import LogToClean, log_to_clean
from kafkalog.cleaner.directory.directory_round import _FileSource
from kafkalog.cleaner.rewrite.groups import group_segments_by_size
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.segments import SegmentFiles
from tests.builders.batch_builder import at_times
from tests.unit.cleaner.naive import batch

SPAN = 2**31 - 1


def segment(directory: Path, base: int, size: int = 100, index: int = 8) -> SegmentFiles:
    """A segment as a listing has it, with an offset index and a time index of `index` bytes."""
    paths = [
        directory / f"{base:020d}{suffix}"
        for suffix in (".log", ".index", ".timeindex", ".txnindex")
    ]
    paths[0].touch()
    paths[1].write_bytes(bytes(index))
    paths[2].write_bytes(bytes(index))
    return SegmentFiles(directory, base, size)


def dated(directory: Path, base: int, timestamp_ms: int) -> SegmentFiles:
    """A segment of one record at offset `base` with that timestamp."""
    import struct

    data = at_times(base, [timestamp_ms]).data
    found = segment(directory, base, len(data), 0)
    found.log.write_bytes(data)
    found.time_index.write_bytes(struct.pack(">qi", timestamp_ms, 0))
    return found


def plan(
    directory: Path, segments: list[SegmentFiles], now_ms: int = 0, **fields: object
) -> LogToClean:
    config = {
        k.replace("_", "."): str(v) for k, v in fields.items() if not hasattr(PartitionState(), k)
    }
    active = segments[-1]
    end = active.base_offset + 10
    state = {
        "high_watermark": end,
        "last_stable_offset": end,
        "active_base": active.base_offset,
        "active_size": active.size,
    }
    state |= {k: v for k, v in fields.items() if k not in [n.replace(".", "_") for n in config]}
    return log_to_clean(
        "t",
        0,
        directory=directory,
        config=TopicConfig.parse({"cleanup.policy": "compact", **config}),
        state=PartitionState(**state),
        segments=segments,
        now_ms=now_ms,
    )


# --- the cleanable range -------------------------------------------------------------------------


def test_without_a_cleaning_all_but_the_active_segment_is_dirty(tmp_path: Path) -> None:
    log = plan(tmp_path, [segment(tmp_path, base) for base in (0, 10, 20)])
    assert (log.first_dirty_offset, log.first_uncleanable_offset, log.end) == (0, 20, 20)
    assert (log.clean_bytes, log.cleanable_bytes, log.uncleanable_bytes) == (0, 200, 100)


def test_a_partially_cleaned_segment_counts_as_clean_and_as_cleanable(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10, 20)]
    log = plan(tmp_path, segments, first_dirty_offset=5)
    assert (log.clean_bytes, log.cleanable_bytes, log.dirty_ratio) == (100, 200, 2 / 3)
    log = plan(tmp_path, segments, first_dirty_offset=10)
    assert (log.clean_bytes, log.cleanable_bytes, log.dirty_ratio) == (100, 100, 0.5)


def test_a_first_dirty_offset_outside_of_the_log_starts_over_at_the_log_start(
    tmp_path: Path,
) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10, 20)]
    assert plan(tmp_path, segments, log_start_offset=10).first_dirty_offset == 10
    assert plan(tmp_path, segments, first_dirty_offset=200).first_dirty_offset == 0


def test_an_open_transaction_holds_the_cleaner_back(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10, 20)]
    log = plan(tmp_path, segments, last_stable_offset=13)
    # Rounded down to a segment: the one with the transaction is left untouched.
    assert (log.first_uncleanable_offset, log.end, log.cleanable_bytes) == (13, 10, 100)
    log = plan(tmp_path, segments, last_stable_offset=0)
    assert (log.end, log.has_work) == (0, False)


def test_only_the_active_segment_dirty_leaves_nothing_to_clean(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10, 20)]
    for fields in ({"first_dirty_offset": 20}, {"first_dirty_offset": 25}):
        log = plan(tmp_path, segments, **fields)
        assert (log.cleanable_bytes, log.has_work, log.is_eligible) == (0, False, False)
    log = plan(tmp_path, segments, log_start_offset=25, first_dirty_offset=25)
    assert (log.cleanable_bytes, log.has_work) == (0, False)


def test_a_segment_younger_than_the_lag_and_all_after_it_wait(tmp_path: Path) -> None:
    segments = [dated(tmp_path, base, 1_000 + base) for base in (0, 10, 20)]
    lag = {"min_compaction_lag_ms": 500}
    assert plan(tmp_path, segments, now_ms=1_499, **lag).end == 0
    assert plan(tmp_path, segments, now_ms=1_500, **lag).end == 10  # as old as the lag is enough
    assert plan(tmp_path, segments, now_ms=1_510, **lag).end == 20
    segments[0] = dated(tmp_path, 0, 9_000)
    assert plan(tmp_path, segments, now_ms=1_510, **lag).end == 0


def test_a_time_index_that_ends_early_shortens_no_lag(tmp_path: Path) -> None:
    segments = [dated(tmp_path, base, 1_000) for base in (0, 10)]
    data = segments[0].log.read_bytes() + at_times(1, [9_000]).data
    segments[0].log.write_bytes(data)  # the index ends with the first batch
    segments[0] = SegmentFiles(tmp_path, 0, len(data))
    assert plan(tmp_path, segments, now_ms=9_499, min_compaction_lag_ms=500).end == 0
    assert plan(tmp_path, segments, now_ms=9_500, min_compaction_lag_ms=500).end == 10


def test_a_segment_without_timestamps_is_as_old_as_its_file(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10)]
    written_ms = segments[0].log.stat().st_mtime_ns // 1_000_000
    assert plan(tmp_path, segments, now_ms=written_ms + 499, min_compaction_lag_ms=500).end == 0
    assert plan(tmp_path, segments, now_ms=written_ms + 500, min_compaction_lag_ms=500).end == 10


# --- eligibility ---------------------------------------------------------------------------------


def test_a_log_is_due_only_above_its_dirty_ratio(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in (0, 10, 20)]
    log = plan(tmp_path, segments, first_dirty_offset=10)
    assert (log.dirty_ratio, log.is_eligible) == (0.5, False)
    assert plan(
        tmp_path, segments, first_dirty_offset=10, min_cleanable_dirty_ratio=0.49
    ).is_eligible


def test_the_longest_lag_makes_a_log_due_whatever_its_ratio(tmp_path: Path) -> None:
    segments = [dated(tmp_path, base, 1_000 + base) for base in (0, 10, 20)]
    fields = {
        "first_dirty_offset": 10,
        "min_cleanable_dirty_ratio": 1,
        "max_compaction_lag_ms": 500,
    }
    assert not plan(tmp_path, segments, now_ms=1_510, **fields).is_eligible
    log = plan(tmp_path, segments, now_ms=1_511, **fields)
    assert (log.is_eligible, log.compaction_delay_ms) == (True, 1)
    assert not plan(
        tmp_path, segments, now_ms=9_999, **{**fields, "first_dirty_offset": 20}
    ).is_eligible


# --- groups --------------------------------------------------------------------------------------


def groups(segments: list[SegmentFiles], size: int = 10**9, index: int = 10**9, end: int = 10**6):
    sources = [_FileSource(each) for each in segments]
    found = group_segments_by_size(sources, max_size=size, max_index_size=index, end=end)
    assert [s for group in found for s in group] == sources
    return [len(group) for group in found]


def test_segments_are_grouped_up_to_the_size_of_one(tmp_path: Path) -> None:
    segments = [segment(tmp_path, base) for base in range(0, 100, 10)]
    assert groups(segments) == [10]
    assert groups(segments, size=1) == [1] * 10
    assert groups(segments, index=1) == [1] * 10
    assert groups(segments, size=300) == [3, 3, 3, 1]
    assert groups(segments, index=16) == [2] * 5
    segments[4] = segment(tmp_path, 40, size=301)
    assert groups(segments, size=300) == [3, 1, 1, 3, 2]


@pytest.mark.parametrize(("beyond", "expected"), [(0, [2, 1]), (1, [1, 1, 1])])
def test_a_group_spans_no_more_offsets_than_an_index_can_tell(
    tmp_path: Path, beyond: int, expected: list[int]
) -> None:
    # The second segment ends one before the third begins: a span of 2^31-1, or one more.
    third = SPAN + 1 + beyond
    segments = [segment(tmp_path, 0), segment(tmp_path, 1), segment(tmp_path, third)]
    assert groups(segments, end=third + 1) == expected


def test_the_last_segment_of_a_group_ends_where_cleaning_does(tmp_path: Path) -> None:
    segments = [segment(tmp_path, 0), segment(tmp_path, 1)]
    assert groups(segments, end=SPAN + 1) == [2]
    assert groups(segments, end=SPAN + 2) == [1, 1]


def test_an_empty_segment_joins_whatever_the_span(tmp_path: Path) -> None:
    segments = [segment(tmp_path, 0), segment(tmp_path, 1, size=0)]
    assert groups(segments, end=SPAN + 2) == [2]


def test_the_batches_of_these_tests_are_readable(tmp_path: Path) -> None:
    assert dated(tmp_path, 0, 5).size == len(batch(0, [("k", "v")]).data)
