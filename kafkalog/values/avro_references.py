"""An Avro schema with references becomes one text, which needs no other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from kafkalog.errors import InvalidInputError

_PRIMITIVE: Final = {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
_NAMED: Final = ("record", "error", "enum", "fixed")
_PARTS: Final = ("type", "items", "values")
"""The attributes of an unnamed type that hold other types."""


def self_contained(text: str, referenced: Iterable[str]) -> str:
    """Return a schema with each referenced type written out where it is used first.

    `referenced` are the texts of its references and of theirs. A text without references is
    returned as it is. Names are resolved as the Avro specification says ("Names"). Raises
    InvalidInputError for a text that is not a schema.
    """
    known: dict[str, Any] = {}
    try:
        for other in referenced:
            _collect(parsed(other), "", known)
        whole = parsed(text)
        return json.dumps(_written_out(whole, "", known, set())) if known else text
    except (KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise InvalidInputError(
            f"an Avro schema: expected what the specification says, found {text[:80]!r} "
            f"({type(fault).__name__}: {fault}). Give the schema's text."
        ) from None


def parsed(text: str) -> Any:
    """Return an Avro schema as JSON's values; a bare name of a type is one.

    Raises InvalidInputError.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if text.strip() in _PRIMITIVE:
            return text.strip()
        raise InvalidInputError(
            f"an Avro schema: expected JSON, found {text[:80]!r}. Give the schema's text."
        ) from None


def _full_name(schema: dict[str, Any], namespace: str) -> str:
    name: str = schema["name"]
    space = schema.get("namespace", namespace)
    return name if "." in name or not space else f"{space}.{name}"


def _collect(schema: Any, namespace: str, known: dict[str, Any]) -> None:
    """Put every named type of a schema into `known`, with its full name."""
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, namespace, known)
    elif isinstance(schema, dict):
        if schema.get("type") in _NAMED:
            full = _full_name(schema, namespace)
            namespace, _, name = full.rpartition(".")
            known.setdefault(full, {**schema, "name": name, "namespace": namespace})
            for field in schema.get("fields", ()):
                _collect(field["type"], namespace, known)
        else:
            for part in _PARTS:
                _collect(schema.get(part), namespace, known)


def _written_out(schema: Any, namespace: str, known: dict[str, Any], done: set[str]) -> Any:
    """Return a schema in which a name stands only for a type that is written out before it."""
    if isinstance(schema, list):
        return [_written_out(branch, namespace, known, done) for branch in schema]
    if isinstance(schema, str):
        if schema in _PRIMITIVE:
            return schema
        own = f"{namespace}.{schema}" if namespace and "." not in schema else schema
        full = own if own in done or own in known else schema
        if full in done or full not in known:
            return full
        return _written_out(known[full], "", known, done)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") not in _NAMED:
        parts = {part: schema[part] for part in _PARTS if part in schema}
        written = {part: _written_out(parts[part], namespace, known, done) for part in parts}
        return {**schema, **written}
    full = _full_name(schema, namespace)
    if full in done:
        return full
    done.add(full)
    space, _, name = full.rpartition(".")
    result = {**schema, "name": name, "namespace": space}
    if "fields" in schema:
        result["fields"] = [
            {**field, "type": _written_out(field["type"], space, known, done)}
            for field in schema["fields"]
        ]
    return result
