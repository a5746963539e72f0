"""A schema as a registry has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SchemaKind: TypeAlias = Literal["AVRO", "JSON", "PROTOBUF"]


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema and its id, which never gets another meaning.

    An Avro `text` is self-contained: each type of a reference is written out where it is used
    first. The text of another kind is as it was registered.
    """

    id: int
    kind: SchemaKind
    text: str
