"""Which schemas framed values are decoded with, and which one their columns have."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.values.decoded_value import avro_document, json_document
from kafkalog.values.framed_avro import FramedAvro
from tests.spark.values.values_session import Subjects, framed, record, registry_of

ROW = record("Row", ("n", "int"))
WIDE = record("Row", ("n", "long"))
KEY = record("Key", ("id", "int"))


def given(schemas: dict[int, Any]) -> kafkalog.SchemaRegistry:
    return kafkalog.SchemaRegistry(schemas={n: json.dumps(each) for n, each in schemas.items()})


def test_the_reader_is_the_given_schema_else_the_subjects_latest() -> None:
    subjects = Subjects()
    subjects.register("t-value", 1, ROW)
    subjects.register("t-value", 2, WIDE)
    subjects.register("t-key", 3, KEY)
    registry = registry_of(subjects)
    values = FramedAvro(registry)
    values.ask({1}, ["t"])
    assert values.reader() == WIDE
    keys = FramedAvro(registry, "key")
    keys.ask({3}, ["t"])
    assert keys.reader() == KEY
    other = FramedAvro(registry, subject="t-key")
    assert other.knows_reader([])
    assert other.reader() == KEY
    assert FramedAvro(registry, reader=json.dumps(ROW)).reader() == ROW


def test_the_latest_is_asked_for_again_when_a_new_schema_comes() -> None:
    subjects = Subjects()
    subjects.register("t-value", 1, ROW)
    values = FramedAvro(registry_of(subjects))
    values.ask({1}, ["t"])
    subjects.register("t-value", 2, WIDE)
    values.ask({1}, ["t"])
    assert values.reader() == ROW
    values.ask({2}, ["t"])
    assert values.reader() == WIDE


def test_without_a_subject_the_reader_is_the_highest_id_in_use() -> None:
    values = FramedAvro(given({1: ROW, 2: WIDE, 3: KEY}))
    values.ask({1, 2}, ["t"])
    assert values.reader() == WIDE
    expecting = FramedAvro(given({1: ROW, 2: WIDE, 3: KEY}))
    expecting.expect([])
    with pytest.raises(InvalidInputError, match=r"schemas of Key and Row. Give reader="):
        expecting.reader()
    with pytest.raises(InvalidInputError, match="no schema is known"):
        FramedAvro(given({1: ROW}), "key").reader()


def test_a_clash_with_a_schema_that_may_be_unused_lets_the_ids_be_asked_for() -> None:
    subjects = Subjects()
    for number, unit in enumerate(("millis", "micros")):
        at = {"type": "long", "logicalType": f"timestamp-{unit}"}
        subjects.register("t-value", number, record("Row", ("at", at)))
    values = FramedAvro(registry_of(subjects))
    assert not values.expects_all(["t"])
    values.ask({1}, ["t"])
    assert values.names() == ["at"]


def test_a_looked_up_value_is_read_to_its_last_byte() -> None:
    registry, bare = given({1: ROW, 3: KEY}), json.dumps(ROW)
    whole = framed(1, ROW, {"n": 7})
    assert avro_document(whole, "t-0 offset 1", registry) == {"n": 7}
    assert avro_document(whole[5:], "", bare) == {"n": 7}
    assert avro_document(whole, "", registry, json.dumps(WIDE)) == {"n": 7}
    faults = {
        "is not framed": (whole[5:], registry),
        "is framed": (whole, bare),
        "expected 1 bytes, found 2": (whole + b"\0", registry),
        "no schema of the id 9": (b"\0\0\0\0\x09" + whole[5:], registry),
        "is not Avro of its schema": (b"", bare),
    }
    for words, (value, avro) in faults.items():
        with pytest.raises(InvalidInputError, match=f"t-0 offset 1: .*{words}"):
            avro_document(value, "t-0 offset 1", avro)
    assert json_document(b'\0\0\0\0\x05{"n": 1}', "") == json_document(b'{"n": 1}', "") == {"n": 1}
    with pytest.raises(InvalidInputError, match="t-0 offset 2: the value is not a JSON document"):
        json_document(b"{", "t-0 offset 2")
