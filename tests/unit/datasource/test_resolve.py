"""Starts and ends by time: which offsets they stand for."""

from pathlib import Path

import pytest

from kafkalog.datasource.offsets import EARLIEST, LATEST, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.resolve import ending_offsets, offsets_for_times, starting_offsets
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import at_times, joined, marker
from tests.builders.log_builder import LogBuilder

T = [TopicPartition("t", number) for number in range(3)]


def written(root: Path, times: dict[int, list[int]]) -> DirectoryLog:
    """A log of topic `t`, and the times of the records of its partitions."""
    log = LogBuilder(root, now_ms=5_000).topic("t", 3, policy="delete")
    for partition, of_partition in times.items():
        for time in of_partition:  # a batch each
            log.append(("k", "v"), partition=partition, timestamp_ms=time)
    return log.engine


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    return written(tmp_path, {0: [1_000, 2_000, 2_000, 3_000], 1: [1_000, 4_000, 2_000], 2: []})


def options(**given: str) -> SourceOptions:
    return SourceOptions.parse({"path": "/log", "subscribe": "t", **given})


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (0, [0, 0, None]),
        (1_000, [0, 0, None]),
        (1_001, [1, 1, None]),
        (2_000, [1, 1, None]),
        (2_500, [3, 1, None]),
        (3_001, [None, 1, None]),
        (2**63 - 1, [None, None, None]),
        (-1, [4, 3, 0]),
        (-2, [0, 0, 0]),
        (-3, [3, 1, None]),
    ],
)
def test_a_time_stands_for_the_first_record_that_is_as_young(
    engine: DirectoryLog, time: int, expected: list[int | None]
) -> None:
    found = offsets_for_times(engine, dict.fromkeys(T, time), isolation_level="read_committed")

    assert found == dict(zip(T, expected, strict=True))


def test_records_below_the_log_start_are_not_found(engine: DirectoryLog) -> None:
    engine.delete_records("t", 0, 2, now_ms=5_000)

    found = offsets_for_times(engine, {T[0]: 1_000}, isolation_level="read_committed")

    assert found == {T[0]: 2}


def test_a_record_of_an_open_transaction_is_found_by_who_sees_it_alone(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"cleanup.policy": "delete"})
    batches = [
        at_times(0, (1_000, 1_000)),
        at_times(2, (2_000,), producer_id=7, transactional=True),
        at_times(3, (3_000,)),
    ]
    engine.append_raw("t", 0, joined(batches), now_ms=5_000)

    def found(time: int, level: str) -> int | None:
        return offsets_for_times(engine, {T[0]: time}, isolation_level=level)[T[0]]

    assert (found(1_000, "read_committed"), found(1_000, "read_uncommitted")) == (0, 0)
    assert (found(2_000, "read_committed"), found(2_000, "read_uncommitted")) == (None, 2)
    engine.append_raw("t", 0, joined([marker(4, 1, 7, timestamp=3_000)]), now_ms=5_000)
    assert found(2_000, "read_committed") == 2


@pytest.mark.parametrize(("level", "end"), [("read_committed", 1), ("read_uncommitted", 3)])
def test_an_end_that_no_record_matches_is_the_latest_of_the_isolation_level(
    tmp_path: Path, level: str, end: int
) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"cleanup.policy": "delete"})
    opened = at_times(1, (2_000, 2_000), producer_id=7, transactional=True)
    engine.append_raw("t", 0, joined([at_times(0, (1_000,)), opened]), now_ms=5_000)
    given = options(endingTimestamp="9000", **{"kafka.isolation.level": level})

    assert ending_offsets(engine, given, T[:1]) == {T[0]: end}


def test_a_topic_that_is_gone_is_an_error(engine: DirectoryLog) -> None:
    gone = {TopicPartition("x", 0): 1}
    with pytest.raises(UnknownTopicError, match="'x' does not exist"):
        offsets_for_times(engine, gone, isolation_level="read_committed")


def test_a_start_that_no_record_matches_is_an_error_that_says_where(engine: DirectoryLog) -> None:
    for given in (
        {"startingTimestamp": "2500"},
        {"startingOffsetsByTimestamp": '{"t":{"0":1,"1":1,"2":2500}}'},
        {"startingTimestamp": "2500", "startingOffsetsByTimestampStrategy": "ERROR"},
    ):
        with pytest.raises(
            InvalidInputError,
            match=r"No offset matched from request of topic-partition t-2 and timestamp 2500\.",
        ):
            starting_offsets(engine, options(**given), T)


def test_a_start_that_no_record_matches_is_the_latest_where_asked(engine: DirectoryLog) -> None:
    given = options(startingTimestamp="2500", startingOffsetsByTimestampStrategy="latest")

    found = starting_offsets(engine, given, T)

    assert found == {T[0]: 3, T[1]: 1, T[2]: LATEST}


def test_an_end_that_no_record_matches_is_the_latest(engine: DirectoryLog) -> None:
    by_time = options(endingOffsetsByTimestamp='{"t":{"0":2000,"1":9000,"2":1}}')

    assert ending_offsets(engine, options(endingTimestamp="2500"), T) == {
        T[0]: 3,
        T[1]: 1,
        T[2]: 0,
    }
    assert ending_offsets(engine, by_time, T) == {T[0]: 1, T[1]: 3, T[2]: 0}


def test_without_an_option_a_start_is_the_earliest_and_an_end_is_the_latest(
    engine: DirectoryLog,
) -> None:
    assert starting_offsets(engine, options(), T) == dict.fromkeys(T, EARLIEST)
    assert ending_offsets(engine, options(), T) == dict.fromkeys(T, LATEST)


def test_offsets_stay_as_they_were_given(engine: DirectoryLog) -> None:
    given = options(
        startingOffsets='{"t":{"0":-2,"1":1,"2":-1}}', endingOffsets='{"t":{"0":-1,"1":99,"2":-1}}'
    )

    start = starting_offsets(engine, given, T)

    assert start == {T[0]: EARLIEST, T[1]: 1, T[2]: LATEST}
    assert ending_offsets(engine, given, T) == {T[0]: LATEST, T[1]: 99, T[2]: LATEST}
