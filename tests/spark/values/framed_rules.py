"""Rules of framed values, compared with fastavro; `test_framed_values` runs them."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import fastavro
import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from tests.log_place import log_in
from tests.spark.sink.test_spark_writes import error_of, finish
from tests.spark.values.values_session import (
    Subjects,
    body,
    copied,
    frame_of,
    framed,
    given,
    log_of,
    record,
    registry_of,
    spark,  # noqa: F401 - a fixture
    values_of,
)
from tests.unit.values.test_registry_server import Answers

MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
DATE = {"type": "int", "logicalType": "date"}
ADDRESS = record("Address", ("street", "string"), {"name": "n", "type": "int", "default": 7})
LEVEL = {"type": "enum", "name": "Level", "symbols": ["LOW", "HIGH"], "default": "LOW"}
AT = dt.datetime(2024, 11, 3, 5, 30, 0, 123456, dt.UTC)
KINDS: dict[str, tuple[Any, Any, list[Any]]] = {
    "int": ("int", 5, [0, -1, 2**31 - 1]),
    "long": ("long", -5, [0, 2**62, -(2**63)]),
    "float": ("float", 0.5, [1.5, -0.25]),
    "double": ("double", 0.1, [1e300, -2.5]),
    "string": ("string", "none", ["", "ü", "long text " * 9]),
    "bytes": ("bytes", "\u00ff", [b"", b"\0\xff"]),
    "boolean": ("boolean", True, [True, False]),
    "optional": (["null", "long"], None, [None, 3]),
    "either": (["string", "long"], "s", ["x", 9]),
    "enum": (LEVEL, "HIGH", ["LOW", "HIGH"]),
    "fixed": ({"type": "fixed", "name": "Four", "size": 4}, "abcd", [b"wxyz"]),
    "decimal": (MONEY, "\u0001", [decimal.Decimal("-7.25"), decimal.Decimal("99999999.99")]),
    "date": (
        {"type": "int", "logicalType": "date"},
        0,
        [dt.date(1969, 1, 2), dt.date(2024, 2, 29)],
    ),
    "at": (MICROS, 0, [AT, dt.datetime(1960, 1, 1, 0, 0, 0, 1, dt.UTC)]),
    "local": (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        0,
        [dt.datetime(2024, 11, 3, 1, 30, 0, 5)],
    ),
    "list": ({"type": "array", "items": ["null", "int"]}, [], [[], [1, None]]),
    "map": ({"type": "map", "values": "long"}, {}, [{}, {"a": 1}]),
    "nested": (ADDRESS, {"street": "s", "n": 1}, [{"street": "Elm", "n": 3}]),
}
"""By name: a type, a default as JSON, and values."""
WIDER = {"int": "long", "long": "double", "float": "double", "string": "bytes"}


def drawn_schemas(dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Return versions of one record, each made from the one before by a compatible change."""
    names = dice.sample(list(KINDS), 8)
    fields = [{"name": f"{name}_", "type": KINDS[name][0], "kind": name} for name in names]
    versions = []
    for number in range(count):
        versions.append(record("Row", *copied(fields), namespace="shop", doc=str(number)))
        change = dice.randrange(5)
        if change == 0:
            name = dice.choice(list(KINDS))
            kind, default, _ = KINDS[name]
            if not any(each["kind"] == name for each in fields):
                added = {"name": f"{name}_", "type": kind, "default": default, "kind": name}
                fields.insert(dice.randrange(len(fields)), added)
        elif change == 1 and len(fields) > 3:
            gone = fields[dice.randrange(len(fields))]
            if "default" in gone:
                fields.remove(gone)
        elif change == 2:
            dice.shuffle(fields)
        elif change == 3:
            old = dice.choice(fields)
            old["aliases"] = [old["name"], *old.get("aliases", [])]
            old["name"] = f"{old['name']}{number}"
        else:
            wide = dice.choice(fields)
            if isinstance(wide["type"], str) and wide["type"] in WIDER and "default" not in wide:
                wide["type"] = WIDER[wide["type"]]
    return versions


def value_of(dice: random.Random, field: dict[str, Any]) -> Any:
    value = dice.choice(KINDS[field["kind"]][2])
    if field["type"] == "bytes" and isinstance(value, str):
        return value.encode()
    return float(value) if field["type"] == "double" else value


def plain(value: Any) -> Any:
    """Return a value of Spark's as fastavro has it; of a union of types the one that is there."""
    if hasattr(value, "asDict"):
        fields = value.asDict()
        if all(name.startswith("member") for name in fields):
            return next((plain(each) for each in fields.values() if each is not None), None)
        return {name: plain(each) for name, each in fields.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return bytes(value) if isinstance(value, bytearray) else value


def utc(value: Any) -> Any:
    """Return an instant as Spark's rows have it: in local time, without a zone."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone().replace(tzinfo=None)
    return value


@pytest.mark.parametrize("seed", range(3))
def test_each_value_is_decoded_with_its_writers_schema_as_fastavro_does(
    spark: Any,  # noqa: F811
    seed: int,
) -> None:
    dice = random.Random(seed)
    schemas = dict(enumerate(drawn_schemas(dice, 12), start=100))
    reader = schemas[max(schemas)]
    rows = []
    for number, schema in schemas.items():
        for _ in range(12):
            value = {field["name"]: value_of(dice, field) for field in schema["fields"]}
            rows.append((number, body(schema, value)))
    expected = []
    for number, each in rows:
        writer = fastavro.parse_schema(copied(schemas[number]))
        read = fastavro.schemaless_reader(io.BytesIO(each), writer, copied(reader))
        expected.append({name: utc(value) for name, value in read.items()})
    values = [b"\0" + number.to_bytes(4) + each for number, each in rows]
    frame = kafkalog.value_columns(values_of(spark, *values), avro=given(schemas), bad_column="why")
    found = [row.asDict() for row in frame.orderBy("offset").collect()]
    assert [row["why"] for row in found] == [None] * len(rows)
    names = [field["name"] for field in reader["fields"]]
    assert [{name: plain(row[name]) for name in names} for row in found] == expected


def test_a_value_is_bad_unless_it_is_framed_and_ends_where_its_schema_does(spark: Any) -> None:  # noqa: F811
    nothing = record("Row", ("a", ["null", "int"]), ("b", ["null", "string"]))
    other = record("Other", ("a", ["null", "int"]))
    registry = given({1: other, 2: nothing})
    empty = body(nothing, {"a": None, "b": None})
    values = [
        *(b"\0\0\0\0\x02" + empty, None, empty, b"\0\0\0\0\x02" + empty[:-1], b"\0\0\0\0\x02"),
        *(b"\0\0\0\0\x02" + empty + b"\0", b"\0\0\0\0\x09" + empty, framed(1, other, {"a": 1})),
    ]
    words = [
        *(None, None, "is not framed", "is not Avro of its schema 2", "is not Avro of its schema"),
        *("is not Avro of its schema 2", "has the schema id 9", "of Other, expected Row"),
    ]
    frame = values_of(spark, *values)
    told = kafkalog.value_columns(frame, avro=registry, bad_column="why").orderBy("offset")
    for row, word in zip(told.collect(), words, strict=True):
        assert row.why is None if word is None else word in row.why, row
        assert (row.a, row.b) == (None, None)
    failed = kafkalog.value_columns(frame, avro=registry)
    assert "t-0 offset 2: the value is not framed" in error_of(failed.where("offset < 3").collect)
    lenient = kafkalog.value_columns(frame, avro=registry, options={"mode": "permissive"})
    assert {(row.a, row.b) for row in lenient.collect()} == {(None, None)}


@pytest.mark.parametrize(
    ("writer", "reader", "words"),
    [
        (MONEY, {**MONEY, "scale": 3}, r"schema 1 .*x is written as decimal\(10,2\) and read as"),
        (MONEY, {**MONEY, "precision": 9}, r"read as decimal\(9,2\)"),
        (MILLIS, MICROS, "x is written as timestamp-millis and read as timestamp-micros"),
        (["null", MILLIS], {"type": "array", "items": MICROS}, None),
        (
            {"type": "map", "values": ["null", MILLIS]},
            {"type": "map", "values": MICROS},
            r"x\[\] is written as timestamp-millis",
        ),
        (["null", "Row"], ["null", "Row"], "the Avro schema is recursive: Row contains itself"),
        ("no.type", "no.type", "cannot read the Avro schema: Undefined schema: no.type"),
    ],
)
def test_schemas_that_spark_would_read_as_other_values_are_refused_by_name(
    spark: Any,  # noqa: F811
    writer: Any,
    reader: Any,
    words: str | None,
) -> None:
    registry = given({1: record("Row", ("x", writer)), 2: record("Row", ("x", reader))})
    frame = values_of(spark, b"\0\0\0\0\x01\0", b"\0\0\0\0\x02\0")
    if words is None:
        kafkalog.value_columns(frame, avro=registry)
        return
    with pytest.raises(InvalidInputError, match=words):
        kafkalog.value_columns(frame, avro=registry)


def test_fields_of_keys_are_columns_too_and_a_key_need_not_be_a_record(spark: Any) -> None:  # noqa: F811
    key, row = record("Key", ("id", "long")), record("Row", ("id", "int"), ("s", "string"))
    registry = given({1: key, 2: row, 3: "string"})
    frame = frame_of(spark, (framed(1, key, {"id": 7}), framed(2, row, {"id": 8, "s": "x"})))
    columns = kafkalog.value_columns(frame, avro=registry, key_avro=registry)
    assert columns.columns[:3] == ["_id", "id", "s"]
    assert columns.first()[:3] == (7, 8, "x")
    text = frame_of(spark, (framed(3, "string", "k"), b'\0\0\0\0\x05{"n": 1}'))
    both = kafkalog.value_columns(text, key_avro=registry, json="n int")
    assert both.select("key", "n").collect() == [("k", 1)]


def test_a_table_and_lookups_decode_framed_values(spark: Any, tmp_path: Path) -> None:  # noqa: F811
    path, subjects = log_in(tmp_path), Subjects()
    row = record("Row", ("n", "int"))
    subjects.register("t-value", 4, row)
    log_of(path, "t", [(b"a", framed(4, row, {"n": 1})), (b"b", body(row, {"n": 2}))])
    table = kafkalog.KTable(spark, path, "t")
    registry = registry_of(subjects)
    assert [(r.n, bool(r.why)) for r in table.df(avro=registry, bad_column="why").collect()] == [
        (1, False),
        (None, True),
    ]
    assert table.lookup("a", avro=registry) == {"n": 1}
    assert table.lookup("b", avro=json.dumps(row)) == {"n": 2}
    with pytest.raises(InvalidInputError, match="t-0 offset 0: the value is framed"):
        table.lookup("a", avro=json.dumps(row))
    with pytest.raises(InvalidInputError, match="t-0 offset 1: the value is not framed"):
        table.lookup("b", avro=registry)


def test_a_materialized_table_decodes_framed_values_and_follows_its_registry(
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, subjects = log_in(tmp_path), Subjects()
    text = {"name": "s", "type": "string", "default": "-"}
    row, wider = record("Row", ("n", "int")), record("Row", ("n", "int"), text)
    renamed = record("Row", ("n", "int"), {**text, "default": "none"})
    subjects.register("t-value", 4, row)
    log_of(path, "t", [(b"a", framed(4, row, {"n": 1})), (b"b", framed(4, row, {"n": 2}))])
    source, registry = kafkalog.KTable(spark, path, "t"), registry_of(subjects)
    table = source.materialize(tmp_path / "table", avro=registry)
    log_of(path, "t", [(b"a", framed(4, row, {"n": 3})), (b"b", None)])
    for number, schema in ((9, wider), (10, renamed)):
        assert sorted(table.df().collect()) == sorted(source.df(avro=registry).collect())
        subjects.register("t-value", number, schema)
        value = {"n": number, "s": "x"}
        log_of(path, "t", [(b"c%d" % number, framed(number, schema, value))])
        latest = source.df(avro=registry)
        assert table.df().columns == latest.columns
        assert sorted(table.df().collect()) == sorted(latest.collect())
        table.refresh()
    assert {each.s for each in table.df().collect()} == {"none", "x"}


def test_a_table_of_other_given_schemas_is_made_again(spark: Any, tmp_path: Path) -> None:  # noqa: F811
    path, row = log_in(tmp_path), record("Row", ("n", "int"))
    log_of(path, "t", [(b"a", framed(4, row, {"n": 1}))])
    source = kafkalog.KTable(spark, path, "t")
    for name in ("n", "m"):
        registry = given({4: record("Row", (name, "int"))})
        table = source.materialize(tmp_path / "table", avro=registry)
        assert [each[name] for each in table.df().collect()] == [1]


def test_a_new_schema_stops_a_stream_which_goes_on_when_it_is_started_again(
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, subjects = log_in(tmp_path), Subjects()
    first = record("Row", ("n", "int"))
    second = record("Row", ("n", "int"), {"name": "s", "type": "string", "default": "-"})
    subjects.register("t-value", 4, first)
    log_of(path, "t", [(b"a", framed(4, first, {"n": 1}))])

    def run() -> Any:
        """Start the query, and let a stream of its own with an upsert follow."""
        table = kafkalog.KTable(spark, path, "t")
        changes = table.updates(avro=registry_of(subjects)).select("offset", "n")
        writer = changes.writeStream.format("parquet").option("path", str(tmp_path / "rows"))
        finish(writer.option("checkpointLocation", str(tmp_path / "c")))

    run()
    subjects.register("t-value", 9, second)
    late = kafkalog.value_columns(values_of(spark), avro=registry_of(subjects), subject="t-value")
    assert late.columns[:3] == ["key", "n", "s"]
    stale = Subjects()
    stale.by_subject = {"t-value": subjects.by_subject["t-value"][:1]}
    log_of(path, "t", [(b"b", framed(9, second, {"n": 2, "s": "x"}))])
    subjects, known = stale, subjects
    message = error_of(run)
    assert "t-0 offset 1: the value has the schema id 9, which was not known" in message
    subjects = known
    run()
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert sorted(map(tuple, rows.collect())) == [(0, 1), (1, 2)]


def test_a_new_schema_in_the_middle_of_an_upsert_adds_its_column(
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, subjects = log_in(tmp_path), Subjects()
    key, first = record("Key", ("region", "string"), ("id", "int")), record("Row", ("n", "int"))
    second = record("Row", ("n", "int"), {"name": "s", "type": "string", "default": "-"})
    subjects.register("t-key", 3, key)
    subjects.register("t-value", 4, first)
    registry = registry_of(subjects)
    upsert = SQLiteUpsert(
        tmp_path / "rows.db",
        "rows",
        avro=registry,
        key_avro=registry,
        on_new_column="add",
        name="q",
    )

    def key_of(number: int) -> bytes:
        return framed(3, key, {"region": "eu", "id": number})

    log_of(path, "t", [(key_of(1), framed(4, first, {"n": 1}))])
    stream = spark.readStream.format("kafkalog").option("subscribe", "t")
    stream = stream.option("startingOffsets", "earliest").load(str(path))
    query = (
        stream.writeStream.foreachBatch(upsert).option("checkpointLocation", str(tmp_path / "c"))
    ).start()
    try:
        query.processAllAvailable()
        subjects.register("t-value", 9, second)
        log_of(path, "t", [(key_of(2), framed(9, second, {"n": 2, "s": "x"})), (key_of(1), None)])
        query.processAllAvailable()
    finally:
        query.stop()
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        assert connection.execute("SELECT * FROM rows").fetchall() == [("eu", 2, 2, "x")]
        [(statement,)] = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'rows'")
    assert 'PRIMARY KEY ("region", "id")' in statement


def test_a_registry_that_is_down_stops_a_stream_at_a_record_and_it_goes_on_after(
    spark: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    path, schema = log_in(tmp_path), record("Row", ("n", "int"))
    answer = {"schema": json.dumps(schema)}
    log_of(path, "t", [(b"a", framed(4, schema, {"n": 1})), (b"b", framed(7, schema, {"n": 2}))])
    with Answers() as server:
        server.by_path["/schemas/ids/4"] = 200, answer
        latest = {**answer, "subject": "t-value", "version": 1, "id": 4}
        server.by_path["/subjects/t-value/versions/latest"] = 200, latest
        upsert = SQLiteUpsert(
            tmp_path / "rows.db",
            "rows",
            avro=server.registry(),
            name="q",
            on_bad_record="skip",
            key_type="string",
        )
        stream = spark.readStream.format("kafkalog").option("subscribe", "t")
        stream = stream.option("startingOffsets", "earliest").load(str(path))
        query = stream.writeStream.foreachBatch(upsert)
        query = query.option("checkpointLocation", str(tmp_path / "c"))
        for status, words in ((503, "HTTP 503"), (401, "refuses"), (302, "redirects")):
            server.by_path["/schemas/ids/7"] = status, b""
            message = error_of(lambda: finish(query))
            assert "t-0 offset 1: " in message
            assert "no schema of the id 7: " in message
            assert words in message
        server.by_path["/schemas/ids/7"] = 200, answer
        finish(query)
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        rows = connection.execute("SELECT key, n FROM rows ORDER BY key").fetchall()
        [(count,)] = connection.execute("SELECT bad_records FROM kafkalog_positions")
    assert (rows, count) == ([("a", 1), ("b", 2)], 0)
