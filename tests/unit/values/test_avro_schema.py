"""What two Avro schemas have in common, and where one cannot be read as the other."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalog.values.avro_schema import AvroType, clashes, is_same_record

MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}


def record(name: str, *fields: Any, **more: Any) -> dict[str, Any]:
    named = [{"name": f[0], "type": f[1]} if isinstance(f, tuple) else f for f in fields]
    return {"type": "record", "name": name, "fields": named, **more}


def money(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def test_schemas_that_differ_in_what_is_not_written_have_the_same_bytes() -> None:
    plain = record("R", ("a", "int"), ("b", ["null", "bytes"]), namespace="n")
    told = record(
        "n.R",
        {"name": "a", "type": {"type": "int"}, "doc": "an a", "default": 3, "aliases": ["x"]},
        ("b", ["null", money(9, 2)]),
        doc="a row",
    )
    assert AvroType(plain).bytes_form() == AvroType(told).bytes_form()


@pytest.mark.parametrize(
    "other",
    [
        record("R", ("a", "long")),
        record("R", ("b", "int")),
        record("S", ("a", "int")),
        record("R", ("a", ["int"])),
        record("R", ("a", "int"), ("b", "null")),
    ],
)
def test_other_types_names_and_fields_are_other_bytes(other: dict[str, Any]) -> None:
    assert AvroType(record("R", ("a", "int"))).bytes_form() != AvroType(other).bytes_form()


@pytest.mark.parametrize(
    ("writer", "reader", "is_same"),
    [
        (record("a.R"), record("b.R"), True),
        (record("a.Old"), record("a.R", aliases=["Old"]), True),
        (record("a.Old"), record("b.R", aliases=["Old"]), False),
        (["null", record("R")], record("R"), True),
        (["null", record("S")], record("R"), False),
        ("string", record("R"), False),
        (record("R"), "string", True),
    ],
)
def test_a_record_has_its_name_or_one_of_the_readers_aliases(
    writer: Any, reader: Any, is_same: bool
) -> None:
    assert is_same_record(AvroType(writer), AvroType(reader)) is is_same


@pytest.mark.parametrize(
    ("writer", "reader", "words"),
    [
        (money(9, 2), money(12, 2), []),
        (money(9, 2), money(9, 3), ["x is written as decimal(9,2) and read as decimal(9,3)"]),
        (money(9, 2), money(8, 2), ["x is written as decimal(9,2) and read as decimal(8,2)"]),
        (["null", MILLIS], MICROS, ["x is written as timestamp-millis and read as timestamp-mic"]),
        (["null", "string", MILLIS], ["string", MICROS], ["x is written as timestamp-millis"]),
        (MILLIS, "long", []),
        ("long", MICROS, []),
        (
            {"type": "array", "items": record("In", ("at", MILLIS))},
            {"type": "array", "items": record("In", ("at", MICROS))},
            ["x[].at is written as"],
        ),
        (record("In", ("next", ["null", "In"])), record("In", ("next", ["null", "In"])), []),
    ],
)
def test_a_clash_is_what_would_be_read_as_another_value(
    writer: Any, reader: Any, words: list[str]
) -> None:
    found = clashes(AvroType(record("R", ("x", writer))), AvroType(record("R", ("x", reader))))
    assert len(found) == len(words)
    assert all(each.startswith(word) for each, word in zip(found, words, strict=True))


def test_a_clash_is_found_in_a_renamed_field_and_in_a_type_that_is_named_again() -> None:
    writer = record("R", ("a", record("In", ("at", MILLIS))), ("b", "In"))
    renamed = {"name": "c", "type": "In", "aliases": ["b"]}
    reader = record("R", {"name": "a", "type": record("In", ("at", MICROS))}, renamed)
    found = clashes(AvroType(writer), AvroType(reader))
    assert [each.partition(" ")[0] for each in found] == ["a.at", "c.at"]


def test_a_recursive_record_and_fields_that_differ_in_case_are_told() -> None:
    assert AvroType(record("R", ("next", ["null", "R"]), namespace="n")).recursive == "n.R"
    assert AvroType(record("R", ("a", record("In")), ("b", "In"))).recursive is None
    nested = AvroType(record("R", ("a", record("In", ("n", "int"), ("N", "int")))))
    assert nested.fields_alike(str.lower) == ("n", "N")
    assert nested.fields_alike(str) is None
