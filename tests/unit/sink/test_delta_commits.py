"""What a commit of DeltaUpsert says, names, and which types keep values; without Spark."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert import Batch, DeltaUpsert, Position
from kafkalog.sink.upsert.delta.columns import _keeps_values, delta_type
from kafkalog.sink.upsert.delta.commits import UpsertCommit, last_commit
from kafkalog.sink.upsert.delta.upsert import _in_sql, _reason

POSITIONS = {"q": Position(3, {"t": {"0": 9}}, 1000), "r": Position(2, {}, 7, other_ends="1-a")}
COMMIT = UpsertCommit(7, POSITIONS, ("region", "id"))


class History:
    """A session whose only table has this user metadata, oldest first."""

    def __init__(self, *metadata: str | None) -> None:
        rows = [SimpleNamespace(version=at, userMetadata=text) for at, text in enumerate(metadata)]
        self.rows = rows[::-1]

    def sql(self, statement: str) -> Any:
        asked = re.fullmatch(r"DESCRIBE HISTORY t LIMIT (\d+)", statement)
        assert asked is not None
        found = SimpleNamespace(collect=lambda: self.rows[: int(asked[1])])
        return SimpleNamespace(select=lambda *_: found)


@pytest.mark.parametrize("newer", [0, 9, 10, 250])
def test_the_last_commit_is_found_below_those_of_others(newer: int) -> None:
    older = UpsertCommit(6, {}).to_json()
    others = [None, "by hand", "[1]", '{"commit": 1}', "{"] * (newer // 5 + 1)
    session: Any = History(None, older, COMMIT.to_json(), *others[:newer])
    assert last_commit(session, "t") == COMMIT


def test_without_an_upsert_in_the_history_the_tables_version_counts() -> None:
    session: Any = History(*[None] * 12)
    assert last_commit(session, "t") == UpsertCommit(11, {})


def test_a_commit_of_a_build_that_recorded_no_key_is_refused_in_a_sentence() -> None:
    text = '{"format": "kafkalog/1", "commit": 3, "positions": {}}'
    session: Any = History(None, text, "by hand")
    words = r"^version 1: another build .* found commit, format, positions\)\. Go on"
    with pytest.raises(StorageError, match=words):
        last_commit(session, "t")


def test_a_commit_of_an_unknown_format_is_refused_and_not_passed_over() -> None:
    session: Any = History(COMMIT.to_json(), '{"format": "kafkalog/2"}', "by hand")
    with pytest.raises(StorageError, match=r"^version 1: .* kafkalog/1, found kafkalog/2\)\."):
        last_commit(session, "t")


def test_an_upsert_with_another_key_than_the_last_commit_is_refused() -> None:
    upsert = DeltaUpsert("t", schema="region string, id int, n int", key="id")
    words = r"another key than the upsert's \(expected id, found region and id\)\. If .* drop the"
    rows: Any = SimpleNamespace(spark=None)
    with pytest.raises(InvalidInputError, match=words):
        upsert._commit(Batch("q", 4, "run", {"t": {"0": 10}}, 1000), rows, COMMIT)
    DeltaUpsert("t", schema="ID int, Region int", key=["ID", "Region"])._check_key(COMMIT)


@pytest.mark.parametrize(
    ("given", "in_sql"),
    [
        ("stock", "`stock`"),
        ("my table", "`my table`"),
        ("main.shop-1.stock", "`main`.`shop-1`.`stock`"),
        ("shop.`a.``b`", "`shop`.`a.``b`"),
    ],
)
def test_each_part_of_a_name_is_in_quotes(given: str, in_sql: str) -> None:
    assert _in_sql(given) == in_sql


@pytest.mark.parametrize("given", ["a..b", ".a", "a`b", "`a", "``", "a.`b`c"])
def test_a_name_with_broken_parts_is_refused(given: str) -> None:
    with pytest.raises(InvalidInputError, match=r"is not a table name \(expected a path"):
        DeltaUpsert(given)


@pytest.mark.parametrize(
    ("given", "wanted", "keeps"),
    [
        ("long", "short", True),  # Spark refuses what does not fit
        ("integer", "decimal(9,2)", True),
        ("integer", "double", True),
        ("long", "double", False),
        ("double", "float", False),
        ("decimal(9,2)", "decimal(5,2)", True),
        ("decimal(9,2)", "decimal(9,1)", False),
        ("timestamp", "date", False),
        ("timestamp", "timestamp_ntz", False),
        ("string", "integer", False),
        ("integer", "string", False),
        ("array<int>", "array<int>", True),
        ("array<int>", "array<string>", False),
    ],
)
def test_a_type_keeps_values_or_is_refused(given: str, wanted: str, keeps: bool) -> None:
    assert _keeps_values(kind(given), kind(wanted)) is keeps


def test_delta_has_no_type_for_intervals_and_variants_however_deep() -> None:
    for wrong in (types.DayTimeIntervalType(), types.VariantType()):
        nested = types.StructType([types.StructField("a", types.ArrayType(wrong))])
        assert delta_type(types.MapType(types.StringType(), nested)) is None
    plain = types.ArrayType(types.DecimalType(9, 2), containsNull=False)
    assert delta_type(plain) == types.ArrayType(types.DecimalType(9, 2))


def test_the_innermost_error_is_the_reason() -> None:
    fault = Exception(
        "An error occurred while calling o43.sql.\n: org.apache.spark.SparkException: "
        "[TASK_WRITE_FAILED] Task failed. SQLSTATE: 58030\n\tat org.apache.X.y(X.scala:1)\n"
        "Caused by: io.delta.Z: [DELTA_VIOLATE_CONSTRAINT] CHECK small violated:\n - n : 1\n"
        "\tat org.apache.X.y(X.scala:2)\n\t... 1 more"
    )
    assert _reason(fault) == "[DELTA_VIOLATE_CONSTRAINT] CHECK small violated: - n : 1"
    assert _reason(Exception("no\nSpark")) == "no Spark"


def kind(name: str) -> types.DataType:
    """Return a type by its name."""
    if name.startswith("decimal"):
        precision, scale = re.findall(r"\d+", name)
        return types.DecimalType(int(precision), int(scale))
    if name.startswith("array"):
        return types.ArrayType(kind({"int": "integer"}.get(name[6:-1], name[6:-1])))
    named: dict[str, types.DataType] = {
        each.typeName(): each
        for each in (
            *(types.ShortType(), types.IntegerType(), types.LongType(), types.FloatType()),
            *(types.DoubleType(), types.StringType(), types.DateType(), types.TimestampType()),
            types.TimestampNTZType(),
        )
    }
    return named[name]
