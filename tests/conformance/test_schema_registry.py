"""Framed values of Confluent's own serializers, decoded by the schemas of a real registry.

Confluent's deserializers say what each value is. Then registry and broker are gone, and the same
values are decoded from what the disk has, with the schemas of its topic `_schemas`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

import kafkalog
from kafkalog.errors import SchemaNotFoundError
from tests import registry_topic, spark_peers
from tests.conformance import order_schemas as orders
from tests.conformance.kafka import KafkaBroker
from tests.schema_registry_server import SchemaRegistryServer

pytestmark = [pytest.mark.peers, pytest.mark.spark, pytest.mark.slow]

RECORDS = 100_000 if os.environ.get("KAFKALOG_TWIN") == "full" else 3000
TOPIC = "order"
SUBJECT = f"{TOPIC}-value"


def references() -> list[SchemaReference]:
    return [
        SchemaReference("com.a.Address", orders.ADDRESS_SUBJECT, 1),
        SchemaReference("com.m.Money", orders.MONEY_SUBJECT, 1),
    ]


def written(broker: KafkaBroker, client: SchemaRegistryClient) -> list[dict[str, Any]]:
    """Register 30 versions, write records of each, and return what Confluent reads of them."""
    client.register_schema(orders.MONEY_SUBJECT, Schema(orders.text(orders.MONEY), "AVRO"))
    money = SchemaReference("com.m.Money", orders.MONEY_SUBJECT, 1)
    client.register_schema(
        orders.ADDRESS_SUBJECT, Schema(orders.text(orders.address()), "AVRO", [money])
    )
    key_context = SerializationContext(TOPIC, MessageField.KEY)
    context = SerializationContext(TOPIC, MessageField.VALUE)
    write_key = AvroSerializer(client, orders.text(orders.KEY))
    writers = [
        AvroSerializer(client, Schema(orders.text(orders.version(n)), "AVRO", references()))
        for n in range(1, orders.VERSIONS + 1)
    ]
    last = Schema(orders.text(orders.version(orders.VERSIONS)), "AVRO", references())
    read = AvroDeserializer(client, last)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 50})
    expected: list[dict[str, Any]] = []
    for number in range(RECORDS):
        own = number % orders.VERSIONS
        key = {"region": "eu", "no": number}
        value = writers[own](orders.record(own + 1, number), context)
        producer.produce(TOPIC, key=write_key(key, key_context), value=value)
        decoded: Any = read(value, context)
        expected.append({**key, **decoded})
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush(60)
    return expected


def write_registry(broker: KafkaBroker, client: SchemaRegistryClient) -> int:
    """Write the registry's topic as Confluent's writes it; return how many records it got."""
    config = {"cleanup.policy": "compact", "segment.bytes": "1048576", "segment.ms": "200",
              "min.cleanable.dirty.ratio": "0.01"}  # fmt: skip
    broker.create_topic("_schemas", config=config)
    records = [registry_topic.noop(), registry_topic.config(None, "NONE")]
    gone = '{"type":"record","name":"Gone","fields":[]}'
    records += [registry_topic.schema("gone-value", 1, 900, gone)]
    for subject in (
        orders.MONEY_SUBJECT, orders.ADDRESS_SUBJECT, f"{TOPIC}-key", SUBJECT,
    ):  # fmt: skip
        for version in client.get_versions(subject):
            found = client.get_version(subject, version)
            used = [(r.name, r.subject, r.version) for r in found.schema.references or ()]
            arguments = (subject, version, found.schema_id, found.schema.schema_str, *used)
            records.append(registry_topic.schema(*arguments))
            if subject == SUBJECT and version in {3, 4}:
                records.append(registry_topic.schema(*arguments, deleted=True))
    records += [
        registry_topic.subject_deleted("gone-value", 1),
        registry_topic.hard_deleted("gone-value", 1),
        registry_topic.subject_deleted(SUBJECT, 2),
        *[registry_topic.noop(), registry_topic.config(None, "BACKWARD")] * 5,
    ]
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for key, value in records:
        producer.produce("_schemas", key=key, value=value)
    producer.flush(60)
    return len(records)


@contextmanager
def decoding(path: Path, output: Path) -> Iterator[Any]:
    """Yield a function from a registry's arguments to the rows by offset."""
    arguments = [spark_peers.avro_package(), str(path), TOPIC, str(output / "rows")]
    with (output / "errors").open("w") as errors:
        job = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.registry_job", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

        def rows(**registry: Any) -> dict[int, dict[str, Any]]:
            assert job.stdin is not None
            assert job.stdout is not None
            job.stdin.write(json.dumps(registry) + "\n")
            job.stdin.flush()
            answer = job.stdout.readline()
            assert answer == "done\n", (output / "errors").read_text()[-3000:]
            found: dict[int, dict[str, Any]] = pickle.loads((output / "rows").read_bytes())
            return found

        try:
            yield rows
        finally:
            job.stdin.close() if job.stdin else None
            job.wait(120)
            job.stdout.close() if job.stdout else None


def plain(value: Any) -> Any:
    """Return a value without what differs by nature: time zones, and the ends of a tree."""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC)
    if isinstance(value, dict):
        return {
            name: plain(each) for name, each in value.items() if name != "next" or each is not None
        }
    return [plain(each) for each in value] if isinstance(value, list) else value


def compare(found: dict[int, dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert sorted(found) == list(range(len(expected)))
    for offset, row in found.items():
        assert row.pop("bad") is None, (offset, row)
        del row["offset"], row["topic"]
        assert plain(row) == plain(expected[offset]), offset


def compare_schemas(registry: kafkalog.SchemaRegistry, client: SchemaRegistryClient) -> None:
    """Compare what we say of subjects and ids with what Confluent's client says."""
    numbers = client.get_versions(SUBJECT)
    assert len(numbers) == orders.VERSIONS
    ids = [client.get_version(SUBJECT, number).schema_id for number in numbers]
    assert [version.id for version in registry.versions(SUBJECT)] == ids
    assert registry.latest(SUBJECT).id == ids[-1]
    assert registry.register("key-copy", orders.text(orders.KEY)) == registry.latest("key-copy").id
    for missing in (lambda: registry.schema(10**6), lambda: registry.latest("none")):
        with pytest.raises(SchemaNotFoundError):
            missing()


def test_framed_values_are_what_confluents_deserializers_say_also_from_a_dead_disk(
    kafka: KafkaBroker, schema_registry: SchemaRegistryServer, tmp_path: Path
) -> None:
    client = SchemaRegistryClient({"url": schema_registry.url})
    kafka.create_topic(TOPIC)
    path = kafka.log_dir
    with decoding(path, tmp_path) as rows:
        expected = written(kafka, client)
        count = write_registry(kafka, client)

        def ends(topic: str) -> tuple[int, int]:
            with kafkalog.open(path) as log:
                return log.offsets(topic)[0]

        kafka.wait_until(lambda: ends(TOPIC)[1] == len(expected))
        compare(rows(url=schema_registry.url), expected)
        compare_schemas(kafkalog.SchemaRegistry(schema_registry.url), client)

        def left() -> int:
            with kafkalog.open(path) as log:
                return sum(batch.num_rows for batch in log.read("_schemas", 0))

        # The next record closes the segment, so that the broker's cleaner takes it.
        producer = Producer({"bootstrap.servers": kafka.bootstrap})

        def is_compacted() -> bool:
            key, value = registry_topic.noop()
            producer.produce("_schemas", key=key, value=value)
            producer.flush(10)
            return ends("_schemas")[1] > count + 1 and left() < count

        kafka.wait_until(is_compacted, 60)
        kafka.stop()
        try:
            schema_registry.stop()
            compare(rows(path=str(path)), expected)
            registry = kafkalog.SchemaRegistry(path=path)
            assert len(registry.versions(SUBJECT)) == orders.VERSIONS
            with pytest.raises(SchemaNotFoundError):
                registry.latest("gone-value")
        finally:
            kafka.start()


def test_ids_of_deleted_versions_are_known_as_long_as_the_registry_knows_them(
    schema_registry: SchemaRegistryServer,
) -> None:
    client = SchemaRegistryClient({"url": schema_registry.url})

    def schema(fields: int) -> Schema:
        named = [{"name": f"f{n}", "type": "int", "default": 0} for n in range(fields)]
        return Schema(orders.text({"type": "record", "name": "Row", "fields": named}), "AVRO")

    ids = [client.register_schema(SUBJECT, schema(fields)) for fields in (1, 2, 3)]
    assert client.register_schema("other-value", schema(2)) == ids[1]

    def known() -> list[int]:
        """Return the ids that a registry has which was asked for none before."""
        registry = kafkalog.SchemaRegistry(schema_registry.url)
        found = []
        for number in ids:
            try:
                registry.schema(number)
            except SchemaNotFoundError as fault:
                assert f"no schema of the id {number}" in str(fault)
            else:
                found.append(number)
        return found

    client.delete_version(SUBJECT, 3)
    assert known() == ids
    registry = kafkalog.SchemaRegistry(schema_registry.url)
    assert [version.id for version in registry.versions(SUBJECT)] == ids
    assert registry.latest(SUBJECT).id == ids[1]
    client.delete_version(SUBJECT, 3, permanent=True)
    assert known() == ids[:2]
    client.delete_subject(SUBJECT)
    assert known() == ids[:2]
    client.delete_subject(SUBJECT, permanent=True)
    assert known() == [ids[1]]  # as that of the other subject
    for missing in (registry.latest, registry.versions):
        with pytest.raises(SchemaNotFoundError):
            missing(SUBJECT)
