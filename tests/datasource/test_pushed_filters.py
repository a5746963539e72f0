import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as spark_api
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from kafkalog.datasource import pushed_filters
from kafkalog.datasource.batch_reader import KafkaLogBatchReader, PushDownBatchReader
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.murmur2 import partition_of
from tests.datasource.logs import rows, source

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
START_MS = 1_700_000_000_000
PARTITION, TOPIC, OFFSET = ("partition",), ("topic",), ("offset",)
TIMESTAMP, KEY, VALUE = ("timestamp",), ("key",), ("value",)


def instant(ms: float) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics t and u, three partitions each; keys k0..k9, times that rise with some disorder."""
    root = tmp_path_factory.mktemp("log")
    chance = random.Random(5)
    with Engine(root) as engine:
        for topic in ("t", "u"):
            config = {"segment.bytes": "4096", "index.interval.bytes": "256"}
            engine.create_topic(topic, 3, {**config, "cleanup.policy": "delete"})
            for commit in range(30):
                times = [START_MS + 1000 * commit + chance.randrange(-3000, 3000) for _ in range(9)]
                keys = [chance.choice([None, *[b"k%d" % n for n in range(10)]]) for _ in range(9)]
                numbers = [chance.randrange(3) for _ in range(9)]
                values = [chance.choice([None, b"v%d" % commit]) for _ in range(9)]
                table = pa.table(
                    {
                        "key": pa.array(keys, pa.binary()),
                        "value": pa.array(values, pa.binary()),
                        "partition": pa.array(numbers, pa.int32()),
                        "timestamp": pa.array(times, pa.timestamp("ms", "UTC")),
                    }
                )
                engine.append(topic, table, now_ms=START_MS)
    return root


def reader_of(root: Path, filters: list[Filter], **options: str) -> PushDownBatchReader:
    data_source = source(root, **{"subscribe": "t,u", **options})
    plain = data_source.reader(data_source.schema())
    reader = PushDownBatchReader(plain.options, plain.columns)
    assert list(reader.pushFilters(filters)) == filters
    return reader


def holds(filter_: Filter, row: dict[str, Any]) -> bool:
    """What Spark says of a filter, written plainly; null is false."""
    if isinstance(filter_, Not):
        value = row[filter_.child.attribute[0]]
        return value is not None and not holds(filter_.child, row)
    found = row[filter_.attribute[0]]
    if isinstance(filter_, IsNull):
        return found is None
    if isinstance(filter_, IsNotNull):
        return found is not None
    value = filter_.value
    if isinstance(filter_, EqualNullSafe):
        return bool(found == value)
    if found is None:
        return False
    return {
        EqualTo: lambda: found == value,
        In: lambda: found in value,
        GreaterThan: lambda: found > value,
        GreaterThanOrEqual: lambda: found >= value,
        LessThan: lambda: found < value,
        LessThanOrEqual: lambda: found <= value,
        StringStartsWith: lambda: found.startswith(value),
        StringEndsWith: lambda: found.endswith(value),
        StringContains: lambda: value in found,
    }[type(filter_)]()


FILTERS: list[Filter] = [
    EqualTo(PARTITION, 1),
    In(PARTITION, (0, 2)),
    Not(EqualTo(PARTITION, 1)),
    Not(In(PARTITION, (0, 1))),
    GreaterThan(PARTITION, 0),
    LessThanOrEqual(PARTITION, 1),
    EqualTo(TOPIC, "u"),
    Not(EqualTo(TOPIC, "u")),
    StringStartsWith(TOPIC, "t"),
    StringEndsWith(TOPIC, "u"),
    StringContains(TOPIC, "x"),
    IsNotNull(TOPIC),
    EqualTo(OFFSET, 17),
    In(OFFSET, (3, 40, 41)),
    GreaterThan(OFFSET, 60),
    GreaterThanOrEqual(OFFSET, 60),
    LessThan(OFFSET, 20),
    LessThanOrEqual(OFFSET, 20),
    Not(EqualTo(OFFSET, 20)),
    GreaterThanOrEqual(TIMESTAMP, instant(START_MS + 15_000)),
    GreaterThan(TIMESTAMP, instant(START_MS + 15_000.5)),
    LessThan(TIMESTAMP, instant(START_MS + 9_000)),
    LessThanOrEqual(TIMESTAMP, instant(START_MS + 9_000)),
    EqualTo(KEY, b"k3"),
    EqualTo(KEY, bytearray(b"k3")),
    EqualNullSafe(KEY, b"k4"),
    EqualNullSafe(KEY, None),
    In(KEY, (b"k1", b"k2", b"none")),
    Not(EqualTo(KEY, b"k3")),
    GreaterThan(KEY, b"k5"),
    IsNull(KEY),
    IsNotNull(KEY),
    IsNull(VALUE),
    IsNotNull(VALUE),
    EqualTo(VALUE, b"v3"),
]


@pytest.mark.parametrize("filter_", FILTERS, ids=repr)
def test_every_row_that_a_filter_wants_is_read(log: Path, filter_: Filter) -> None:
    plain = source(log, subscribe="t,u")
    everything = plain.reader(plain.schema())
    all_rows = rows(everything, everything.partitions())

    reader = reader_of(log, [filter_])
    found = rows(reader, reader.partitions())

    wanted = [row for row in all_rows if holds(filter_, row)]
    assert [row for row in found if holds(filter_, row)] == wanted


@pytest.mark.parametrize("seed", range(20))
def test_filters_together_keep_every_row_that_all_of_them_want(log: Path, seed: int) -> None:
    filters = random.Random(seed).sample(FILTERS, 3)
    plain = source(log, subscribe="t,u", minPartitions="40")
    everything = plain.reader(plain.schema())
    all_rows = rows(everything, everything.partitions())

    reader = reader_of(log, filters, minPartitions="40")
    found = rows(reader, reader.partitions())

    wanted = [row for row in all_rows if all(holds(filter_, row) for filter_ in filters)]
    assert [row for row in found if all(holds(filter_, row) for filter_ in filters)] == wanted


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(PARTITION, 1)], {("t", 1), ("u", 1)}),
        ([EqualTo(TOPIC, "u"), Not(EqualTo(PARTITION, 0))], {("u", 1), ("u", 2)}),
        ([In(PARTITION, (5,))], set()),
        ([In(PARTITION, (0, None))], {(t, p) for t in "tu" for p in range(3)}),
    ],
)
def test_partitions_without_wanted_rows_get_no_task(
    log: Path, filters: list[Filter], expected: set[tuple[str, int]]
) -> None:
    planned = reader_of(log, filters).partitions()

    assert {tuple(piece.range.partition) for piece in planned} == expected


def test_pieces_outside_the_wanted_offsets_and_times_get_no_task(log: Path) -> None:
    def count(*filters: Filter) -> int:
        return len(reader_of(log, list(filters), minPartitions="60").partitions())

    every = count()
    assert count(GreaterThan(OFFSET, 60)) < every / 2
    assert count(LessThan(OFFSET, 20)) < every / 2
    late = GreaterThanOrEqual(TIMESTAMP, instant(START_MS + 25_000))
    assert count(late) < every / 2


def test_rows_that_are_not_wanted_mostly_do_not_leave_the_task(log: Path) -> None:
    reader = reader_of(log, [EqualTo(KEY, b"k3"), IsNotNull(VALUE)])

    found = rows(reader, reader.partitions())

    assert {row["key"] for row in found} == {b"k3"}
    assert all(row["value"] is not None for row in found)


def test_with_kafkas_partitioner_a_key_is_in_one_partition(log: Path) -> None:
    filters: list[Filter] = [EqualTo(KEY, b"k3"), EqualTo(TOPIC, "t")]

    anywhere = reader_of(log, filters).partitions()
    planned = reader_of(log, filters, partitioner="murmur2").partitions()

    assert len(anywhere) == 3
    assert [piece.range.partition.partition for piece in planned] == [partition_of(b"k3", 3)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 100])
def test_a_keys_partition_is_the_one_that_the_sink_takes(size: int) -> None:
    from kafkalog.storage_engine.records import murmur2_partitions

    keys = [bytes((n * 37 + i * 11) % 256 for i in range(size)) for n in range(20)]

    found = murmur2_partitions(pa.array(keys, pa.binary()), 7).tolist()

    assert [partition_of(key, 7) for key in keys] == found


def test_a_filter_by_offset_or_time_does_not_bring_back_what_is_superseded(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.create_topic("t", 1)
        engine.append("t", [(b"a", b"old"), (b"b", b"b")], now_ms=1000)
        engine.append("t", [(b"a", b"new")], now_ms=2000)
    filters: list[Filter] = [LessThan(OFFSET, 2), LessThan(TIMESTAMP, instant(1500))]
    by_key: list[Filter] = [EqualTo(KEY, b"a"), EqualTo(PARTITION, 0)]

    reader = reader_of(tmp_path, filters, subscribe="t", view="latest")
    found = {row["key"]: row["value"] for row in rows(reader, reader.partitions())}
    assert found == {b"a": b"new", b"b": b"b"}
    reader = reader_of(tmp_path, by_key, subscribe="t", view="latest")
    assert [row["value"] for row in rows(reader, reader.partitions())] == [b"new"]


def test_a_plan_with_filters_still_sees_what_comes_later(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.create_topic("t", 1)
        engine.append("t", [(b"a", b"1")], now_ms=1000)
    reader = reader_of(tmp_path, [GreaterThan(OFFSET, 1), LessThan(OFFSET, 4)], subscribe="t")
    planned = reader.partitions()
    assert rows(reader, planned) == []

    with Engine(tmp_path) as engine:
        engine.append("t", [(b"k%d" % n, b"") for n in range(9)], now_ms=2000)

    assert [row["offset"] for row in rows(reader, planned)] == [2, 3]


def test_filters_of_unknown_kinds_and_types_are_passed_over(log: Path) -> None:
    class Unknown(Filter):
        pass

    filters: list[Filter] = [
        Unknown(),
        EqualTo(PARTITION, "1"),
        EqualTo(PARTITION, True),
        EqualTo(("headers", "key"), "k"),
        GreaterThan(TIMESTAMP, datetime(2030, 1, 1)),  # without a zone
        GreaterThan(OFFSET, 1.5),
        Not(Unknown()),
    ]

    assert pushed_filters.PushedFilters.of(filters).wants(
        source(log).reader(source(log).schema()).partitions()[0].range.partition, 3, "any"
    )
    reader = reader_of(log, filters)
    assert len(reader.partitions()) == 6


def test_a_reader_takes_filters_only_where_spark_pushes_them(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_source = source(log)
    reader = data_source.reader(data_source.schema())
    assert type(reader) is KafkaLogBatchReader
    assert type(reader).pushFilters is DataSourceReader.pushFilters

    monkeypatch.setitem(
        __import__("sys").modules, "pyspark.sql.worker.data_source_pushdown_filters", spark_api
    )

    assert type(data_source.reader(data_source.schema())) is PushDownBatchReader
