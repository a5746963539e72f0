"""Rules of Avro values in a session that has Spark's Avro package; `test_bare_avro` runs them."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from tests.log_place import log_in
from tests.spark.sink.test_spark_writes import error_of
from tests.spark_home import quick_session


@pytest.fixture(scope="module")
def avro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a session that has Spark's Avro package."""
    jar = {"spark.jars": os.environ["KAFKALOG_AVRO_JAR"]}
    session = quick_session(tmp_path_factory.mktemp("spark"), jar)
    yield session
    session.stop()


def schema_of(fields: dict[str, Any]) -> str:
    named = [{"name": name, "type": kind} for name, kind in fields.items()]
    return json.dumps({"type": "record", "name": "r", "fields": named})


def long(number: int) -> bytes:
    """Return Avro's bytes of a whole number."""
    left, found = (number << 1) ^ (number >> 63), b""
    while left > 0x7F:
        found, left = found + bytes([left & 0x7F | 0x80]), left >> 7
    return found + bytes([left])


def text(value: bytes) -> bytes:
    return long(len(value)) + value


def framed(number: int, body: bytes) -> bytes:
    return b"\0" + struct.pack(">I", number) + body


def frame_of(spark: Any, *values: bytes | None) -> Any:
    rows = [(None if value is None else bytearray(value), n) for n, value in enumerate(values)]
    frame = spark.createDataFrame(rows, "value binary, offset long")
    return frame.selectExpr("value", "'t' as topic", "0 as partition", "offset")


def decoded(spark: Any, schema: str, *values: bytes | None, **options: str) -> list[Any]:
    frame = kafkalog.value_columns(frame_of(spark, *values), avro=schema, options=options)
    return [tuple(row)[:-3] for row in frame.orderBy("offset").collect()]


ZERO_FIRST: dict[str, tuple[dict[str, Any], bytes, tuple[Any, ...]]] = {
    "a zero": ({"n": "long", "s": "string"}, long(0) + text(b"abcdef"), (0, "abcdef")),
    "an empty text": ({"s": "string", "n": "long"}, text(b"") + long(10**15), ("", 10**15)),
    "false": ({"b": "boolean", "d": "double"}, b"\0" + struct.pack("<d", 1.5), (False, 1.5)),
    "a null": (
        {"o": ["null", "int"], "s": "string"},
        b"\0" + text(b"long text"),
        (None, "long text"),
    ),
    "zeros": (dict.fromkeys("abcdef", "int"), bytes(6), (0,) * 6),
    "a record without bytes": ({"none": "null"}, b"", (None,)),
}


@pytest.mark.parametrize(("fields", "value", "row"), ZERO_FIRST.values(), ids=ZERO_FIRST)
def test_a_bare_value_may_begin_with_a_zero_byte(
    avro: Any, fields: dict[str, Any], value: bytes, row: tuple[Any, ...]
) -> None:
    schema = schema_of(fields)
    assert decoded(avro, schema, value, None) == [row, (None,) * len(row)]
    for number in (1, 7, 100_001, 2**31 - 1):
        message = error_of(lambda n=number: decoded(avro, schema, value, framed(n, value)))
        assert "t-0 offset 1: the value is framed (expected Avro of the schema alone" in message
        assert f"the schema id {number})" in message


def test_a_framed_value_is_decoded_as_the_error_says(avro: Any, tmp_path: Path) -> None:
    schema = schema_of({"region": "string", "id": "long"})
    path = log_in(tmp_path)
    with kafkalog.open(path) as log:
        log.create_topic("t", config={"cleanup.policy": "compact"})
        body = text(b"eu") + long(7)
        log.append("t", [(b"a", framed(7, body)), (b"b", framed(7, body)), (b"b", None)])
    table = kafkalog.KTable(avro, path, "t")
    message = error_of(lambda: table.df(avro=schema).collect())
    assert "t-0 offset 0: the value is framed" in message
    assert "Give avro=kafkalog.SchemaRegistry(...), which has the schema 7." in message
    found = table.df(avro=kafkalog.SchemaRegistry(schemas={7: schema}))
    assert [(row.region, row.id) for row in found.collect()] == [("eu", 7)]


def test_bytes_of_the_middle_of_a_value_are_not_a_framed_value(avro: Any) -> None:
    schema = schema_of({"a": "boolean", "b": "boolean", "at": "long", "n": "long"})
    times = [1_700_000_000_000 + n * 7_777_777 for n in range(200)]
    values = [bytes(2) + long(at) + long(1) for at in times]
    assert decoded(avro, schema, *values) == [(False, False, at, 1) for at in times]


def test_a_value_that_has_two_meanings_is_refused(avro: Any) -> None:
    schema = schema_of({**dict.fromkeys("abcd", "long"), "e": "bytes"})
    body = bytes(4) + text(b"12345")
    message = error_of(lambda: decoded(avro, schema, framed(20, body)))
    assert "the value has two meanings" in message


@pytest.mark.parametrize("value", [b"\x04e", b"\x04eu\x0e!", b"\x05", b"\xff" * 12, b"\0\0\0"])
def test_a_value_that_does_not_end_with_its_schema_fails_or_is_null(
    avro: Any, value: bytes
) -> None:
    schema = schema_of({"region": "string", "id": "long"})
    good = text(b"eu") + long(7)
    message = error_of(lambda: decoded(avro, schema, good, value))
    assert "t-0 offset 1: the value is not Avro of the schema" in message
    assert decoded(avro, schema, good, value, mode="permissive") == [("eu", 7), (None, None)]


def test_a_recursive_schema_and_another_readers_schema_are_read(avro: Any) -> None:
    node = {"v": "int", "next": ["null", "r"]}
    value = long(1) + long(1) + long(2) + long(0)
    [(first, rest)] = decoded(avro, schema_of(node), value, recursiveFieldMaxDepth="2")
    assert (first, rest.v) == (1, 2)
    reader = schema_of({"n": "long"}).replace('"long"', '"long", "default": 5')
    written = schema_of({"s": "string", "n": "int"})
    assert decoded(avro, written, text(b"x") + long(3), avroSchema=reader) == [(3,)]
    with pytest.raises(InvalidInputError, match="avro= takes the schema of a record"):
        decoded(avro, written, b"", avroSchema="7")


DRAWN: dict[str, tuple[Any, Callable[[random.Random], bytes]]] = {
    "long": ("long", lambda r: long(r.choice([0, 0, 1, -1, r.getrandbits(40)]))),
    "string": ("string", lambda r: text(bytes(r.choices(b"abc", k=r.choice([0, 1, 4]))))),
    "bytes": ("bytes", lambda r: text(r.randbytes(r.choice([0, 1, 9])))),
    "union": (["null", "long"], lambda r: r.choice([long(0), long(1) + long(r.randrange(99))])),
    "boolean": ("boolean", lambda r: bytes([r.randrange(2)])),
    "list": (
        {"type": "array", "items": "int"},
        lambda r: r.choice([b"\0", long(1) + long(r.randrange(99)) + b"\0"]),
    ),
}


@pytest.mark.parametrize("seed", range(4))
def test_no_framed_value_of_a_drawn_schema_is_decoded_as_a_bare_one(avro: Any, seed: int) -> None:
    drawn = random.Random(seed)
    kinds = [DRAWN[drawn.choice(list(DRAWN))] for _ in range(drawn.randrange(1, 6))]
    fields = {f"f{n}": kind for n, (kind, _) in enumerate(kinds)}
    schema = schema_of({**fields, "last": "long"})
    bodies = [b"".join(make(drawn) for _, make in kinds) + long(1) for _ in range(400)]
    numbers = [drawn.choice([drawn.randrange(1, 300), drawn.getrandbits(31)]) for _ in bodies]
    values = [framed(number, body) for number, body in zip(numbers, bodies, strict=True)]
    found = decoded(avro, schema, *values, mode="PERMISSIVE")
    assert {row[-1] for row in found} == {None}
    bare = decoded(avro, schema, *bodies, mode="PERMISSIVE")
    refused = [body for body, row in zip(bodies, bare, strict=True) if row[-1] is None]
    # Only what is Avro of the schema without its first five bytes, too, is refused.
    assert {row[-1] for row in decoded(avro, schema, *[b[5:] for b in refused])} <= {1}
    assert all(body[0] == 0 for body in refused)
    assert len(refused) < len(bodies) // 10
