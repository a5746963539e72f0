"""A session with Spark's Avro package and Delta Lake, and values to decode in it."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest

import kafkalog
from kafkalog.errors import SchemaNotFoundError
from kafkalog.values.registered_schema import RegisteredSchema
from tests import delta_spark
from tests.spark_home import quick_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield one session for all rules of the process."""
    session = quick_session(tmp_path_factory.mktemp("spark"), delta_spark.settings())
    yield session
    session.stop()


def record(name: str, *fields: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of a record; a field is (name, type), or a dict."""
    named = [{"name": f[0], "type": f[1]} if isinstance(f, tuple) else f for f in fields]
    return {"type": "record", "name": name, "fields": named, **more}


def body(schema: Any, value: Any) -> bytes:
    """Return a value as fastavro encodes it."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(copied(schema)), value)
    return stream.getvalue()


def framed(number: int, schema: Any, value: Any) -> bytes:
    return b"\0" + struct.pack(">I", number) + body(schema, value)


def copied(schema: Any) -> Any:
    """Return a schema that fastavro may change."""
    return json.loads(json.dumps(schema))


def given(schemas: dict[int, Any]) -> kafkalog.SchemaRegistry:
    return kafkalog.SchemaRegistry(schemas={n: json.dumps(each) for n, each in schemas.items()})


class Subjects:
    """A registry's schemas, which a test changes while a query runs."""

    def __init__(self) -> None:
        self.by_subject: dict[str, list[RegisteredSchema]] = {}

    def register(self, subject: str, number: int, schema: Any, kind: Any = "AVRO") -> None:
        text = json.dumps(schema)
        self.by_subject.setdefault(subject, []).append(RegisteredSchema(number, kind, text))

    def schema(self, number: int) -> RegisteredSchema:
        for versions in self.by_subject.values():
            for each in versions:
                if each.id == number:
                    return each
        raise SchemaNotFoundError(f"there is no schema {number}")

    def versions(self, subject: str) -> list[RegisteredSchema]:
        if subject not in self.by_subject:
            raise SchemaNotFoundError(f"there is no subject {subject}")
        return self.by_subject[subject]

    def latest(self, subject: str) -> RegisteredSchema:
        return self.versions(subject)[-1]

    def ids(self) -> frozenset[int]:
        return frozenset()


def registry_of(subjects: Subjects) -> kafkalog.SchemaRegistry:
    """Return a registry with these schemas, as if a server had them."""
    registry = kafkalog.SchemaRegistry(schemas={})
    registry._source = subjects
    return registry


def frame_of(spark: Any, *records: tuple[bytes | None, bytes | None]) -> Any:
    """Return records of the partition t-0, as the source gives them."""
    rows = [
        (*(None if each is None else bytearray(each) for each in both), "t", 0, offset)
        for offset, both in enumerate(records)
    ]
    columns = "key binary, value binary, topic string, partition int, offset bigint"
    return spark.createDataFrame(rows, columns)


def values_of(spark: Any, *values: bytes | None) -> Any:
    return frame_of(spark, *[(b"k", value) for value in values])


def log_of(path: Path, topic: str, records: list[tuple[bytes, bytes | None]]) -> None:
    """Append to a topic of the log at a path, which may be new."""
    with kafkalog.open(path) as log:
        log.create_topic(topic, config={"cleanup.policy": "compact"}, exist_ok=True)
        log.append(topic, records)
