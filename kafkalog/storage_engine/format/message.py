"""Decode a message of Kafka's by its definition: a record of its own topics, or a control record.

`messages.json` has the definitions of all messages of Kafka's internal topics, its metadata log and
its control records. `tests/conformance/message_table.py` makes it from the jars of a release.
Kafka's definitions keep the versions of earlier releases, so the table has them too.

A field is there in some `versions`. In *flexible* versions lengths are compact, and tagged fields
follow the others. A tagged field with its default, or without a byte, is left out, as Kafka's
JSON converters do.

Kafka: org.apache.kafka.message (the generator), CoordinatorRecordSerde, MetadataRecordSerde,
KIP-482, KIP-915.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.message_fields import MessageFields

Message: TypeAlias = dict[str, Any]
"""The fields of a message by Kafka's JSON names: numbers, text, bytes, lists, dicts, None."""

_VERSION_SIZE: Final = 2
_FOREVER: Final = 1 << 15
_INTEGERS: Final = {
    "int8": (1, True),
    "int16": (2, True),
    "uint16": (2, False),
    "int32": (4, True),
    "int64": (8, True),
}


class UnknownVersionError(ValueError):
    """A message has a version that no release had when the table was made."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: str
    versions: range
    nullable: range
    tag: int | None
    default: Any
    fields: Sequence[_Field] = ()


@dataclass(frozen=True, slots=True)
class _Definition:
    versions: range
    flexible: range
    fields: Sequence[_Field]


@dataclass(frozen=True, slots=True)
class _Table:
    records: Mapping[str, Mapping[int, str]]
    definitions: Mapping[str, _Definition] = field(repr=False)


def record_name(topic: str, number: int) -> str | None:
    """Return the name of a type of record of an internal topic; None for an unknown one."""
    return _table().records[topic].get(number)


def read_message(name: str, version: int, data: bytes, start: int = 0) -> tuple[Message, int]:
    """Return the fields of a message that begins at byte `start`, and where it ends.

    Raises ValueError, which names the field, for bytes that do not fit, and UnknownVersionError.
    """
    definition = _table().definitions[name]
    if version not in definition.versions:
        known = definition.versions
        raise UnknownVersionError(
            f"expected {name} of version {known[0]} to {known[-1]}, found version {version}"
        )
    fields = MessageFields(data)
    fields.position = start
    found = _Reading(fields, version, version in definition.flexible).struct(definition.fields)
    return found, fields.position


def read_key(topic: str, key: bytes) -> tuple[int, str | None, Message]:
    """Return the number and the name of a record's type, and the fields of its key.

    An unknown type has no name (None) and no fields here. Raises ValueError.
    """
    number = _version(key)
    name = record_name(topic, number)
    if name is None:
        return number, None, {}
    return number, name, read_message(f"{name}Key", 0, key, _VERSION_SIZE)[0]


def read_value(name: str, value: bytes) -> tuple[int, Message]:
    """Return the version and the fields of the value of a record of an internal topic.

    Raises ValueError, and UnknownVersionError.
    """
    version = _version(value)
    return version, read_message(f"{name}Value", version, value, _VERSION_SIZE)[0]


def read_versioned(name: str, data: bytes) -> tuple[int, Message]:
    """Return version and fields of a message that begins with its version, of any later one too.

    Later versions of the consumer protocol only add fields at the end. Raises ValueError.
    Kafka: ConsumerProtocol.
    """
    version = _version(data)
    known = _table().definitions[name].versions
    if version < 0:
        raise ValueError(f"expected a version from 0 on, found {version}")
    return version, read_message(name, min(version, known[-1]), data, _VERSION_SIZE)[0]


def read_metadata(
    value: bytes, topic: str = layout.METADATA_TOPIC
) -> tuple[int, str | None, int, Message]:
    """Return the api key, the name, the version and the fields of a record of KRaft's metadata.

    The records of `__remote_log_metadata` have the same frame. For an unknown type the name is
    None. Raises ValueError, also for bytes after the message.
    Kafka: MetadataRecordSerde, RemoteLogMetadataSerde.
    """
    fields = MessageFields(value)
    frame, number, version = fields.unsigned(), fields.unsigned(), fields.unsigned()
    if frame != layout.METADATA_FRAME_VERSION:
        raise ValueError(
            f"expected the frame version {layout.METADATA_FRAME_VERSION}, found {frame}"
        )
    name = record_name(topic, number)
    if name is None:
        return number, None, version, {}
    found, end = read_message(name, version, value, fields.position)
    if end != len(value):
        raise ValueError(f"expected the end of {name} at byte {end}, found {len(value)} bytes")
    return number, name, version, found


def _version(data: bytes) -> int:
    if len(data) < _VERSION_SIZE:
        raise ValueError(f"expected {_VERSION_SIZE} bytes of a version, found {len(data)}")
    return int.from_bytes(data[:_VERSION_SIZE], "big", signed=True)


class _Reading:
    """Read one message of one version."""

    def __init__(self, fields: MessageFields, version: int, is_flexible: bool) -> None:
        self._fields = fields
        self._version = version
        self._is_flexible = is_flexible

    def struct(self, definitions: Sequence[_Field]) -> Message:
        found: Message = {}
        tagged: dict[int, _Field] = {}
        for known in definitions:
            if self._version not in known.versions:
                continue
            if known.tag is not None:
                tagged[known.tag] = known
            else:
                found[known.name] = self._named(known)
        if not self._is_flexible:
            return found
        seen = self._tagged(tagged)
        if not seen:
            return found
        names = [known.name for known in definitions]
        return dict(sorted([*found.items(), *seen.items()], key=lambda item: names.index(item[0])))

    def _tagged(self, known: Mapping[int, _Field]) -> Message:
        found: Message = {}
        for _ in range(self._fields.unsigned()):
            tag, size = self._fields.unsigned(), self._fields.unsigned()
            if tag not in known:
                self._fields.bytes_of(size)
                continue
            value = self._named(known[tag])
            if value != known[tag].default:
                found[known[tag].name] = value
        return found

    def _named(self, known: _Field) -> Any:
        try:
            return self._value(known)
        except ValueError as fault:
            raise ValueError(f"{known.name}: {fault}") from None

    def _value(self, known: _Field) -> Any:
        kind = known.type
        if kind in _INTEGERS:
            size, signed = _INTEGERS[kind]
            return self._fields.integer(size, signed=signed)
        if kind == "bool":
            return self._fields.integer(1) != 0
        if kind == "float64":
            return layout.FLOAT64.unpack(self._fields.bytes_of(layout.FLOAT64.size))[0]
        if kind == "uuid":
            return self._fields.uuid()
        is_null = False
        count = 0
        if kind == "struct":
            is_null = self._version in known.nullable and self._is_null_struct(known)
        else:
            count = self._length(2 if kind == "string" else 4)
            is_null = count < 0
        if is_null:
            if self._version not in known.nullable:
                raise ValueError(
                    f"expected a {kind} before byte {self._fields.position}, found null"
                )
            return None
        if kind == "struct":
            return self.struct(known.fields)
        if kind == "string":
            return self._fields.bytes_of(count).decode("utf-8", "replace")
        if kind == "bytes":
            return self._fields.bytes_of(count)
        return self._array(known, count)

    def _is_null_struct(self, known: _Field) -> bool:
        if known.tag is None:
            return self._fields.integer(1) < 0
        return self._fields.unsigned() == 0

    def _length(self, size: int) -> int:
        return self._fields.unsigned() - 1 if self._is_flexible else self._fields.integer(size)

    def _array(self, known: _Field, count: int) -> list[Any]:
        left = self._fields.remaining
        if count > left:  # else a few bytes would cost much memory
            raise ValueError(f"expected {count} elements, found {left} bytes")
        element = _Field(
            known.name, known.type[2:], known.versions, range(0), None, None, known.fields
        )
        read: Callable[[], Any] = functools.partial(self._value, element)
        return [read() for _ in range(count)]


@functools.cache
def _table() -> _Table:
    data = pkgutil.get_data(__package__, "messages.json")
    assert data is not None
    given = json.loads(data)
    records = {
        topic: {int(number): name for number, name in names.items()}
        for topic, names in given["records"].items()
    }
    definitions = {
        name: _Definition(
            _range(message["versions"]), _range(message["flexible"]), _fields(message["fields"])
        )
        for name, message in given["messages"].items()
    }
    return _Table(records, definitions)


def _fields(given: Sequence[Mapping[str, Any]]) -> Sequence[_Field]:
    return tuple(
        _Field(
            each["name"],
            each["type"],
            _range(each["versions"]),
            _range(each.get("nullable", "none")),
            each.get("tag"),
            each.get("default"),
            _fields(each.get("fields", ())),
        )
        for each in given
    )


def _range(text: str) -> range:
    """Return the versions of `3`, `0-4`, `2+` or `none`."""
    match = re.fullmatch(r"(\d+)(?:(\+)|-(\d+))?", text)
    if match is None:
        return range(0)
    first, is_open, last = match.groups()
    return range(int(first), _FOREVER if is_open else int(last or first) + 1)
