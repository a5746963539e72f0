"""The records that Confluent's registry writes into its topic `_schemas`.

Keys and values as its SchemaKey, SchemaValue, DeleteSubjectKey, ClearSubjectKey, ConfigKey, ModeKey
and NoopKey have them, fields in their order.
"""

from __future__ import annotations

import json
from typing import Any

Record = tuple[bytes, bytes | None]


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def noop() -> Record:
    """What a registry writes to find the end of its topic."""
    return _text({"keytype": "NOOP", "magic": 0}), None


def config(subject: str | None, level: str) -> Record:
    """A compatibility level, of all subjects or of one."""
    key = {"keytype": "CONFIG", "subject": subject, "magic": 0}
    return _text(key), _text({"subject": subject, "compatibilityLevel": level})


def mode(subject: str | None, name: str) -> Record:
    """READWRITE, READONLY or IMPORT."""
    key = {"keytype": "MODE", "subject": subject, "magic": 0}
    return _text(key), _text({"subject": subject, "mode": name})


def schema(
    subject: str,
    version: int,
    id: int,
    text: str,
    *references: tuple[str, str, int],
    kind: str = "AVRO",
    deleted: bool = False,
) -> Record:
    """A version of a subject; a reference is (name, subject, version)."""
    value: dict[str, Any] = {"subject": subject, "version": version, "id": id}
    if kind != "AVRO":
        value["schemaType"] = kind
    if references:
        value["references"] = [
            {"name": name, "subject": other, "version": number}
            for name, other, number in references
        ]
    value |= {"schema": text, "deleted": deleted}
    return _key(subject, version), _text(value)


def hard_deleted(subject: str, version: int) -> Record:
    """A version that was deleted permanently."""
    return _key(subject, version), None


def subject_deleted(subject: str, version: int) -> Record:
    """A subject whose versions up to one were deleted."""
    key = {"keytype": "DELETE_SUBJECT", "subject": subject, "magic": 0}
    return _text(key), _text({"subject": subject, "version": version})


def subject_cleared(subject: str) -> Record:
    """A subject, or a context, whose deleted versions were forgotten."""
    key = {"keytype": "CLEAR_SUBJECT", "subject": subject, "magic": 0}
    return _text(key), _text({"subject": subject})


def _key(subject: str, version: int) -> bytes:
    return _text({"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1})
