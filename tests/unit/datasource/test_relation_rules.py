"""The rules of Spark's KafkaRelationSuite, on readers that no JVM drives.

Also those of KafkaOffsetReaderSuite that are about ranges.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.datasource.batch_reader import KafkaLogBatchReader
from kafkalog.errors import InvalidInputError
from kafkalog.schema import HEADERS
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import ABORT, COMMIT, BuiltBatch, at_times, marker
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import rows, source

FIRST_MS = 1_700_000_000_000
TIMES = [FIRST_MS + 1000 * n for n in range(4)]
"""The three at which records were written, and one after them."""


def send(
    root: Path, values: Iterable[int], partition: int, ms: int = FIRST_MS, topic: str = "t"
) -> None:
    numbers = [(None, f"{n}") for n in values]
    log = LogBuilder(root, now_ms=ms).topic(topic, 3, policy="delete", exist_ok=True)
    log.append(*numbers, partition=partition, timestamp_ms=ms).close()


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Values 0 to 20 in three partitions: ten, ten and one."""
    send(tmp_path, range(10), 0)
    send(tmp_path, range(10, 20), 1)
    send(tmp_path, [20], 2)
    return tmp_path


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """Values 0 to 29 over three partitions, ten at each of the first three `TIMES`."""
    for ms, tens in zip(TIMES, (range(10), range(10, 20), range(20, 30)), strict=False):
        for partition in range(3):
            send(tmp_path, [n for n in tens if n % 3 == partition], partition, ms)
    return tmp_path


def reader(root: Path, **options: Any) -> KafkaLogBatchReader:
    texts = {k: v if isinstance(v, str) else json.dumps({"t": v}) for k, v in options.items()}
    data_source = source(root, **texts)
    return data_source.reader(data_source.schema())


def values(reader_: KafkaLogBatchReader, planned: Any = None) -> list[int]:
    found = rows(reader_, reader_.partitions() if planned is None else planned)
    return sorted(int(row["value"]) for row in found)


def every(offset: int, **others: int) -> dict[str, int]:
    return {"0": offset, "1": offset, "2": offset, **{k[1:]: v for k, v in others.items()}}


def planned_ranges(reader_: KafkaLogBatchReader) -> list[tuple[int, int, int]]:
    ranges = [piece.range for piece in reader_.partitions()]
    return [(range_.partition.partition, range_.start, range_.end) for range_ in ranges]


def test_an_open_end_is_bound_at_every_read(three: Path) -> None:
    found = reader(three, startingOffsets="earliest", endingOffsets="latest")
    planned = found.partitions()
    assert values(found, planned) == list(range(21))

    send(three, range(21, 30), 2)

    assert values(found, planned) == list(range(30))


def test_without_options_a_read_is_from_earliest_to_latest(three: Path) -> None:
    assert values(reader(three)) == list(range(21))


def test_a_given_end_stays_while_a_latest_one_moves(three: Path) -> None:
    start, end = {"0": -2, "1": -2, "2": 0}, {"0": -1, "1": -1, "2": 1}
    found = reader(three, startingOffsets=start, endingOffsets=end)
    planned = found.partitions()
    assert values(found, planned) == list(range(21))

    send(three, range(31, 40), 2)
    assert values(found, planned) == list(range(21))
    send(three, range(21, 31), 1)
    assert values(found, planned) == list(range(31))


def test_headers_come_with_their_record_and_their_double_names(tmp_path: Path) -> None:
    pairs = [None, [("a", b"b"), ("c", b"d")], [("e", b"f"), ("e", b"g")]]
    headers = [None if p is None else [{"key": k, "value": v} for k, v in p] for p in pairs]
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 3, {"cleanup.policy": "delete"})
        engine.append(
            "t",
            pa.table(
                {
                    "value": pa.array([b"1", b"2", b"3"], pa.binary()),
                    "partition": pa.array([0, 1, 2], pa.int32()),
                    "headers": pa.array(headers, HEADERS),
                }
            ),
        )
    found = reader(tmp_path, includeHeaders="true")

    assert [(r["value"], r["headers"]) for r in rows(found, found.partitions())] == [
        (b"1", None),
        (b"2", headers[1]),
        (b"3", headers[2]),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {
                "startingOffsetsByTimestamp": every(TIMES[1]),
                "endingOffsetsByTimestamp": every(TIMES[2]),
            },
            range(10, 20),
            id="timestamps for both",
        ),
        pytest.param(
            {"startingOffsetsByTimestamp": every(TIMES[0]), "endingOffsets": every(-1, _2=1)},
            [n for n in range(30) if n % 3 != 2 or n == 2],
            id="timestamp to offset",
        ),
        pytest.param(
            {"startingOffsets": every(-2, _2=0), "endingOffsetsByTimestamp": every(TIMES[2])},
            range(20),
            id="offset to timestamp",
        ),
        pytest.param(
            {"startingOffsetsByTimestamp": every(TIMES[1])}, range(10, 30), id="timestamp to latest"
        ),
        pytest.param(
            {"endingOffsetsByTimestamp": every(TIMES[2])}, range(20), id="earliest to timestamp"
        ),
        pytest.param(
            {"startingTimestamp": str(TIMES[1]), "endingTimestamp": str(TIMES[2])},
            range(10, 20),
            id="global timestamps",
        ),
        pytest.param(
            {
                "startingTimestamp": str(TIMES[2]),
                "startingOffsetsByTimestamp": every(TIMES[1]),
                "startingOffsets": "earliest",
            },
            range(20, 30),
            id="a global timestamp wins",
        ),
        pytest.param(
            {"startingOffsetsByTimestamp": every(TIMES[1]), "startingOffsets": "earliest"},
            range(10, 30),
            id="a timestamp wins over an offset",
        ),
        pytest.param(
            {"endingOffsetsByTimestamp": every(TIMES[1], _2=2**63 - 1)},
            [n for n in range(30) if n < 10 or n % 3 == 2],
            id="no match at the end is latest",
        ),
    ],
)
def test_timestamps_say_where_a_read_starts_and_ends(
    timed: Path, options: Mapping[str, Any], expected: Iterable[int]
) -> None:
    assert values(reader(timed, **options)) == sorted(expected)


def test_a_starting_timestamp_that_nothing_matches_fails_or_is_the_latest(timed: Path) -> None:
    times = every(TIMES[1], _2=2**63 - 1)

    with pytest.raises(InvalidInputError, match=r"No offset matched from request of .*t-2"):
        reader(timed, startingOffsetsByTimestamp=times).partitions()
    found = reader(
        timed, startingOffsetsByTimestamp=times, startingOffsetsByTimestampStrategy="latest"
    )
    planned = found.partitions()
    assert values(found, planned) == [n for n in range(10, 30) if n % 3 != 2]
    send(timed, [32], 2, TIMES[3])
    assert 32 in values(found, planned)


def test_a_plan_that_is_read_twice_in_one_query_gives_all_twice(three: Path) -> None:
    found = reader(three)
    planned = found.partitions()

    assert values(found, [*planned, *planned]) == sorted([*range(21), *range(21)])


@pytest.mark.parametrize("options", [{}, {"minPartitions": "6"}])
def test_an_open_start_is_bound_at_every_read(three: Path, options: dict[str, str]) -> None:
    found = reader(three, startingOffsets="earliest", endingOffsets="latest", **options)
    planned = found.partitions()
    assert values(found, planned) == list(range(21))

    with DirectoryLog(three) as engine:
        for partition in range(3):
            engine.delete_records("t", partition, -1)
    send(three, range(30, 40), 0)

    assert values(found, planned) == list(range(30, 40))


def data(base: int) -> BuiltBatch:
    return at_times(base, (FIRST_MS,) * 5, producer_id=7, sequence=base, transactional=True)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("read_committed", [[], [*range(5)], [*range(5)], [*range(5), *range(12, 17)]]),
        (
            "read_uncommitted",
            [
                [*range(5)],
                [*range(5)],
                [*range(5), *range(6, 11)],
                [*range(5), *range(6, 11), *range(12, 17)],
            ],
        ),
    ],
)
def test_a_frame_follows_transactions_by_its_isolation_level(
    tmp_path: Path, level: str, expected: list[list[int]]
) -> None:
    log = LogBuilder(tmp_path).topic(policy="delete").append_raw(data(0))
    found = reader(tmp_path, **{"kafka.isolation.level": level})
    planned = found.partitions()
    seen = [[row["offset"] for row in rows(found, planned)]]

    for batches in (
        [marker(5, COMMIT, 7)],
        [data(6), marker(11, ABORT, 7)],
        [data(12), marker(17, COMMIT, 7)],
    ):
        log.append_raw(*batches)
        seen.append([row["offset"] for row in rows(found, planned)])

    assert seen == expected


def test_min_partitions_gives_that_many_tasks_which_see_what_comes_later(three: Path) -> None:
    found = reader(three, minPartitions="6")
    planned = found.partitions()
    assert len(planned) >= 6
    assert values(found, planned) == list(range(21))

    for n in range(21, 31):
        send(three, [n], n % 3)

    assert values(found, planned) == list(range(31))
    assert values(found) == list(range(31))


def test_no_task_has_more_than_the_largest_count_of_records(three: Path) -> None:
    found = reader(three, maxRecordsPerPartition="4")

    assert planned_ranges(found) == [
        *[(0, -2, 3), (0, 3, 6), (0, 6, -1)],
        *[(1, -2, 3), (1, 3, 6), (1, 6, -1)],
        (2, -2, -1),
    ]
    assert values(found) == list(range(21))


def test_start_and_end_must_name_the_same_partitions(three: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET"
    ):
        source(
            three,
            startingOffsets='{"t":{"0":1,"1":1,"2":1}}',
            endingOffsets='{"t":{"0":0,"1":0}}',
        )


def test_a_given_start_must_not_lie_above_a_given_end(three: Path) -> None:
    with pytest.raises(InvalidInputError, match="UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET"):
        source(
            three,
            startingOffsets='{"t":{"0":1,"1":1,"2":1}}',
            endingOffsets='{"t":{"0":0,"1":0,"2":0}}',
        )


def test_a_start_must_not_lie_above_an_end_that_was_looked_up(timed: Path) -> None:
    found = reader(
        timed, startingOffsets=every(9), endingOffsetsByTimestamp=every(TIMES[1], _2=TIMES[0])
    )
    beyond = reader(timed, startingOffsets=every(11))

    with pytest.raises(
        InvalidInputError,
        match=r"RESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET\] The resolved start offset 9 is "
        r"greater than the resolved end offset \d for t-0",
    ):
        found.partitions()
    with pytest.raises(InvalidInputError, match=r"start offset 11 is greater .* end offset 10"):
        beyond.partitions()


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        ("1", {"startingOffsets": {"0": 1}, "endingOffsets": {"0": 4}}, [(0, 1, 4)]),
        (
            "3",
            {"startingOffsets": {"0": 1}, "endingOffsets": {"0": 4}},
            [(0, 1, 2), (0, 2, 3), (0, 3, 4)],
        ),
        ("1", {"startingOffsets": "earliest"}, [(0, -2, -1)]),
        ("3", {"startingOffsets": "earliest"}, [(0, -2, 1), (0, 1, 2), (0, 2, -1)]),
    ],
)
def test_only_the_outer_pieces_keep_what_is_looked_up_later(
    tmp_path: Path, count: str, options: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    send(tmp_path, range(4 if "endingOffsets" in options else 3), 0)
    assigned = {"assign": '{"t":[0]}', "minPartitions": count}

    assert planned_ranges(reader(tmp_path, **assigned, **options)) == expected


def test_pieces_of_several_partitions_keep_theirs_each(tmp_path: Path) -> None:
    send(tmp_path, range(3), 0)
    send(tmp_path, range(3), 1)
    assigned = {"assign": '{"t":[0,1]}', "startingOffsets": "earliest"}

    assert planned_ranges(reader(tmp_path, **assigned, minPartitions="2")) == [
        (0, -2, -1),
        (1, -2, -1),
    ]
    assert planned_ranges(reader(tmp_path, **assigned, minPartitions="6")) == [
        *[(0, -2, 1), (0, 1, 2), (0, 2, -1)],
        *[(1, -2, 1), (1, 1, 2), (1, 2, -1)],
    ]
