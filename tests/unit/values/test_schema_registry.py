from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, SchemaNotFoundError, UnknownTopicError
from kafkalog.values.registered_schema import RegisteredSchema
from tests import registry_topic as topic


def record(name: str, *fields: tuple[str, object]) -> str:
    listed = [{"name": field, "type": kind} for field, kind in fields]
    return json.dumps({"type": "record", "name": name, "fields": listed})


V1 = record("Order", ("n", "int"))
V2 = record("Order", ("n", "long"))
MONEY = json.dumps({"type": "fixed", "name": "m.Money", "size": 8})
ADDRESS = record("a.Address", ("rent", "m.Money"), ("deposit", "m.Money"))
PERSON = record("p.Person", ("home", "a.Address"), ("work", ["null", "a.Address"]))


def registry_of(place: Path | str, *records: topic.Record) -> kafkalog.SchemaRegistry:
    with kafkalog.open(place) as log:
        log.create_topic("_schemas", exist_ok=True)
        log.append("_schemas", list(records))
    return kafkalog.SchemaRegistry(path=place)


def test_a_topic_gives_what_its_registry_gave(place: Path | str) -> None:
    registry = registry_of(
        place,
        topic.noop(),
        topic.config(None, "NONE"),
        topic.mode(None, "READWRITE"),
        topic.schema("order-value", 1, 1, V1),
        topic.schema("order-value", 2, 2, V2),
        topic.schema("note-value", 1, 3, '{"type": "string"}', kind="JSON"),
    )
    assert registry.schema(1) == RegisteredSchema(1, "AVRO", V1)
    assert registry.schema(3).kind == "JSON"
    assert registry.latest("order-value").id == 2
    assert [version.id for version in registry.versions("order-value")] == [1, 2]
    assert registry.ids() == {1, 2, 3}


def test_a_schema_that_is_registered_later_is_found(place: Path | str) -> None:
    registry = registry_of(place, topic.schema("order-value", 1, 1, V1))
    with pytest.raises(SchemaNotFoundError, match="there is no schema of the id 2"):
        registry.schema(2)
    registry_of(place, topic.schema("order-value", 2, 2, V2))
    assert registry.schema(2).text == V2
    assert registry.latest("order-value").id == 2


@pytest.mark.parametrize("delete", ["version", "subject"])
def test_the_id_of_a_deleted_version_stays_known(tmp_path: Path, delete: str) -> None:
    deleted = (
        topic.schema("order-value", 1, 1, V1, deleted=True)
        if delete == "version"
        else topic.subject_deleted("order-value", 1)
    )
    registry = registry_of(tmp_path, topic.schema("order-value", 1, 1, V1), deleted)
    assert registry.schema(1).text == V1
    assert [version.id for version in registry.versions("order-value")] == [1]
    with pytest.raises(SchemaNotFoundError, match="the subject 'order-value' is deleted"):
        registry.latest("order-value")
    later = registry_of(tmp_path, topic.schema("order-value", 2, 2, V2))
    assert later.latest("order-value").id == 2


def test_a_version_that_was_deleted_permanently_is_gone_unless_another_has_its_id(
    tmp_path: Path,
) -> None:
    registry = registry_of(
        tmp_path,
        topic.schema("order-value", 1, 1, V1),
        topic.schema("order-value", 2, 2, V2),
        topic.schema("copy-value", 1, 2, V2),
        topic.subject_deleted("order-value", 2),
        topic.hard_deleted("order-value", 2),
        topic.hard_deleted("order-value", 1),
    )
    assert registry.ids() == {2}
    with pytest.raises(SchemaNotFoundError, match="no schema of the id 1"):
        registry.schema(1)
    with pytest.raises(SchemaNotFoundError, match="there is no subject 'order-value'"):
        registry.latest("order-value")


def test_a_cleared_subject_loses_its_deleted_versions_alone(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path,
        topic.schema("order-value", 1, 1, V1, deleted=True),
        topic.schema("order-value", 2, 2, V2),
        topic.schema("other-value", 1, 3, MONEY, deleted=True),
        topic.subject_cleared("order-value"),
    )
    assert registry.ids() == {2, 3}


def test_a_text_that_claims_the_id_of_another_is_passed_over(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path, topic.schema("order-value", 1, 1, V1), topic.schema("other-value", 1, 1, V2)
    )
    assert registry.schema(1).text == V1


def test_contexts_number_their_schemas_by_themselves(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path,
        topic.schema("order-value", 1, 1, V1),
        topic.schema(":.eu:money", 1, 1, MONEY),
        topic.schema(":.eu:address", 1, 2, ADDRESS, ("m.Money", "money", 1)),
        topic.schema(":.eu:gone", 1, 3, V2, deleted=True),
        topic.subject_cleared(":.eu:"),
    )
    assert registry.schema(1).text == V1
    assert registry.ids() == {1}
    assert "fixed" in registry.latest(":.eu:address").text
    with pytest.raises(SchemaNotFoundError):
        registry.versions(":.eu:gone")


def test_references_are_written_out_where_they_are_used_first(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path,
        topic.schema("money", 1, 1, MONEY),
        topic.schema("address", 1, 2, ADDRESS, ("m.Money", "money", 1)),
        topic.schema("person-value", 1, 3, PERSON, ("a.Address", "address", 1)),
    )
    money = {"type": "fixed", "name": "Money", "namespace": "m", "size": 8}
    address = {
        "type": "record",
        "name": "Address",
        "namespace": "a",
        "fields": [{"name": "rent", "type": money}, {"name": "deposit", "type": "m.Money"}],
    }
    assert json.loads(registry.schema(3).text) == {
        "type": "record",
        "name": "Person",
        "namespace": "p",
        "fields": [
            {"name": "home", "type": address},
            {"name": "work", "type": ["null", "a.Address"]},
        ],
    }


def test_a_reference_that_is_not_there_is_named(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path, topic.schema("address", 1, 2, ADDRESS, ("m.Money", "money", 1))
    )
    with pytest.raises(
        SchemaNotFoundError,
        match="no version 1 of the subject 'money', to which a schema of 'address' refers",
    ):
        registry.schema(2)


def test_compaction_changes_no_answer(place: Path | str) -> None:
    registry = registry_of(
        place,
        *[
            topic.schema("order-value", n, n, record("Order", (f"f{n}", "int")))
            for n in range(1, 9)
        ],
        topic.schema("order-value", 3, 3, record("Order", ("f3", "int")), deleted=True),
        topic.subject_deleted("order-value", 5),
        topic.hard_deleted("order-value", 2),
        topic.schema("order-value", 9, 4, record("Order", ("f4", "int"))),
    )
    before = registry.versions("order-value"), registry.latest("order-value")
    with kafkalog.open(place) as log:
        log.append("_schemas", [topic.noop()])
        log.clean("_schemas", force=True)
    after = kafkalog.SchemaRegistry(path=place)
    assert (after.versions("order-value"), after.latest("order-value")) == before
    assert before[1].id == 4


def test_records_that_are_not_a_registrys_are_counted_where_something_is_missing(
    tmp_path: Path,
) -> None:
    registry = registry_of(
        tmp_path,
        (b"no json", b"x"),
        (b'{"keytype":"SCHEMA","subject":"s","version":1}', b"{}"),
        (b'{"keytype":"SCHEMA","subject":"s","version":2}', b"[" * 100_000),
        topic.schema("s", 3, 3, V1),
    )
    with pytest.raises(SchemaNotFoundError, match="3 of its records are not a registry's"):
        registry.schema(1)
    assert registry.schema(3).text == V1


def test_a_text_that_is_not_a_schema_is_named(tmp_path: Path) -> None:
    registry = registry_of(
        tmp_path,
        topic.schema("money", 1, 1, MONEY),
        topic.schema("nested", 1, 2, "[" * 100_000, ("m.Money", "money", 1)),
        topic.schema("wrong", 1, 3, '{"type": "record", "fields": 3}', ("m.Money", "money", 1)),
    )
    for number in (2, 3):
        with pytest.raises(InvalidInputError, match="an Avro schema: expected"):
            registry.schema(number)


def test_a_topic_of_several_partitions_is_not_a_registrys(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path) as log:
        log.create_topic("_schemas", partitions=2)
    with pytest.raises(InvalidInputError, match="the one partition of a registry's topic, found 2"):
        kafkalog.SchemaRegistry(path=tmp_path)
    with pytest.raises(UnknownTopicError):
        kafkalog.SchemaRegistry(path=tmp_path, topic="registry")


def test_given_schemas_are_known_by_id() -> None:
    registry = kafkalog.SchemaRegistry(schemas={8: V2, 7: V1})
    assert registry.schema(7) == RegisteredSchema(7, "AVRO", V1)
    assert registry.latest("any-value").id == 8
    assert registry.ids() == {7, 8}
    with pytest.raises(SchemaNotFoundError, match=r"no schema of the id 9 \(the ids are: 7, 8\)"):
        registry.schema(9)
    with pytest.raises(InvalidInputError, match="Use the registry's URL"):
        registry.register("any-value", V1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"url": "http://127.0.0.1:1", "schemas": {1: V1}},
        {"schemas": {1: V1}, "topic": "t"},
        {"schemas": {1: V1}, "config": {}},
        {"schemas": {"1": V1}},
        {"schemas": 5},
        {"schemas": {1: json.loads(V1)}},
        {"schemas": {1: "no json"}},
        {"url": "ftp://host"},
        {"url": "http://host", "config": {"nonsense": 1}},
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        kafkalog.SchemaRegistry(**arguments)  # type: ignore[arg-type]


def test_a_registry_can_be_sent_to_another_process(tmp_path: Path) -> None:
    for registry in (
        registry_of(tmp_path, topic.schema("order-value", 1, 1, V1)),
        kafkalog.SchemaRegistry(schemas={1: V1}),
    ):
        copy = pickle.loads(pickle.dumps(registry))
        assert copy.schema(1) == registry.schema(1)
