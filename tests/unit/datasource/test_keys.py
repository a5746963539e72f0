"""The option `keys`: a read gives the records of these keys and no others."""

import json
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader

from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.records.murmur2 import partition_of
from tests.unit.datasource.logs import rows, source

KEYS = [b"", b"k1", b"k2", b"k3", b"\xff\x00", b"\xff", "\N{SNOWMAN}".encode(), b"k" * 100]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics t and u of three partitions each: keys anywhere, tombstones, records without a key."""
    root = tmp_path_factory.mktemp("log")
    chance = random.Random(5)
    with DirectoryLog(root) as engine:
        for topic in ("t", "u"):
            engine.create_topic(topic, 3, {"segment.bytes": "4096", "cleanup.policy": "delete"})
            for commit in range(30):
                table = pa.table(
                    {
                        "key": pa.array(chance.choices([None, *KEYS], k=9), pa.binary()),
                        "value": pa.array(chance.choices([None, b"v"], k=9), pa.binary()),
                        "partition": pa.array(chance.choices(range(3), k=9), pa.int32()),
                    }
                )
                engine.append(topic, table, now_ms=1000 + commit)
    return root


def option(keys: list[bytes]) -> str:
    """The keys as the option has them, in one of its two forms each."""
    return json.dumps(
        [
            {"base64": b64encode(key).decode()} if key[:1] in (b"\xff", b"k") else key.decode()
            for key in keys
        ]
    )


def read(root: Path, **options: str) -> list[dict[str, Any]]:
    data_source = source(root, **options)
    reader = data_source.reader(data_source.schema())
    return rows(reader, reader.partitions())


def planned(root: Path, **options: str) -> list[tuple[str, int]]:
    data_source = source(root, **options)
    pieces = data_source.reader(data_source.schema()).partitions()
    return sorted({tuple(piece.range.partition) for piece in pieces})


@pytest.mark.parametrize("extra", [{}, {"minPartitions": "40"}, {"includeHeaders": "true"}])
@pytest.mark.parametrize("seed", range(6))
def test_a_read_gives_the_records_of_the_keys_and_no_others(
    log: Path, seed: int, extra: dict[str, str]
) -> None:
    keys = random.Random(seed).sample([*KEYS, b"none"], 3)

    found = read(log, subscribe="t,u", keys=option(keys), **extra)

    assert found == [row for row in read(log, subscribe="t,u", **extra) if row["key"] in keys]


@pytest.mark.parametrize("seed", range(6))
def test_a_view_gives_the_latest_records_of_the_keys_and_no_others(log: Path, seed: int) -> None:
    keys = random.Random(seed).sample([*KEYS, b"none"], 3)

    found = read(log, subscribe="t,u", view="latest", keys=option(keys))

    everything = read(log, subscribe="t,u", view="latest")
    assert found == [row for row in everything if row["key"] in keys]


def test_keys_offsets_and_partitions_hold_together(log: Path) -> None:
    starts = json.dumps({"t": {"1": 20}})

    found = read(log, assign='{"t":[1]}', startingOffsets=starts, keys='["k1"]')

    assert found == [
        row
        for row in read(log)
        if row["partition"] == 1 and row["offset"] >= 20 and row["key"] == b"k1"
    ]


def test_a_key_that_is_given_twice_counts_once(log: Path) -> None:
    assert read(log, keys='["k1", {"base64": "azE="}]') == read(log, keys='["k1"]')


def test_with_kafkas_partitioner_only_the_partitions_of_the_keys_get_a_task(log: Path) -> None:
    murmur2 = {"subscribe": "t,u", "partitioner": "murmur2"}

    assert len(planned(log, subscribe="t,u", keys='["k3"]')) == 6
    for keys in ([b"k3"], [b"k1", b"k2"]):
        expected = {(topic, partition_of(key, 3)) for topic in "tu" for key in keys}
        assert planned(log, keys=option(keys), **murmur2) == sorted(expected)
    assert len(planned(log, **murmur2)) == 6


def test_a_stream_has_the_records_of_the_keys(log: Path) -> None:
    records = [row for row in read(log) if row["key"] in (b"k1", b"")]
    assert first_batch(log, startingOffsets="earliest") == records
    latest = {(row["partition"], row["key"]): row for row in records}
    assert first_batch(log, view="latest") == [row for row in records if row in latest.values()]


def first_batch(log: Path, **options: str) -> list[dict[str, Any]]:
    data_source = source(log, keys='["k1", ""]', partitioner="murmur2", **options)
    reader = data_source.streamReader(data_source.schema())
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    return rows(reader, reader.partitions(begin, end))


def test_a_plan_still_sees_what_comes_later(tmp_path: Path) -> None:
    data_source = source(tmp_path, keys='["a"]', partitioner="murmur2")
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 3)
    reader = data_source.reader(data_source.schema())
    plan = reader.partitions()

    with DirectoryLog(tmp_path) as engine:
        engine.append("t", [(b"%c" % letter, b"") for letter in b"abcdefga"], now_ms=2000)

    assert [row["key"] for row in rows(reader, plan)] == [b"a", b"a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"keys: no JSON array \(expected an array such as \[\"apple\".*, found \)\. Write a"),
        ("k1", r"keys: no JSON array .*found k1"),
        ('"k1"', r"keys: no JSON array"),
        ('{"t": ["k1"]}', r"keys: no JSON array"),
        ("[" * 100_000, r"keys: no JSON array .*found \[{60}\.\.\.\)"),
        ("[]", r"keys: the array is empty .*Leave the option out"),
        ("[1]", r"keys: no key .*found 1\)"),
        ("[null]", r"keys: no key .*found null\)"),
        ('["a", true]', r"keys: no key .*found true\)"),
        ('[["a"]]', r"keys: no key"),
        ('["\\ud800"]', r"keys: no key"),
        ('[{"base64": "azE"}]', r'keys: no key .*found \{"base64": "azE"\}'),
        ('[{"base64": "a z E ="}]', r"keys: no key"),
        ('[{"base64": 1}]', r"keys: no key"),
        ('[{"base64": "azE=", "hex": ""}]', r"keys: no key"),
        ('[{"hex": "6b"}]', r"keys: no key"),
    ],
)
def test_keys_that_are_not_a_json_array_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"option {message}"):
        SourceOptions.parse({"path": "/log", "subscribe": "t", "keys": text})


def test_the_option_is_known_in_any_letter_case(log: Path) -> None:
    assert read(log, KEYS='["k1"]') == read(log, keys='["k1"]')


def test_no_reader_takes_filters_from_spark(log: Path) -> None:
    """Spark would keep those of a query with the relation, for all queries that come after."""
    data_source = source(log)

    assert data_source.reader(data_source.schema()).pushFilters.__func__ is (
        DataSourceReader.pushFilters
    )
