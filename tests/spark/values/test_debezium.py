"""Rows of Debezium's change events in JSON, as its documentation writes events."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from tests import debezium_types as types
from tests.log_place import log_in

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SOURCE = {"version": "3.0.0.Final", "ts_ms": 1559033904863, "lsn": 24023128, "table": "customers"}
ROW = "id int, name string, tags array<string>, photo binary, balance decimal(10,2)"
ANN = {"id": 1, "name": "Ann", "tags": ["a"], "photo": types.b64(b"p"), "balance": "fQ=="}
PLACEHOLDER = "__debezium_unavailable_value"


def event(op: str, after: Any, **more: Any) -> dict[str, Any]:
    return {"before": None, "after": after, "source": SOURCE, "op": op, "ts_ms": 7, **more}


def frame_of(spark: Any, *documents: Any) -> Any:
    texts = [None if each is None else json.dumps(each) for each in documents]
    values = [
        (n, None if text is None else bytearray(text.encode())) for n, text in enumerate(texts)
    ]
    return spark.createDataFrame(values, "place int, value binary")


def rows_of(spark: Any, row: str, *documents: Any, envelope: Any = "debezium") -> list[Any]:
    frame = frame_of(spark, *documents)
    found = kafkalog.value_columns(frame, json=row, envelope=envelope, bad_column="bad")
    return [each.asDict(recursive=True) for each in found.orderBy("place").drop("place").collect()]


def plain(value: Any) -> Any:
    """Return a moment with its time zone, as Spark's rows have it in that of this process."""
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value


@pytest.mark.parametrize("told", ["by comments", "by the event's schema"])
@pytest.mark.parametrize("table", ["POSTGRES", "MYSQL"])
def test_every_documented_type_has_its_value_in_each_form(
    spark: Any, table: str, told: str
) -> None:
    documented: list[types.Documented] = getattr(types, table)
    row, schema = types.row_of(documented), types.schema_of(documented)
    if told == "by comments":
        documents = [event("c", row), row | {"__deleted": "false"}, {"payload": event("u", row)}]
    else:
        documented = [each for each in documented if each.comment not in {"hex", "base64-url-safe"}]
        row, schema = types.row_of(documented), types.schema_of(documented)
        documents = [
            {"schema": types.envelope_schema(schema), "payload": event("r", row)},
            {"schema": schema, "payload": row},
        ]
    ddl = types.ddl(documented, with_comments=told == "by comments")
    expected = {each.database: each.expected for each in documented}
    for found in rows_of(spark, ddl, *documents):
        assert found.pop("bad") is None
        values = dict(zip(expected, found.values(), strict=True))
        for each in documented:
            if isinstance(each.expected, dt.datetime) and each.expected.tzinfo:
                values[each.database] = plain(values[each.database])
        assert values == expected


def test_an_event_gives_the_row_after_it_a_deletion_or_a_reason(spark: Any) -> None:
    ann = {"id": 1, "name": "Ann", "tags": ["a"], "photo": b"p", "balance": types.Decimal("1.25")}
    nothing = dict.fromkeys(ann)
    cases: list[tuple[Any, Any, str | None]] = [
        (event("r", ANN), ann, None),
        (event("c", ANN), ann, None),
        (event("u", ANN), ann, None),
        ({"schema": {"type": "struct"}, "payload": event("c", ANN)}, ann, None),
        ({"schema": None, "payload": ANN}, ann, None),
        ({**ANN, "__deleted": "false", "__op": "u"}, ann, None),
        (event("d", None, before=ANN), nothing, None),
        (None, nothing, None),
        ({**ANN, "__deleted": "true"}, nothing, None),
        ({**ANN, "__op": "d"}, nothing, None),
        ({**ANN, "__deleted": True}, nothing, None),
        ({**ANN, "__deleted": False}, ann, None),
        ({**ANN, "__op": "t"}, nothing, "the table was truncated (op t)"),
        ({**ANN, "__op": "m"}, nothing, "op m changes no row"),
        ({**ANN, "__deleted": 1}, nothing, "__deleted is 1 (expected true or false)"),
        ({"before": None, "op": "t", "source": SOURCE}, nothing, "the table was truncated (op t)"),
        ({"op": "m", "source": SOURCE, "message": {}}, nothing, "op m changes no row"),
        (event("c", None), nothing, "the event of op c has no row after the change"),
        ({"heartbeat": 1}, nothing, "the value is neither a change event nor a row"),
        (event("c", {"ID": 1}), nothing, "the row in the event has none of the columns"),
        (event("c", {}), nothing, "the row in the event has none of the columns"),
        ({"name": None}, nothing, None),
        (event("c", ANN | {"balance": "!"}), nothing, "the field balance does not fit its column"),
        (event("c", ANN | {"id": "x"}), nothing, "the value is not a JSON document"),
    ]
    found = rows_of(spark, ROW, *[document for document, _, _ in cases])
    for (document, row, reason), each in zip(cases, found, strict=True):
        bad = each.pop("bad")
        assert (each, bad is None) == (row, reason is None), (document, bad)
        assert reason is None or bad.startswith(reason), (document, bad)


@pytest.mark.parametrize("name", ["schema", "source", "transaction", "after", "payload", "op"])
def test_a_column_with_the_name_of_an_events_field_is_never_null_without_a_reason(
    spark: Any, name: str
) -> None:
    row = {"id": 1, name: "x"}
    documents = [event("c", row), {"payload": event("c", row)}, row, {"payload": row}, {"id": 2}]
    *wrapped, bare, unwrapped, without = rows_of(spark, f"id int, {name} string", *documents)
    assert wrapped == [{**row, "bad": None}] * 2
    assert bare["bad"]
    assert unwrapped["bad"]
    assert without == {"id": 2, name: None, "bad": None}


DECIMAL = f"{types.CONNECT}Decimal"
ZONED = "timestamp COMMENT 'io.debezium.time.ZonedTimestamp'"
MOMENT = dt.datetime(2018, 6, 20, 13, 37, 3, 123456, dt.UTC)
READINGS: list[tuple[str, Any, Any]] = [
    ("tinyint", -128, -128),
    ("tinyint", 200, None),
    ("array<tinyint>", [127, None], [127, None]),
    ("array<tinyint>", [200], None),
    (ZONED, "2018-06-20T13:37:03.1234560Z", MOMENT),
    (ZONED, "2018-06-20T13:37:03.1234567Z", None),
    (ZONED, "0000-06-20T13:37:03Z", None),
    ("date", "2018-02-28Z", dt.date(2018, 2, 28)),
    ("date", "0000-01-01", None),
    ("date", 2147483647, None),
    (f"decimal(10,2) COMMENT '{DECIMAL}'", 1250, types.Decimal("1250.00")),
    (f"decimal(10,2) COMMENT '{DECIMAL}'", "fQ==", types.Decimal("1.25")),
    ("decimal(10,2)", 1250, types.Decimal("1250.00")),
    ("decimal(10,2)", 1e7, types.Decimal("10000000.00")),
    ("decimal(10,2)", 1.25e-5, None),
    ("decimal(10,2)", True, None),
    ("decimal(10,2)", None, None),
    ("decimal(10,2) COMMENT 'string'", "1E+2", types.Decimal("100.00")),
    ("decimal(10,2) COMMENT 'string'", "0E-10", types.Decimal("0.00")),
    ("decimal(10,2) COMMENT 'string'", "1.234E+0", None),
]
"""What is declared of a column, a value, and what it is taken for; None if its record is bad."""


def test_nothing_is_cut_rounded_or_taken_for_another_value(spark: Any) -> None:
    row = ", ".join(f"c{n} {column}" for n, (column, _, _) in enumerate(READINGS))
    documents = [event("c", {f"c{n}": value}) for n, (_, value, _) in enumerate(READINGS)]
    found = rows_of(spark, row, *documents)
    for n, (each, (column, value, expected)) in enumerate(zip(found, READINGS, strict=True)):
        is_bad = expected is None and value is not None
        assert (plain(each[f"c{n}"]), each["bad"] is not None) == (expected, is_bad), (column, each)


def test_the_events_schema_counts_more_than_a_comment(spark: Any) -> None:
    row = f"""at timestamp_ntz COMMENT 'io.debezium.time.MicroTimestamp',
        n decimal(10,0) COMMENT '{DECIMAL}', b binary COMMENT 'hex'"""
    millis = {"field": "at", "type": "int64", "name": "io.debezium.time.Timestamp"}
    text, bare = {"field": "n", "type": "string"}, {"field": "b", "type": "bytes"}
    second = {"field": "at", "type": "int64"}
    found = rows_of(
        spark,
        row,
        {"at": 1000000, "n": "BOI=", "b": "00ff"},
        {"schema": {"fields": [millis, text, bare]}, "payload": {"at": 1000, "n": "1250",
         "b": "AP8="}},
        {"schema": {"fields": [second, {"field": "b", "type": "string"}]},
         "payload": {"at": 1000000, "n": "BOI=", "b": "00ff"}},
    )  # fmt: skip
    at = dt.datetime(1970, 1, 1, 0, 0, 1)
    assert found == [{"at": at, "n": 1250, "b": b"\0\xff", "bad": None}] * 3


@pytest.mark.parametrize("kind", ["array<timestamp>", "struct<n decimal(5,2)>"])
def test_a_value_inside_of_another_that_would_be_guessed_is_refused(spark: Any, kind: str) -> None:
    with pytest.raises(InvalidInputError, match="the column a has a "):
        rows_of(spark, f"a {kind}", event("c", {"a": None}))


def test_a_number_that_may_be_text_or_bytes_is_bad_unless_its_column_says_which(
    spark: Any,
) -> None:
    documents = [event("c", {"n": text}) for text in ("1250", "125", "12.50", "fQ==")]
    for comment, expected in {
        "": [None, 125, None, 125],
        "COMMENT 'string'": [1250, 125, None, None],
        "COMMENT 'org.apache.kafka.connect.data.Decimal'": [-2658700, None, None, 125],
    }.items():
        found = rows_of(spark, f"n decimal(10,0) {comment}", *documents)
        values = [None if each["n"] is None else int(each["n"]) for each in found]
        assert values == expected, comment
        assert [each["bad"] is None for each in found] == [n is not None for n in expected]


def test_a_value_that_the_database_did_not_give_makes_the_record_bad(spark: Any) -> None:
    placeholders = {
        "name": PLACEHOLDER,
        "tags": [PLACEHOLDER],
        "photo": types.b64(PLACEHOLDER.encode()),
    }
    documents = [event("u", ANN | {name: text}) for name, text in placeholders.items()]
    found = rows_of(spark, ROW, *documents, event("d", None), ANN | {"name": PLACEHOLDER})
    assert [each["id"] for each in found] == [None] * 5
    for name, each in zip(placeholders, found, strict=False):
        assert each["bad"].startswith(f"the event has no value of {name}, which is large")
    assert found[3]["bad"] is None
    own = kafkalog.Debezium(placeholder="n/a")
    found = rows_of(spark, ROW, event("u", ANN | {"name": "n/a"}), documents[0], envelope=own)
    assert found[0]["bad"] is not None
    assert found[1]["name"] == PLACEHOLDER


def test_fields_without_a_value_are_named_on_request(spark: Any) -> None:
    envelope = kafkalog.Debezium(unavailable_column="missing")
    documents = [event("u", ANN | {"name": PLACEHOLDER, "tags": [PLACEHOLDER]}), event("u", ANN)]
    found = rows_of(spark, ROW, *documents, envelope=envelope)
    assert [(each["name"], each["missing"], each["bad"]) for each in found] == [
        (None, ["name", "tags"], None),
        ("Ann", None, None),
    ]


def test_fields_of_the_event_become_columns_on_request(spark: Any) -> None:
    asked = ["op", "lsn", "source.ts_ms", "table", "ts_ms", "transaction.id"]
    envelope = kafkalog.Debezium(add_fields=asked)
    unwrapped = {"__op": "u", "__lsn": 5, "__source_ts_ms": 6, "__table": "t", "__ts_ms": 8}
    whole = event("c", ANN, transaction={"id": "571:9", "total_order": 1})
    found = rows_of(spark, ROW, whole, ANN | unwrapped, envelope=envelope)
    names = ["__op", "__lsn", "__source_ts_ms", "__table", "__ts_ms", "__transaction_id"]
    assert [[each[name] for name in names] for each in found] == [
        ["c", 24023128, 1559033904863, "customers", 7, "571:9"],
        ["u", 5, 6, "t", 8, None],
    ]
    with pytest.raises(InvalidInputError, match=r"add_fields has 'before\.name'"):
        kafkalog.Debezium(add_fields=["before.name"])


def test_a_row_may_have_fields_with_the_names_of_an_events(spark: Any) -> None:
    (found,) = rows_of(spark, "op int, after string", event("c", {"op": 3, "after": "x"}))
    assert (found["op"], found["after"], found["bad"]) == (3, "x", None)


def test_updates_say_which_event_is_a_deletion(spark: Any, tmp_path: Path) -> None:
    records: list[tuple[str, str | None]] = [
        ("1", json.dumps(event("c", ANN))),
        ("1", json.dumps(event("d", None, before=ANN))),
        ("1", None),
        ("2", json.dumps(event("u", ANN | {"id": 2}))),
    ]
    with kafkalog.open(log_in(tmp_path)) as log:
        log.create_topic("t")
        log.append("t", records)
    table = kafkalog.KTable(spark, log_in(tmp_path), "t")
    changes = table.updates(json=ROW, envelope="debezium")
    writer = changes.writeStream.format("memory").queryName("kl_updates")
    writer.trigger(availableNow=True).start().awaitTermination()
    found = spark.sql("SELECT offset, id, deleted FROM kl_updates ORDER BY offset").collect()
    assert [*map(tuple, found)] == [(0, 1, False), (1, None, True), (2, None, True), (3, 2, False)]


def test_keys_lose_their_schema_and_have_their_types(spark: Any) -> None:
    schema = {"type": "struct", "fields": [{"field": "at", "type": "int64",
              "name": "io.debezium.time.Timestamp"}]}  # fmt: skip
    keys = [{"schema": schema, "payload": {"at": 1000}}, {"at": 1000}]
    rows = [(bytearray(json.dumps(key).encode()), None, n) for n, key in enumerate(keys)]
    frame = spark.createDataFrame(rows, "key binary, value binary, n int")
    found = kafkalog.value_columns(
        frame,
        json="name string",
        key_json="at timestamp_ntz",
        envelope="debezium",
        bad_column="bad",
    )
    first, second = found.orderBy("n").collect()
    assert (first["at"], first["bad"]) == (dt.datetime(1970, 1, 1, 0, 0, 1), None)
    assert second["bad"].startswith("the field at does not fit its column (found 1000")
