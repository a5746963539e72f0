"""PostgresUpsert in a stream of a log: small micro-batches, staged ones, retried ones."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.sink.upsert import PostgresUpsert, Upsert
from kafkalog.storage_engine.place import open_log
from tests.log_place import log_in
from tests.postgres_server import query
from tests.spark.sink.test_spark_foreach_batch import forget_commit
from tests.spark.sink.test_spark_writes import error_of, finish
from tests.unit.sink.dying_task import DyingTask

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MODULE = "kafkalog.sink.upsert.postgres.upsert"


class Follower:
    """A log of topic t with two partitions, and a query that takes it into tables."""

    def __init__(self, spark: Any, tmp_path: Path) -> None:
        self.spark = spark
        self.path = log_in(tmp_path)
        self.checkpoint = tmp_path / "checkpoint"
        with kafkalog.open(self.path) as log:
            log.create_topic("t", partitions=2, config={"max.message.bytes": "2000000"})

    def append(self, **values: Any) -> None:
        """Append records: None is a tombstone, text itself, anything else is put as JSON."""
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()}
        with kafkalog.open(self.path) as log:
            log.append(
                "t",
                [
                    (key.encode(), None if values[key] is None else text.encode())
                    for key, text in texts.items()
                ],
            )

    def run(self, *upserts: Upsert) -> None:
        def each(frame: Any, batch_id: int) -> None:
            for upsert in upserts:
                upsert(frame, batch_id)

        stream = self.spark.readStream.format("kafkalog").option("subscribe", "t")
        stream = stream.option("startingOffsets", "earliest").load(str(self.path))
        finish(stream.writeStream.foreachBatch(each).option("checkpointLocation", self.checkpoint))

    def letters(self, topic: str) -> list[tuple[bytes, bytes, str]]:
        """Return key, value and reason of the dead letters."""
        with open_log(self.path, read_only=True) as log:
            rows = [
                row
                for rows in log.read(topic, 0, 0, include_headers=True)
                for row in rows.to_pylist()
            ]
        reason = "__connect.errors.exception.message"
        return [
            (
                row["key"],
                row["value"],
                {h["key"]: h["value"] for h in row["headers"]}[reason].decode(),
            )
            for row in rows
        ]

    def ends(self) -> dict[str, dict[str, int]]:
        with kafkalog.open(self.path) as log:
            return {"t": {str(n): end for n, (_, end) in log.offsets("t").items()}}


@pytest.fixture
def follower(spark: Any, tmp_path: Path) -> Follower:
    return Follower(spark, tmp_path)


def test_tables_follow_a_log_exactly_once(
    follower: Follower, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = PostgresUpsert(postgres, "raw")
    parsed = PostgresUpsert(
        postgres, "parsed", schema="n int, tags array<string>", key_type="string"
    )
    shaped = PostgresUpsert(
        postgres,
        "shaped",
        select=lambda df: df.selectExpr(
            "cast(key as string) key",
            "value is null as deleted",
            "cast(get_json_object(cast(value as string), '$.n') as decimal(9,2)) price",
            "timestamp_ntz'2024-01-02 03:04:05' at",
        ),
    )
    upserts = (raw, parsed, shaped)
    follower.append(a={"n": 1, "tags": ["x", "y"]}, b={"n": 2}, c={"n": 3})
    follower.append(a={"n": 4, "tags": ["é"]}, c=None)
    follower.run(*upserts)
    expected = [("a", 4, ["é"]), ("b", 2, None)]
    assert query(postgres, "SELECT * FROM parsed ORDER BY key") == expected
    assert query(postgres, "SELECT key, price::float, at FROM shaped ORDER BY key") == [
        ("a", 4.0, dt.datetime(2024, 1, 2, 3, 4, 5)),
        ("b", 2.0, dt.datetime(2024, 1, 2, 3, 4, 5)),
    ]
    assert query(postgres, "SELECT key, value, topic FROM raw ORDER BY key") == [
        (b"a", b'{"n": 4, "tags": ["\\u00e9"]}', "t"),
        (b"b", b'{"n": 2}', "t"),
    ]

    monkeypatch.setattr(f"{MODULE}._SMALL", -1)  # from here on the tasks stage the rows
    follower.append(a={"n": 6}, b=None, d={"n": 5})
    follower.run(*upserts)
    expected = [("a", 6, None), ("d", 5, None)]
    assert query(postgres, "SELECT * FROM parsed ORDER BY key") == expected
    assert query(postgres, "SELECT key, price::int FROM shaped ORDER BY key") == [
        ("a", 6),
        ("d", 5),
    ]
    assert [key for (key,) in query(postgres, "SELECT key FROM raw ORDER BY 1")] == [b"a", b"d"]
    for upsert in upserts:
        (position,) = upsert.positions().values()
        assert position.end_offsets == follower.ends()

    query(postgres, "UPDATE parsed SET n = -1")
    forget_commit(follower.checkpoint, 1)
    follower.run(*upserts)
    assert query(postgres, "SELECT n FROM parsed") == [(-1,), (-1,)]


def test_rows_of_failed_attempts_do_not_count(
    follower: Follower, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}._SMALL", -1)
    monkeypatch.setattr(f"{MODULE}.StagingTask", DyingTask)
    query(postgres, "CREATE TABLE kept (key bytea PRIMARY KEY, value bytea, n serial)")
    follower.append(**{f"k{n}": n for n in range(50)})
    select = ["key", "value"]
    follower.run(PostgresUpsert(postgres, "kept", select=select))
    assert query(postgres, "SELECT count(*), max(n) FROM kept") == [(50, 50)]
    left = "SELECT count(*) FROM pg_class WHERE relname LIKE 'kafkalog\\_staging%'"
    assert query(postgres, left) == [(0,)]


def test_a_few_large_records_do_not_pass_through_the_driver(
    follower: Follower, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []
    by_tasks = PostgresUpsert._merge_staged
    monkeypatch.setattr(
        PostgresUpsert,
        "_merge_staged",
        lambda *given, **more: (ways.append(1), by_tasks(*given, **more)),
    )
    upsert = PostgresUpsert(postgres, "large")
    follower.append(**{f"k{n}": "x" * 1_500_000 for n in range(8)})
    follower.run(upsert)
    assert ways == [1]
    assert query(postgres, "SELECT count(*), sum(length(value)) FROM large") == [(8, 12_000_000)]


@pytest.mark.parametrize("small", [20_000, -1])
def test_a_record_that_does_not_fit_fails_the_query_and_is_named(
    follower: Follower, postgres: str, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(f"{MODULE}._SMALL", small)
    query(postgres, "CREATE TABLE narrow (key text PRIMARY KEY, name varchar(3))")
    upsert = PostgresUpsert(postgres, "narrow", schema="name string", key_type="string")
    follower.append(**{f"k{n}": {"name": "ok"} for n in range(30)})
    follower.append(k7={"name": "long"})
    message = error_of(lambda: follower.run(upsert))
    with kafkalog.open(follower.path) as log:
        found = [
            f"the record at t-{partition} offset {offset} does not fit"
            for partition in (0, 1)
            for rows in log.read("t", partition)
            for value, offset in zip(
                rows["value"].to_pylist(), rows["offset"].to_pylist(), strict=1
            )
            if b"long" in value
        ]
    assert found[0] in message
    assert 'column "name": value too long for type character varying(3)' in message
    assert query(postgres, "SELECT count(*) FROM narrow") == [(0,)]
    assert upsert.positions() == {}


@pytest.mark.parametrize("small", [20_000, -1])
def test_records_that_do_not_fit_become_dead_letters_and_the_others_rows(
    follower: Follower, postgres: str, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(f"{MODULE}._SMALL", small)
    query(
        postgres,
        "CREATE TABLE orders (region text, id int, n int CHECK (n < 100), UNIQUE (id, region))",
    )

    def upsert() -> PostgresUpsert:
        return PostgresUpsert(
            postgres,
            "orders",
            schema="region string, id int, n int",
            key=["region", "id"],
            on_bad_record="deadletter:bad",
            path=follower.path,
        )

    def key(region: str, number: int) -> str:
        return json.dumps({"region": region, "id": number})

    follower.append(**{key("eu", 1): {"n": 1}, key("eu", 2): {"n": 2}, key("us", 1): {"n": 100}})
    follower.run(upsert())
    follower.append(**{key("eu", 1): {"n": 101}, key("eu", 2): None, "no document": {"n": 3}})
    follower.append(**{key("us", 1): {"n": 4}})
    follower.run(upsert())
    follower.run(upsert())
    found = query(postgres, "SELECT region, id, n FROM orders ORDER BY region, id")
    assert found == [("eu", 1, 1), ("us", 1, 4)]
    (position,) = upsert().positions().values()
    assert (position.bad_records, position.end_offsets) == (3, follower.ends())
    letters = follower.letters("bad")
    assert [(k, v) for k, v, _ in letters] == [
        (key("us", 1).encode(), b'{"n": 100}'),
        (b"no document", b'{"n": 3}'),
        (key("eu", 1).encode(), b'{"n": 101}'),
    ]
    assert [reason.partition(" (")[0] for _, _, reason in letters] == [
        'new row for relation "orders" violates check constraint "orders_n_check"',
        "the key is not a JSON document of struct<region:string,id:int>; found 'no document'",
        'new row for relation "orders" violates check constraint "orders_n_check"',
    ]
