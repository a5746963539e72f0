"""The edges of a read: nothing there, nothing but markers, very many partitions, few columns.

Batch, view and stream meet each of them alike; a stream is driven as Spark drives it.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from kafkalog.datasource.columns import spark_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import ABORT, COMMIT, at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import (
    MANY,
    append,
    append_to,
    create_many_partitions,
    numbered,
    places,
    read_batch,
    rows,
    source,
)
from tests.unit.datasource.streaming_query import Row, StreamingQuery

EARLIEST = {"startingOffsets": "earliest"}
LEVELS = ("read_committed", "read_uncommitted")


def keys(found: list[Row] | None) -> list[bytes]:
    return [row["key"] for row in found or []]


# Nothing there


def never_written(root: Path) -> int:
    LogBuilder(root).topic().close()
    return 0


def records_deleted(root: Path) -> int:
    append(root, "t", numbered(5))
    with DirectoryLog(root) as engine:
        engine.delete_records("t", 0, 5)
    return 5


def only_markers(root: Path) -> int:
    LogBuilder(root).topic().append_raw(marker(0, ABORT, 7), marker(1, COMMIT, 8)).close()
    return 2


def all_cleaned(root: Path) -> int:
    """Every key deleted, and the deletions' time over: what is left is the log's end."""
    log = LogBuilder(root, now_ms=1000).topic(delete_retention_ms=0)
    log.append(*numbered(3), (b"k0", None), (b"k1", None), (b"k2", None))
    log.clean(now_ms=2000).clean(now_ms=3000)
    end = log.engine.offsets("t")[0][1]
    log.close()
    return end


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("empty", [never_written, records_deleted, only_markers, all_cleaned])
def test_a_topic_without_records_reads_as_nothing_until_one_comes(
    tmp_path: Path, empty: Any, level: str
) -> None:
    options = {"kafka.isolation.level": level}
    end = empty(tmp_path)
    queries = [
        StreamingQuery(tmp_path, {**options, **more})
        for more in ({}, EARLIEST, {**EARLIEST, "maxOffsetsPerTrigger": "1"})
    ]

    assert read_batch(tmp_path, **options) == []
    assert read_batch(tmp_path, **options, minPartitions="3") == []
    assert read_batch(tmp_path, **options, view="latest") == []
    assert [query.drain() for query in queries] == [[], [], []]
    append(tmp_path, "t", [(b"late", b"v")])

    assert places(read_batch(tmp_path, **options)) == [("t", 0, end)]
    assert keys(read_batch(tmp_path, **options, view="latest")) == [b"late"]
    assert [places(query.drain()) for query in queries] == [[("t", 0, end)]] * 3
    assert [query.planned[-1] for query in queries] == [f'{{"t": {{"0": {end + 1}}}}}'] * 3


def test_data_of_aborted_transactions_alone_is_nothing_to_a_committed_read(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        aborted = at_times(0, (1, 2, 3), 7, transactional=True)
        engine.append_raw("t", 0, joined([aborted, marker(3, ABORT, 7)]), now_ms=0)
    query = StreamingQuery(tmp_path, {**EARLIEST, "maxOffsetsPerTrigger": "2"})

    assert read_batch(tmp_path) == read_batch(tmp_path, view="latest") == query.drain() == []
    assert query.planned[-1] == '{"t": {"0": 4}}'
    uncommitted = read_batch(tmp_path, **{"kafka.isolation.level": "read_uncommitted"})
    assert [row["offset"] for row in uncommitted] == [0, 1, 2]


def test_an_open_transaction_is_waited_for(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        opened = at_times(0, (1, 2), 7, transactional=True)
        engine.append_raw("t", 0, joined([opened, at_times(2, (3,))]), now_ms=0)
        query = StreamingQuery(tmp_path, EARLIEST)

        assert read_batch(tmp_path) == read_batch(tmp_path, view="latest") == query.drain() == []
        engine.append_raw("t", 0, joined([marker(3, COMMIT, 7)]), now_ms=0)

        assert [row["offset"] for row in query.drain()] == [0, 1, 2]
    assert [row["offset"] for row in read_batch(tmp_path)] == [0, 1, 2]


def test_a_log_without_topics_is_nothing_to_a_pattern(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path):
        pass
    options = {"subscribePattern": "t.*"}

    assert read_batch(tmp_path, **options) == []
    query = StreamingQuery(tmp_path, {**options, **EARLIEST})
    assert query.drain() == []
    append(tmp_path, "t1", numbered(2))
    assert places(query.drain()) == [("t1", 0, 0), ("t1", 0, 1)]


# Few columns


def names(*columns: str) -> StructType:
    ours = {field.name: field for field in spark_schema(include_headers=True)}
    return StructType([ours[name] for name in columns])


ALL = tuple(field.name for field in spark_schema(include_headers=True))


@pytest.mark.parametrize("view", ["changelog", "latest"])
def test_every_subset_of_the_columns_is_the_same_rows_cut(tmp_path: Path, view: str) -> None:
    append(
        tmp_path, "t", [*numbered(4), (b"k1", None), (None, b"x")][: 5 if view == "latest" else 6]
    )
    options = {"view": view, "includeHeaders": "true"}
    whole = read_batch(tmp_path, **options)
    assert [tuple(row) for row in whole] == [ALL] * len(whole)
    data_source = source(tmp_path, **options)

    for count in range(1, len(ALL) + 1):
        for columns in itertools.combinations(ALL, count):
            order = columns if count % 2 else columns[::-1]
            reader = data_source.reader(names(*order))
            found = rows(reader, reader.partitions())
            assert [list(row.items()) for row in found] == [
                [(name, row[name]) for name in order] for row in whole
            ]


@pytest.mark.parametrize("column", ALL)
def test_a_stream_of_one_column_has_a_row_for_each_record(tmp_path: Path, column: str) -> None:
    append_to(tmp_path, "t", {0: 3, 1: 2})
    whole = read_batch(tmp_path, includeHeaders="true")
    reader = source(tmp_path, **EARLIEST).streamReader(names(column))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())

    found = rows(reader, reader.partitions(start, end))

    assert found == [{column: row[column]} for row in whole]


# Very many partitions


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many")
    create_many_partitions(root)
    return root


@pytest.mark.slow
def test_a_thousand_partitions_are_planned_in_a_moment(many: Path) -> None:
    data_source = source(many, **EARLIEST)
    reader = data_source.streamReader(data_source.schema())
    began = time.process_time()

    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    planned = reader.partitions(start, end)

    took = time.process_time() - began
    assert list(start["t"]) == list(end["t"]) == [str(number) for number in range(MANY)]
    assert sorted({row["partition"] for row in rows(reader, planned)}) == [
        *range(0, MANY, 100),
        MANY - 1,
    ]
    assert len(planned) == 11  # nothing to do is no task
    assert took < 5  # seconds of a processor; it takes 0.1


@pytest.mark.slow
def test_an_idle_stream_of_a_thousand_partitions_costs_little(many: Path) -> None:
    query = StreamingQuery(many, EARLIEST)
    query.drain()
    began = time.process_time()

    assert [query.plan() for _ in range(100)] == [False] * 100

    assert time.process_time() - began < 5  # seconds of a processor; it takes 0.4


@pytest.mark.slow
def test_a_limit_starves_none_of_a_thousand_partitions(many: Path) -> None:
    query = StreamingQuery(many, {**EARLIEST, "maxOffsetsPerTrigger": "5"})

    batches = []
    while (found := query.trigger()) is not None:
        batches.append(len(found))

    assert batches == [11, 11, 11]  # one of each that has any: the limit rounds up


@pytest.mark.slow
def test_a_thousand_partitions_are_read_in_batch(many: Path) -> None:
    found = read_batch(many)

    assert len(found) == 33
    assert places(found) == sorted(places(found))
    assert len(read_batch(many, assign='{"t":[999,5]}')) == 3
    assert len(read_batch(many, view="latest")) == 33


# Other edges


def test_offsets_may_be_as_large_as_they_are(tmp_path: Path) -> None:
    first = (1 << 62) + 1
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        engine.append_raw("t", 0, joined([at_times(first, (1, 2, 3))]), now_ms=0)
    query = StreamingQuery(tmp_path, {**EARLIEST, "minPartitions": "2"})

    assert [row["offset"] for row in query.drain()] == [first, first + 1, first + 2]
    assert query.planned[-1] == f'{{"t": {{"0": {first + 3}}}}}'
    given = f'{{"t":{{"0":{first + 1}}}}}'
    assert [row["offset"] for row in read_batch(tmp_path, startingOffsets=given)] == [
        first + 1,
        first + 2,
    ]


def test_a_path_may_have_any_letters(tmp_path: Path) -> None:
    root = tmp_path / "a log, 100 % ünïcode" / "x y"
    root.mkdir(parents=True)
    append(root, "t", numbered(2))

    uri = root.as_uri()
    data_source = source(root, path=uri)
    reader = data_source.reader(data_source.schema())

    assert keys(rows(reader, reader.partitions())) == [b"k0", b"k1"]


def test_a_topic_named_twice_is_read_once(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(2))

    assert keys(read_batch(tmp_path, subscribe="t, t,,t")) == [b"k0", b"k1"]


def test_topics_whose_names_begin_alike_are_kept_apart(tmp_path: Path) -> None:
    for topic in ("t", "t-0", "t-0-0", "t.0", "t_0"):
        append(tmp_path, topic, [(topic.encode(), b"v")])

    assert keys(read_batch(tmp_path, subscribe="t-0")) == [b"t-0"]
    assert sorted(keys(read_batch(tmp_path, subscribePattern="^t-"))) == [b"t-0", b"t-0-0"]
    assert keys(read_batch(tmp_path, assign='{"t":[0]}')) == [b"t"]


@pytest.mark.parametrize("seed", range(4))
def test_several_queries_with_restarts_each_see_every_record_once(
    tmp_path: Path, seed: int
) -> None:
    """Writers, new topics, queries of all kinds that die anywhere."""
    chance = random.Random(seed)
    append_to(tmp_path, "t0", {0: 2, 1: 1})
    several = [
        {"subscribePattern": "^t[0-9]$", **EARLIEST},
        {"subscribePattern": "^t[0-9]$", **EARLIEST, "maxOffsetsPerTrigger": "3"},
        {"subscribe": "t0", **EARLIEST, "minPartitions": "4", "maxOffsetsPerTrigger": "7"},
        {"subscribe": "t0", **EARLIEST, "maxRecordsPerPartition": "2"},
    ]
    queries = [StreamingQuery(tmp_path, options) for options in several]
    seen: list[list[tuple[str, int, int]]] = [[] for _ in queries]

    for _ in range(40):
        number = chance.randrange(len(queries))
        query = queries[number]
        match chance.randrange(6):
            case 0:
                grow(tmp_path, chance)
            case 1:
                query.start()
            case 2:
                query.plan()
                query.start()  # died between the plan and the tasks
            case 3 if query.plan():
                # Died after its tasks had run: the batch is repeated, to the record.
                once = places(query.run_planned())
                query.committed -= 1
                query.start()
                assert sorted(places(query.run_planned())) == sorted(once)
                seen[number] += once
            case _:
                seen[number] += places(query.trigger())
    for number, query in enumerate(queries):
        seen[number] += places(query.drain())

    everything = places(read_batch(tmp_path, subscribePattern="^t[0-9]$"))
    assert len(everything) > 3
    for options, found in zip(several, seen, strict=True):
        wanted = [place for place in everything if "subscribe" not in options or place[0] == "t0"]
        assert sorted(found) == sorted(wanted)
        for log in {place[:2] for place in found}:
            assert [p for p in found if p[:2] == log] == [p for p in wanted if p[:2] == log]


def grow(root: Path, chance: random.Random) -> None:
    """Append to a topic, which may be a new one."""
    topic = f"t{chance.choice((0, 0, 0, 1, 2))}"
    with DirectoryLog(root) as engine:
        engine.create_topic(topic, 3, exist_ok=True)
        count = len(engine.offsets(topic))
    counts = {number: chance.randrange(4) for number in range(count)}
    counts[0] += 1
    append_to(root, topic, counts)
