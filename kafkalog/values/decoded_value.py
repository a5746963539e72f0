"""One value as a Python object, without Spark, for lookups."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError, SchemaNotFoundError, SchemaRegistryError
from kafkalog.extras import install_command
from kafkalog.values.framing import HEAD_SIZE
from kafkalog.values.spark_avro import schema_of

if TYPE_CHECKING:
    from kafkalog.values.schema_registry import SchemaRegistry


def json_document(value: bytes, where: str) -> Any:
    """Return a JSON document; the five bytes of a framed one are passed over.

    Raises InvalidInputError that begins with `where`.
    """
    try:
        return json.loads(value[HEAD_SIZE:] if value[:1] == b"\0" else value)
    except (ValueError, RecursionError) as fault:
        raise InvalidInputError(
            f"{where}: the value is not a JSON document ({fault}; found {value[:40]!r})"
        ) from None


def avro_document(
    value: bytes, where: str, avro: str | SchemaRegistry, reader: str | None = None
) -> Any:
    """Return an Avro value as fastavro decodes it, read to its last byte.

    `avro` is the schema of a bare value, or the registry of framed ones. Raises InvalidInputError
    that begins with `where`.
    """
    as_reader = None if reader is None else schema_of(reader)
    if not isinstance(avro, str):
        if len(value) < HEAD_SIZE or value[0] != 0 or value[1] > 0x7F:
            raise InvalidInputError(
                f"{where}: the value is not framed (expected a zero byte and a schema id before "
                f"Avro, found {value[:20]!r}). Give avro= the schema of bare values."
            )
        try:
            schema = avro.schema(int.from_bytes(value[1:HEAD_SIZE]))
        except (SchemaNotFoundError, InvalidInputError) as fault:
            raise InvalidInputError(f"{where}: {fault}") from None
        except SchemaRegistryError as fault:
            raise SchemaRegistryError(f"{where}: {fault}") from None
        if schema.kind != "AVRO":
            raise InvalidInputError(
                f"{where}: schema {schema.id} of the value is one of {schema.kind} (expected Avro)"
            )
        return _read(value[HEAD_SIZE:], where, schema_of(schema.text), as_reader)
    schema_text = schema_of(avro)
    is_framed = len(value) > HEAD_SIZE and value[0] == 0 and value[1] <= 0x7F
    if is_framed and _fits(value[HEAD_SIZE:], schema_text):
        raise InvalidInputError(
            f"{where}: the value is framed (expected Avro of the schema alone, found a zero byte "
            f"and the schema id {int.from_bytes(value[1:HEAD_SIZE])}). Give avro= a SchemaRegistry."
        )
    return _read(value, where, schema_text, as_reader)


def _fits(body: bytes, schema: Any) -> bool:
    try:
        _read(body, "", schema, None)
    except InvalidInputError:
        return False
    return True


def _read(body: bytes, where: str, schema: Any, reader: Any) -> Any:
    try:
        import fastavro
    except ImportError:
        command = install_command("schema-registry")
        raise InvalidInputError(f"lookups of Avro need the package fastavro: {command}") from None
    stream = io.BytesIO(body)
    try:
        found = fastavro.schemaless_reader(
            stream, fastavro.parse_schema(schema), None if reader is None else reader
        )
    except Exception as fault:  # fastavro has many kinds
        raise InvalidInputError(f"{where}: the value is not Avro of its schema ({fault})") from None
    if stream.tell() != len(body):
        raise InvalidInputError(
            f"{where}: the value is not Avro of its schema (expected {stream.tell()} bytes, found "
            f"{len(body)})"
        )
    return found
