"""Offsets for times against a plain list of records, and Kafka's special times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafkalog.errors import CorruptBatchError, InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading import time_offsets
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.reading.time_offsets import TimeOffset
from tests.builders.batch_builder import (
    COMMIT,
    GZIP,
    BuiltBatch,
    Record,
    at_times,
    batch,
    empty,
    marker,
)
from tests.builders.log_builder import LogBuilder
from tests.builders.message_builder import messages, wrapper
from tests.builders.segment_files import name, write_segment

LOG_APPEND_TIME = 0x08
Segments = dict[int, list[BuiltBatch]]


def opened(
    directory: Path, segments: Segments, *, log_start: int = 0, is_adopted: bool = True
) -> DirectorySnapshot:
    """An adopted log may have gaps that nobody has listed."""
    for base, batches in segments.items():
        write_segment(directory, base, batches)
    active = max(segments)
    last = segments[active][-1].last_offset + 1 if segments[active] else active
    state = PartitionState(
        high_watermark=last,
        last_stable_offset=last,
        active_base=active,
        active_size=(directory / name(active, ".log")).stat().st_size,
        log_start_offset=log_start,
        listed_from=last if is_adopted else 0,
    )
    return open_snapshot(directory, "t", 0, lambda: state)


def records(segments: Segments, log_start: int = 0) -> list[tuple[int, int]]:
    return [
        (record.offset, item.max_timestamp if item.attributes & 8 else record.timestamp)
        for base in sorted(segments)
        for item in segments[base]
        for record in item.records
        if record.offset >= log_start
    ]


def since(found: list[tuple[int, int]], ms: int) -> tuple[int, int] | None:
    return next(((offset, time) for offset, time in found if time >= ms), None)


def latest_records(found: list[tuple[int, int]]) -> tuple[int, int] | None:
    largest = max((time for _, time in found if time >= 0), default=None)
    return None if largest is None else since(found, largest)


def plain(found: TimeOffset | None) -> tuple[int, int] | None:
    return None if found is None else (found.offset, found.timestamp)


# --- any log -------------------------------------------------------------------------------------


@st.composite
def logs(draw: st.DrawFn) -> tuple[Segments, int]:
    offset = 0
    segments: Segments = {}
    for _ in range(draw(st.integers(1, 4))):
        batches = []
        base = offset
        for _ in range(draw(st.integers(0, 8))):
            times = draw(st.lists(st.integers(-1, 30), max_size=4))
            kind = draw(st.sampled_from([{}, {}, {"codec": GZIP}, {"attributes": LOG_APPEND_TIME}]))
            fields = {"last_offset": offset + 5, **(kind if times else {})}
            if not times or draw(st.integers(0, 5)) == 0:
                # What the cleaner leaves: the largest time may be that of a record that is gone.
                fields["max_timestamp"] = max([*times, 25])
            batches.append(at_times(offset, times, **fields))
            offset += 6
        segments[base] = batches
        offset += draw(st.sampled_from([0, 7])) or (not batches)
    return segments, draw(st.integers(0, offset))


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(logs(), st.integers(-1, 32))
def test_any_time_in_any_log_is_found_as_in_a_plain_list(
    tmp_path_factory: pytest.TempPathFactory, log: tuple[Segments, int], ms: int
) -> None:
    segments, log_start = log
    active = max(segments)
    end = segments[active][-1].last_offset + 1 if segments[active] else active
    log_start = min(log_start, end)
    found = records(segments, log_start)
    with opened(tmp_path_factory.mktemp("log"), segments, log_start=log_start) as snapshot:
        assert plain(time_offsets.latest(snapshot)) == latest_records(found)
        assert plain(time_offsets.first_since(snapshot, ms)) == since(found, ms)


@pytest.mark.parametrize("has_indexes", [True, False])
def test_the_latest_record_is_found_with_and_without_indexes(
    tmp_path: Path, has_indexes: bool
) -> None:
    rng = random.Random(5)
    segments: Segments = {
        base: [
            batch(offset, 3, last=offset + 4, timestamp=rng.randrange(10_000))
            for offset in range(base, base + 200, 5)
        ]
        for base in range(0, 1000, 200)
    }
    with opened(tmp_path, segments) as snapshot:
        if not has_indexes:
            for path in [*tmp_path.glob("*.index"), *tmp_path.glob("*.timeindex")]:
                path.unlink()
        assert plain(time_offsets.latest(snapshot)) == latest_records(records(segments))


# --- single cases --------------------------------------------------------------------------------


def test_a_wrappers_own_timestamp_is_not_trusted(tmp_path: Path) -> None:
    """Its producer wrote 1, and 7 to the records in it."""
    inner = [Record(offset, 7, b"k", b"v") for offset in range(3)]
    payload = messages(1, inner)
    told = [Record(2, 1, None, None)]
    data = wrapper(1, GZIP, told, offset=2, payload=payload)
    (tmp_path / name(0, ".log")).write_bytes(data)
    state = PartitionState(
        high_watermark=3, last_stable_offset=3, active_base=0, active_size=len(data)
    )

    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        assert plain(time_offsets.first_since(snapshot, 5)) == (0, 7)
        assert time_offsets.first_since(snapshot, 8) is None


def test_the_first_of_equally_new_records_counts(tmp_path: Path) -> None:
    segments = {0: [at_times(0, [5, 9]), at_times(2, [9])], 3: [at_times(3, [9, 1])]}
    with opened(tmp_path, segments) as snapshot:
        assert plain(time_offsets.latest(snapshot)) == (1, 9)


def test_a_time_is_that_of_a_record_not_of_its_batch(tmp_path: Path) -> None:
    with opened(tmp_path, {0: [at_times(0, [1, 7, 3])]}) as snapshot:
        assert plain(time_offsets.first_since(snapshot, 2)) == (1, 7)


def test_an_emptied_batch_still_carries_a_time_but_no_record(tmp_path: Path) -> None:
    segments = {0: [at_times(0, [5]), empty(1, 9), at_times(10, [7])]}
    with opened(tmp_path, segments) as snapshot:
        assert plain(time_offsets.first_since(snapshot, 6)) == (10, 7)
        assert plain(time_offsets.latest(snapshot)) == (10, 7)


@pytest.mark.parametrize(
    "place", [layout.MAX_TIMESTAMP_POSITION + 7, layout.RECORDS_COUNT_POSITION + 3]
)
def test_a_header_that_was_damaged_hides_no_record(tmp_path: Path, place: int) -> None:
    """Its batch was passed over once, and a later record was the answer."""
    segments = {0: [at_times(0, [5]), at_times(1, [8])], 2: [at_times(2, [8])]}
    with opened(tmp_path, segments) as snapshot:
        assert plain(time_offsets.first_since(snapshot, 7)) == (1, 8)
        with (tmp_path / name(0, ".log")).open("r+b") as log:
            log.seek(len(log.read()) // 2 + place)
            log.write(b"\0")
        with pytest.raises(CorruptBatchError, match="checksum"):
            time_offsets.first_since(snapshot, 7)


def test_records_without_timestamps_have_no_latest(tmp_path: Path) -> None:
    with opened(tmp_path, {0: [at_times(0, [-1, -1])]}) as snapshot:
        assert time_offsets.latest(snapshot) is None


def test_records_below_the_log_start_are_not_found(tmp_path: Path) -> None:
    with opened(tmp_path, {0: [at_times(0, [9, 8, 3, 8])]}, log_start=2) as snapshot:
        assert plain(time_offsets.latest(snapshot)) == (3, 8)
        assert plain(time_offsets.first_since(snapshot, 1)) == (2, 3)


# --- the engine ----------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    """Offsets 0 to 2, a transaction that is open from 3 on, own records at 5 and 6."""
    log = LogBuilder(tmp_path, now_ms=40).topic(partitions=2, policy="delete")
    batches = [
        at_times(0, (10, 20), leader_epoch=2),
        at_times(2, (15,), leader_epoch=3),
        at_times(3, (30, 31), 9, transactional=True, leader_epoch=3),
    ]
    return log.append_raw(*batches).append(("a", "1"), ("b", "2"), partition=0).engine


def test_the_ends_of_the_log_have_offsets_and_epochs_but_no_time(engine: DirectoryLog) -> None:
    latest = engine.offset_for_time("t", time_offsets.LATEST)
    assert latest == {0: TimeOffset(3, -1, 3), 1: TimeOffset(0, -1, -1)}
    latest = engine.offset_for_time("t", -1, isolation_level="read_uncommitted")
    assert latest[0] == TimeOffset(7, -1, 3)
    for special in (time_offsets.EARLIEST, time_offsets.EARLIEST_LOCAL):
        assert engine.offset_for_time("t", special)[0] == TimeOffset(0, -1, 2)
    assert engine.offset_for_time("t", time_offsets.LATEST_TIERED) == {0: None, 1: None}
    engine.delete_records("t", 0, 2)
    assert engine.offset_for_time("t", -2)[0] == TimeOffset(2, -1, 3)


def test_a_record_says_its_time_and_its_epoch(engine: DirectoryLog) -> None:
    assert engine.offset_for_time("t", 11) == {0: TimeOffset(1, 20, 2), 1: None}


def test_what_a_reader_does_not_see_yet_does_not_count(engine: DirectoryLog) -> None:
    for ms, found in ((30, TimeOffset(3, 30, 3)), (-3, TimeOffset(5, 40, 3))):
        assert engine.offset_for_time("t", ms)[0] is None
        assert engine.offset_for_time("t", ms, isolation_level="read_uncommitted")[0] == found
    engine.append_raw("t", 0, marker(7, COMMIT, 9, timestamp=35).data, now_ms=40)
    assert engine.offset_for_time("t", 30)[0] == TimeOffset(3, 30, 3)
    assert engine.offset_for_time("t", -3)[0] == TimeOffset(5, 40, 3)


def test_a_marker_may_be_the_latest_record(engine: DirectoryLog) -> None:
    engine.append_raw("t", 0, marker(7, COMMIT, 9, timestamp=99).data, now_ms=40)
    assert engine.offset_for_time("t", -3)[0] == TimeOffset(7, 99, 0)


def test_other_negative_times_and_levels_are_errors(engine: DirectoryLog) -> None:
    with pytest.raises(InvalidInputError, match=r"or -1 \(latest\), -2 .*, found -6"):
        engine.offset_for_time("t", -6)
    with pytest.raises(InvalidInputError, match="found 'any'"):
        engine.offset_for_time("t", 5, isolation_level="any")
