"""Rules of change events in Avro, and of written values; `test_framed_values` runs them."""

from __future__ import annotations

import base64
import datetime as dt
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from examples import rescued_registry
from kafkalog.errors import InvalidInputError, SchemaNotFoundError
from kafkalog.sink.upsert import SQLiteUpsert
from tests import debezium_types as types
from tests.spark.values import values_session
from tests.spark.values.values_session import framed

spark = values_session.spark
PLACEHOLDER = "__debezium_unavailable_value"
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
DIGITS = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
LITERALS = {
    "boolean": "boolean",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "bytes",
}


def avro_type(each: types.Documented, place: int) -> Any:
    """Return a type as Confluent's AvroConverter makes it of Connect's."""
    named = {"connect.version": 1, "connect.name": each.name} if each.name else {}
    if each.scale is not None:
        precision = int(each.column.partition("(")[2].partition(",")[0])
        return {"type": "bytes", "logicalType": "decimal", "precision": precision,
                "scale": each.scale, "connect.parameters": {"scale": str(each.scale)},
                **named}  # fmt: skip
    logical = {"Date": "date", "Time": "time-millis", "Timestamp": "timestamp-millis"}
    if each.name and each.name.startswith(types.CONNECT):
        named["logicalType"] = logical[each.name.removeprefix(types.CONNECT)]
    if each.literal == "struct":
        return {**_type_of(each.written, f"S{place}"), **named}
    if each.literal == "array":
        kind = each.column.removeprefix("array<").removesuffix(">")
        return {"type": "array", "items": ["null", kind], **named}
    if each.literal == "map":
        return {"type": "map", "values": "string"}
    kind = LITERALS[each.literal]
    return {"type": kind, **named} if named else kind


def avro_value(each: types.Documented) -> Any:
    if each.scale is not None:
        return each.expected
    if each.literal == "bytes":
        return base64.b64decode(each.written)
    if each.literal == "struct":
        return _value_of(each.written)
    return each.written


def _type_of(value: Any, name: str) -> Any:
    """Return the type of a part of a struct; a list is a map's, whose keys are no text."""
    if isinstance(value, list):
        value = {"key": value[0][0], "value": value[0][1]}
        return {"type": "array", "items": _type_of(value, name)}
    if isinstance(value, dict):
        fields = [
            {"name": part, "type": ["null", _type_of(each, f"{name}_{part}")]}
            for part, each in value.items()
        ]
        return {"type": "record", "name": name, "fields": fields}
    return {int: "int", float: "double", str: "bytes", type(None): "int"}[type(value)]


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return [{"key": key, "value": each} for key, each in value]
    if isinstance(value, dict):
        return {part: _value_of(each) for part, each in value.items()}
    return base64.b64decode(value) if isinstance(value, str) else value


def event_schema(row: dict[str, Any]) -> dict[str, Any]:
    source = {"type": "record", "name": "Source", "namespace": "io.debezium.connector.postgresql",
              "fields": [{"name": "lsn", "type": ["null", "long"], "default": None},
                         {"name": "ts_ms", "type": "long"}]}  # fmt: skip
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": "s.public.t",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", row["name"]], "default": None},
            {"name": "source", "type": source},
            {"name": "op", "type": "string"},
            {"name": "ts_ms", "type": ["null", "long"], "default": None},
        ],
        "connect.name": "s.public.t.Envelope",
    }


def event(op: str, after: Any, **more: Any) -> dict[str, Any]:
    source = {"lsn": 24023128, "ts_ms": 1559033904863}
    return {"before": None, "after": after, "source": source, "op": op, "ts_ms": 7, **more}


def decoded(spark: Any, schema: Any, *values: Any, envelope: Any = "debezium") -> list[Any]:
    registry = kafkalog.SchemaRegistry(schemas={7: json.dumps(schema)})
    rows = [
        (n, None if v is None else bytearray(framed(7, schema, v))) for n, v in enumerate(values)
    ]
    frame = spark.createDataFrame(rows, "n int, value binary")
    found = kafkalog.value_columns(frame, avro=registry, envelope=envelope, bad_column="bad")
    return [each.asDict(recursive=True) for each in found.orderBy("n").drop("n").collect()]


@pytest.mark.parametrize("table", ["POSTGRES", "MYSQL"])
def test_every_documented_type_has_its_value(spark: Any, table: str) -> None:
    documented: list[types.Documented] = getattr(types, table)
    fields = [
        {"name": types.column_of(n), "type": ["null", avro_type(each, n)], "default": None}
        for n, each in enumerate(documented)
    ]
    row = {"type": "record", "name": "Value", "fields": fields}
    value = {types.column_of(n): avro_value(each) for n, each in enumerate(documented)}
    expected = {
        each.database: each.expected if each.avro_expected is None else each.avro_expected
        for each in documented
    }
    for schema, written in ((event_schema(row), event("c", value)), (row, value)):
        (found,) = decoded(spark, schema, written)
        assert found.pop("bad") is None
        values = dict(zip(expected, found.values(), strict=True))
        for name, each in values.items():
            if isinstance(expected[name], dt.datetime) and expected[name].tzinfo:
                values[name] = each.astimezone(dt.UTC)
        assert values == expected


ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "photo", "type": ["null", "bytes"], "default": None},
    ],
}
ANN = {"id": 1, "name": "Ann", "photo": b"p"}


def test_an_event_gives_the_row_after_it_a_deletion_or_a_reason(spark: Any) -> None:
    nothing = dict.fromkeys(ANN)
    cases: list[tuple[Any, Any, str | None]] = [
        (event("r", ANN), ANN, None),
        (event("u", ANN), ANN, None),
        (event("d", None, before=ANN), nothing, None),
        (None, nothing, None),
        (event("t", None), nothing, "the table was truncated"),
        (event("u", ANN | {"name": PLACEHOLDER}), nothing, "the event has no value of name,"),
        (
            event("u", ANN | {"photo": PLACEHOLDER.encode()}),
            nothing,
            "the event has no value of ph",
        ),
    ]
    found = decoded(spark, event_schema(ROW), *[document for document, _, _ in cases])
    for (document, row, reason), each in zip(cases, found, strict=True):
        bad = each.pop("bad")
        assert (each, bad is None) == (row, reason is None), (document, bad)
        assert reason is None or bad.startswith(reason)


def test_a_decimal_of_unknown_precision_has_the_digits_of_sparks(spark: Any) -> None:
    """AvroConverter writes the precision 64 where Connect has none, as for PostgreSQL's money."""
    money = {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2,
             "connect.name": f"{types.CONNECT}Decimal"}  # fmt: skip
    row = {"type": "record", "name": "Value", "fields": [{"name": "cash", "type": money}]}
    events = [event("c", {"cash": types.Decimal(text)}) for text in ("9.99", "1" * 37 + ".00")]
    found = decoded(spark, event_schema(row), *events)
    assert found[0] == {"cash": types.Decimal("9.99"), "bad": None}
    assert found[1]["cash"] is None
    assert found[1]["bad"] is not None


def test_a_table_leaves_out_what_an_event_deletes(spark: Any, tmp_path: Path) -> None:
    schema = event_schema(ROW)
    registry = kafkalog.SchemaRegistry(schemas={7: json.dumps(schema)})
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.append("t", [("1", framed(7, schema, event("c", ANN))),
                         ("2", framed(7, schema, event("d", None)))])  # fmt: skip
    table = kafkalog.KTable(spark, tmp_path / "log", "t").df(avro=registry, envelope="debezium")
    assert [(row.key, row.name) for row in table.collect()] == [(b"1", "Ann")]


def test_an_unwrapped_row_may_be_marked_as_deleted(spark: Any) -> None:
    mark = {"name": "__deleted", "type": ["null", "string"], "default": None}
    op = {"name": "__op", "type": "string", "default": "u"}
    schema = ROW | {"fields": [*ROW["fields"], mark, op]}  # type: ignore[misc]
    marks = [{"__deleted": "false"}, {"__deleted": "true"}, {"__op": "t"}, {"__deleted": "1"}]
    found = decoded(spark, schema, *[ANN | {"__op": "u"} | each for each in marks])
    assert [each["id"] for each in found] == [1, None, None, None]
    assert [each["bad"] is None for each in found] == [True, True, False, False]
    assert "__deleted" not in found[0]


def test_fields_of_the_event_become_columns_on_request(spark: Any) -> None:
    envelope = kafkalog.Debezium(add_fields=["op", "source.ts_ms", "lsn"])
    (found,) = decoded(spark, event_schema(ROW), event("c", ANN), envelope=envelope)
    assert (found["__op"], found["__source_ts_ms"], found["__lsn"]) == (
        "c",
        1559033904863,
        24023128,
    )


def test_nothing_is_cut_or_outside_of_sparks_years(spark: Any) -> None:
    zoned = {"type": "string", "connect.name": "io.debezium.time.ZonedTimestamp"}
    days = {"type": "int", "logicalType": "date", "connect.name": f"{types.CONNECT}Date"}
    optional = [
        {"name": name, "type": ["null", kind], "default": None}
        for name, kind in (("at", zoned), ("day", days))
    ]
    schema = {"type": "record", "name": "Value", "fields": optional}
    as_days = json.loads(json.dumps(schema).replace(', "logicalType": "date"', ""))
    rows: list[dict[str, Any]] = [
        *({"at": f"2018-06-20T13:37:03.{digits}Z"} for digits in ("1234560", "1234567")),
        *({"day": number} for number in (2932896, 2147483647)),
        {"at": None},
    ]
    values = [framed(7, as_days, {"at": None, "day": None, **row}) for row in rows]
    frame = spark.createDataFrame([(bytearray(value),) for value in values], "value binary")
    found = kafkalog.value_columns(
        frame, avro=values_session.given({7: schema}), envelope="debezium", bad_column="bad"
    )
    reasons = [row.bad for row in found.collect()]
    assert [reason is None for reason in reasons] == [True, False, True, False, True]


def test_a_key_that_is_not_a_record_is_one_column(spark: Any) -> None:
    value, key = framed(7, ROW, ANN), framed(3, "long", 5)
    frame = spark.createDataFrame([(bytearray(key), bytearray(value))], "key binary, value binary")
    found = kafkalog.value_columns(
        frame,
        avro=values_session.given({7: ROW}),
        key_avro=values_session.given({3: "long"}),
        envelope="debezium",
    )
    assert [(row.key, row.id) for row in found.collect()] == [(5, 1)]
    with pytest.raises(InvalidInputError, match="expected the Avro schema of change events or"):
        decoded(spark, "string", "x")
    unknown = kafkalog.Debezium(add_fields=["source.scn"])
    with pytest.raises(InvalidInputError, match=r"add_fields has 'source\.scn', which the events"):
        decoded(spark, event_schema(ROW), event("c", ANN), envelope=unknown)


def test_an_upsert_follows_a_table_by_its_events(spark: Any, tmp_path: Path) -> None:
    key = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}
    schema = event_schema(ROW)
    registry = kafkalog.SchemaRegistry(schemas={7: json.dumps(schema)})
    keys = kafkalog.SchemaRegistry(schemas={3: json.dumps(key)})

    def record(number: int, value: Any) -> tuple[bytes, bytes | None]:
        content = None if value is None else framed(7, schema, value)
        return framed(3, key, {"id": number}), content

    path = str(tmp_path / "log")
    with kafkalog.open(path) as log:
        log.create_topic("t")
        log.append("t", [
            record(1, event("r", ANN)), record(2, event("c", ANN | {"id": 2})),
            record(1, event("u", ANN | {"name": "Anna"})), record(2, event("d", None)),
            record(2, None), record(3, event("c", ANN | {"id": 3})), record(3, event("d", None)),
        ])  # fmt: skip
    upsert = SQLiteUpsert(
        str(tmp_path / "t.db"), "t", avro=registry, key_avro=keys, envelope="debezium",
        checkpoint=str(tmp_path / "checkpoint"),
    )  # fmt: skip
    stream = spark.readStream.format("kafkalog").options(path=path, subscribe="t")
    frame = stream.option("startingOffsets", "earliest").load()
    writer = frame.writeStream.foreachBatch(upsert).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    with sqlite3.connect(tmp_path / "t.db") as base:
        assert base.execute("SELECT id, name FROM t").fetchall() == [(1, "Anna")]
    base.close()


def test_rows_become_framed_values_that_avro_reads(spark: Any) -> None:
    registry = kafkalog.SchemaRegistry(schemas={300: json.dumps(ROW)})
    rows = [(b"k1", "Ann", 1, False), (b"k2", None, 2, False), (b"k3", "Cid", 3, True)]
    frame = spark.createDataFrame(rows, "key binary, NAME string, id int, gone boolean")
    written = kafkalog.value_bytes(frame, avro=registry, subject="t-value", deleted="gone")
    assert written.columns == ["key", "value"]
    values = {bytes(row.key): row.value and bytes(row.value) for row in written.collect()}
    assert values == {
        b"k1": framed(300, ROW, {"id": 1, "name": "Ann", "photo": None}),
        b"k2": framed(300, ROW, {"id": 2, "name": None, "photo": None}),
        b"k3": None,
    }
    back = kafkalog.value_columns(written, avro=registry).orderBy("key").collect()
    assert [(row.id, row.name) for row in back] == [(1, "Ann"), (2, None), (None, None)]


def test_columns_that_are_not_the_schemas_fields_are_refused(spark: Any) -> None:
    registry = kafkalog.SchemaRegistry(schemas={300: json.dumps(ROW)})

    def write(ddl: str, **more: Any) -> Any:
        frame = spark.createDataFrame([], ddl)
        return kafkalog.value_bytes(frame, avro=registry, subject="t-value", **more)

    with pytest.raises(InvalidInputError, match="the schema 300 has no field 'size'"):
        write("id int, size int")
    with pytest.raises(InvalidInputError, match="there is no column 'id'"):
        write("name string")
    with pytest.raises(SchemaNotFoundError):
        write("id int", schema=8)
    with pytest.raises(InvalidInputError, match="Use the registry's URL"):
        write("id int", schema=json.dumps(ROW))


def test_a_null_that_the_schema_does_not_allow_fails_the_query(spark: Any) -> None:
    registry = kafkalog.SchemaRegistry(schemas={300: json.dumps(ROW)})
    frame = spark.createDataFrame([(None, "x")], "id int, name string")
    written = kafkalog.value_bytes(frame, avro=registry, subject="t-value")
    with pytest.raises(Exception, match="the field id is null, and the schema 300 has no null"):
        written.collect()


@pytest.mark.parametrize(
    ("kind", "column", "problem"),
    [
        ("int", "5L", "the column n is bigint .expected int,"),
        ("int", "5S", None),
        ("float", "0.1D", "the column n is double .expected float,"),
        (
            "long",
            "timestamp'2020-01-01 00:00:00.123'",
            "the column n is timestamp .expected bigint,",
        ),
        (["null", "int", "string"], "1", "the column n is int .expected struct<member0:int,"),
        ({"type": "array", "items": ["null", "long"]}, "array(1L, null)", None),
        ({"type": "array", "items": "int"}, "array(1L)", "the column n is array<bigint>"),
        (MILLIS, "timestamp'2020-01-01 00:00:00.123'", None),
        (["null", MILLIS], "cast(null as timestamp)", None),
        (MILLIS, "timestamp'2020-01-01 00:00:00.1234'", "the field n has microseconds, and the"),
        (DIGITS, "1.25BD", "the column n is decimal.3,2. .expected decimal.10,2.,"),
        (DIGITS, "cast(1.25 as decimal(10,2))", None),
    ],
)
def test_a_value_is_written_as_it_is_or_refused(
    spark: Any, kind: Any, column: str, problem: str | None
) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": kind}]}
    registry = values_session.given({300: schema})
    rows = spark.sql(f"SELECT {column} AS n")
    if problem is not None:
        with pytest.raises(Exception, match=problem):
            kafkalog.value_bytes(rows, avro=registry, subject="t-value").collect()
        return
    written = kafkalog.value_bytes(rows, avro=registry, subject="t-value")
    back = kafkalog.value_columns(written, avro=registry)
    assert back.collect() == rows.collect()


def test_the_example_makes_a_table_of_a_disk_without_broker_and_registry(
    spark: Any, tmp_path: Path
) -> None:
    assert rescued_registry.run(spark, tmp_path) == ["1 Anna 2017-06-20"]
