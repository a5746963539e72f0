"""The type tables of Debezium's documentation, each type with a value and the row it makes.

Debezium connectors for PostgreSQL and MySQL, "Data type mappings". A value is written as Connect's
JsonConverter writes the literal type: bytes are base64.
"""

from __future__ import annotations

import base64
import datetime as dt
from decimal import Decimal
from typing import Any, NamedTuple

CONNECT = "org.apache.kafka.connect.data."
TIME = "io.debezium.time."
DATA = "io.debezium.data."
UTC = dt.UTC


class Documented(NamedTuple):
    """A type of a database: Connect's literal type and name of it, a value, the column wanted.

    `comment` says of a document without schema what it means; by default the name.
    """

    database: str
    literal: str
    name: str | None
    written: Any
    column: str
    expected: Any
    scale: int | None = None
    comment: str | None = None
    avro_expected: Any = None
    """What the Avro form makes of it, if that is something else: it has no column wanted."""


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def number(unscaled: int) -> bytes:
    """Return a number as Java's BigInteger.toByteArray does."""
    size = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
    return unscaled.to_bytes(size, "big", signed=True)


def _plain(database: str, literal: str, written: Any, column: str) -> Documented:
    return Documented(database, literal, None, written, column, written)


POINT = {"x": 1.5, "y": -2.0, "wkb": b64(b"\1\1"), "srid": None}
D = Documented
POSTGRES = [
    _plain("boolean", "boolean", True, "boolean"),
    _plain("bit(1)", "boolean", False, "boolean"),
    D("bit(12)", "bytes", f"{DATA}Bits", b64(b"\x01\x0f"), "binary", b"\x01\x0f"),
    D("bit varying(5)", "bytes", f"{DATA}Bits", b64(b"\x15"), "binary", b"\x15"),
    _plain("smallint", "int16", -3, "smallint"),
    _plain("integer", "int32", 2**31 - 1, "int"),
    _plain("bigint", "int64", -(2**63), "bigint"),
    _plain("oid", "int64", 4294967295, "bigint"),
    _plain("real", "float", 3.5, "float"),
    _plain("double precision", "double", 4.44, "double"),
    _plain("char(4)", "string", "ab  ", "string"),
    _plain("varchar(9)", "string", "žluť", "string"),
    D("timestamptz", "string", f"{TIME}ZonedTimestamp", "2018-06-20T13:37:03.123456Z", "timestamp",
      dt.datetime(2018, 6, 20, 13, 37, 3, 123456, UTC)),
    D("timetz", "string", f"{TIME}ZonedTime", "11:05:11.789Z", "string", "11:05:11.789Z"),
    D("interval", "int64", f"{TIME}MicroDuration", 36093000000789, "bigint", 36093000000789),
    D("interval as string", "string", f"{TIME}Interval", "P1Y2M3DT4H5M6.78S", "string",
      "P1Y2M3DT4H5M6.78S"),
    D("bytea", "bytes", None, b64(b"\0\xff"), "binary", b"\0\xff"),
    D("bytea as base64", "string", None, b64(b"\0\xff"), "string", b64(b"\0\xff")),
    D("json", "string", f"{DATA}Json", '{"a": 1}', "string", '{"a": 1}'),
    D("xml", "string", f"{DATA}Xml", "<a/>", "string", "<a/>"),
    D("uuid", "string", f"{DATA}Uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "string",
      "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    D("point", "struct", f"{DATA}geometry.Point", POINT,
      "struct<x double, y double, wkb binary, srid int>",
      {"x": 1.5, "y": -2.0, "wkb": b"\1\1", "srid": None}),
    D("line", "struct", f"{DATA}geometry.Line", {"a": 1.0, "b": 2.0, "c": 3.0},
      "struct<a double, b double, c double>", {"a": 1.0, "b": 2.0, "c": 3.0}),
    D("ltree", "string", f"{DATA}Ltree", "Top.Science", "string", "Top.Science"),
    _plain("citext", "string", "Hello", "string"),
    _plain("inet", "string", "192.168.2.0/12", "string"),
    _plain("cidr", "string", "192.168.100.128/25", "string"),
    _plain("macaddr", "string", "08:00:2b:01:02:03", "string"),
    _plain("int4range", "string", "[1000,6000)", "string"),
    _plain("tstzrange", "string", '["2017-06-05 11:29:12+00",)', "string"),
    D("enum", "string", f"{DATA}Enum", "happy", "string", "happy"),
    D("date", "int32", f"{TIME}Date", 17337, "date", dt.date(2017, 6, 20)),
    D("date before 1970", "int32", f"{TIME}Date", -1, "date", dt.date(1969, 12, 31)),
    D("time(3)", "int32", f"{TIME}Time", 14711789, "int", 14711789),
    D("time(6)", "int64", f"{TIME}MicroTime", 14711789123, "bigint", 14711789123),
    D("timestamp(3)", "int64", f"{TIME}Timestamp", 1529507596945, "timestamp_ntz",
      dt.datetime(2018, 6, 20, 15, 13, 16, 945000)),
    D("timestamp", "int64", f"{TIME}MicroTimestamp", 1529507596945104, "timestamp_ntz",
      dt.datetime(2018, 6, 20, 15, 13, 16, 945104)),
    D("timestamp before 1970", "int64", f"{TIME}MicroTimestamp", -1, "timestamp_ntz",
      dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    D("timestamp, nanoseconds", "int64", f"{TIME}NanoTimestamp", 1529507596945104000,
      "timestamp_ntz", dt.datetime(2018, 6, 20, 15, 13, 16, 945104)),
    D("date, connect", "int32", f"{CONNECT}Date", 17337, "date", dt.date(2017, 6, 20)),
    D("time, connect", "int32", f"{CONNECT}Time", 14711789, "int", 14711789),
    D("timestamp, connect", "int64", f"{CONNECT}Timestamp", 1529507596945, "timestamp",
      dt.datetime(2018, 6, 20, 15, 13, 16, 945000, UTC)),
    D("date, isostring", "string", f"{TIME}IsoDate", "2017-09-15Z", "date", dt.date(2017, 9, 15)),
    D("time, isostring", "string", f"{TIME}IsoTime", "04:05:11.789Z", "string", "04:05:11.789Z"),
    D("timestamp, isostring", "string", f"{TIME}IsoTimestamp", "2019-07-09T02:28:57.123456Z",
      "timestamp_ntz", dt.datetime(2019, 7, 9, 2, 28, 57, 123456)),
    D("date, structured", "struct", f"{TIME}StructuredDate",
      {"year": 2017, "month": 9, "day": 15}, "struct<year int, month int, day int>",
      {"year": 2017, "month": 9, "day": 15}),
    D("numeric(5,2)", "bytes", f"{CONNECT}Decimal", b64(number(-12345)), "decimal(5,2)",
      Decimal("-123.45"), 2),
    D("numeric(38,10)", "bytes", f"{CONNECT}Decimal", b64(number(-(10**37) - 7)),
      "decimal(38,10)", Decimal("-1000000000000000000000000000.0000000007"), 10),
    D("money", "bytes", f"{CONNECT}Decimal", b64(number(0)), "decimal(19,2)", Decimal("0.00"), 2),
    D("numeric", "struct", f"{DATA}VariableScaleDecimal", {"scale": 3, "value": b64(number(99999))},
      "decimal(38,18)", Decimal("99.999")),
    D("numeric as double", "double", None, 1.25, "decimal(5,2)", Decimal("1.25"),
      comment="double", avro_expected=1.25),
    D("numeric as string", "string", None, "1250", "decimal(5,0)", Decimal(1250),
      comment="string", avro_expected="1250"),
    D("hstore", "string", f"{DATA}Json", '{"key" : "val"}', "string", '{"key" : "val"}'),
    D("hstore as map", "map", None, {"key": "val"}, "map<string,string>", {"key": "val"}),
    D("geometry", "struct", f"{DATA}geometry.Geometry", {"wkb": b64(b"\1"), "srid": 4326},
      "struct<wkb binary, srid int>", {"wkb": b"\1", "srid": 4326}),
    D("vector", "array", f"{DATA}DoubleVector", [1.0, 2.5], "array<double>", [1.0, 2.5]),
    D("halfvec", "array", f"{DATA}FloatVector", [0.5], "array<float>", [0.5]),
    # Connect's JsonConverter writes a map with keys that are no text as pairs.
    D("sparsevec", "struct", f"{DATA}SparseVector", {"dimensions": 25, "vector": [[1, 0.5]]},
      "struct<dimensions smallint, vector array<array<double>>>",
      {"dimensions": 25, "vector": [[1.0, 0.5]]},
      avro_expected={"dimensions": 25, "vector": [{"key": 1, "value": 0.5}]}),
    D("circle", "struct", f"{DATA}geometry.Circle", {"center": POINT, "radius": 10.0},
      "struct<center struct<x double, y double, wkb binary, srid int>, radius double>",
      {"center": {"x": 1.5, "y": -2.0, "wkb": b"\1\1", "srid": None}, "radius": 10.0}),
    D("box, lseg, path, polygon", "struct", f"{DATA}geometry.Geometry",
      {"wkb": b64(b"\3"), "srid": None}, "struct<wkb binary, srid int>",
      {"wkb": b"\3", "srid": None}),
    D("geography", "struct", f"{DATA}geometry.Geography", {"wkb": b64(b"\1"), "srid": 4326},
      "struct<wkb binary, srid int>", {"wkb": b"\1", "srid": 4326}),
    D("text[]", "array", None, ["a", None], "array<string>", ["a", None]),
    D("tsvector", "string", f"{DATA}Tsvector", "'direct':6 'insert':8", "string",
      "'direct':6 'insert':8"),
]  # fmt: skip
MYSQL = [
    _plain("bool", "boolean", True, "boolean"),
    _plain("tinyint", "int16", -128, "tinyint"),
    _plain("tinyint unsigned", "int16", 255, "smallint"),
    _plain("mediumint", "int32", -8388608, "int"),
    _plain("bigint", "int64", 2**63 - 1, "bigint"),
    D("bit(9)", "bytes", f"{DATA}Bits", b64(b"\xff\1"), "binary", b"\xff\1"),
    _plain("float(10)", "float", 0.5, "float"),
    _plain("double", "double", -1e100, "double"),
    _plain("longtext", "string", "x" * 300, "string"),
    D("blob", "bytes", None, b64(b"blob"), "binary", b"blob"),
    D("varbinary as hex", "string", None, "00ff", "binary", b"\0\xff", comment="hex",
      avro_expected="00ff"),
    D("binary as base64-url-safe", "string", None, "-_8=", "binary", b"\xfb\xff",
      comment="base64-url-safe", avro_expected="-_8="),
    D("json", "string", f"{DATA}Json", "[1, null]", "string", "[1, null]"),
    D("enum", "string", f"{DATA}Enum", "small", "string", "small"),
    D("set", "string", f"{DATA}EnumSet", "a,b", "string", "a,b"),
    D("year", "int32", f"{TIME}Year", 2018, "int", 2018),
    D("timestamp", "string", f"{TIME}ZonedTimestamp", "2018-06-20T13:37:03Z", "timestamp",
      dt.datetime(2018, 6, 20, 13, 37, 3, 0, UTC)),
    D("date", "int32", f"{TIME}Date", 17702, "date", dt.date(2018, 6, 20)),
    D("time(6)", "int64", f"{TIME}MicroTime", 86399999999, "bigint", 86399999999),
    D("datetime", "int64", f"{TIME}Timestamp", 1529476623000, "timestamp_ntz",
      dt.datetime(2018, 6, 20, 6, 37, 3)),
    D("datetime(6)", "int64", f"{TIME}MicroTimestamp", 1529476623000001, "timestamp_ntz",
      dt.datetime(2018, 6, 20, 6, 37, 3, 1)),
    D("decimal(10,2)", "bytes", f"{CONNECT}Decimal", b64(number(999)), "decimal(10,2)",
      Decimal("9.99"), 2),
    D("bigint unsigned, precise", "bytes", f"{CONNECT}Decimal", b64(number(2**64 - 1)),
      "decimal(20,0)", Decimal(2**64 - 1), 0),
    D("geometry", "struct", f"{DATA}geometry.Geometry", {"wkb": b64(b"\2"), "srid": None},
      "struct<wkb binary, srid int>", {"wkb": b"\2", "srid": None}),
    D("vector", "array", f"{DATA}FloatVector", [0.5], "array<float>", [0.5]),
]  # fmt: skip


def column_of(number: int) -> str:
    return f"c{number}"


def ddl(types: list[Documented], *, with_comments: bool) -> str:
    """Return the row's schema; with comments it says what the values mean."""
    columns = []
    for place, each in enumerate(types):
        comment = each.comment or each.name
        told = f" COMMENT '{comment}'" if with_comments and comment else ""
        columns.append(f"{column_of(place)} {each.column}{told}")
    return ", ".join(columns)


def row_of(types: list[Documented]) -> dict[str, Any]:
    return {column_of(place): each.written for place, each in enumerate(types)}


def schema_of(types: list[Documented]) -> dict[str, Any]:
    """Return the schema of a row as Connect's JsonConverter writes it."""
    fields = []
    for place, each in enumerate(types):
        field: dict[str, Any] = {"type": each.literal, "optional": True}
        if each.name:
            field |= {"name": each.name, "version": 1}
        if each.scale is not None:
            field["parameters"] = {"scale": str(each.scale)}
        fields.append(field | {"field": column_of(place)})
    return {"type": "struct", "fields": fields, "optional": True, "name": "s.public.t.Value"}


def envelope_schema(row: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an event as Connect's JsonConverter writes it."""
    source = {"type": "struct", "fields": [{"type": "int64", "field": "lsn"}], "field": "source"}
    fields = [
        row | {"field": "before"},
        row | {"field": "after"},
        source,
        {"type": "string", "optional": False, "field": "op"},
        {"type": "int64", "optional": True, "field": "ts_ms"},
    ]
    return {"type": "struct", "fields": fields, "name": "s.public.t.Envelope"}
