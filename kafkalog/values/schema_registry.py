"""Where the schemas of framed values come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kafkalog.errors import InvalidInputError
from kafkalog.values.given_schemas import GivenSchemas
from kafkalog.values.registered_schema import RegisteredSchema, SchemaKind


class SchemaSource(Protocol):
    """What a registry is asked, wherever its schemas lie."""

    def schema(self, number: int, /) -> RegisteredSchema:
        """Return the schema of an id; raises SchemaNotFoundError."""

    def versions(self, subject: str, /) -> list[RegisteredSchema]:
        """Return all versions, the oldest first; raises SchemaNotFoundError."""

    def latest(self, subject: str, /) -> RegisteredSchema:
        """Return the latest version that is not deleted; raises SchemaNotFoundError."""

    def ids(self) -> frozenset[int]:
        """Return the ids that are known without asking anybody."""


class SchemaRegistry:
    """The schemas of framed values, by id and by subject."""

    def __init__(self, *, schemas: Mapping[int, str]) -> None:
        self._source: SchemaSource = GivenSchemas(schemas)

    def schema(self, id: int) -> RegisteredSchema:
        """Return the schema of an id, also one of a deleted version.

        Raises SchemaNotFoundError.
        """
        return self._source.schema(id)

    def versions(self, subject: str) -> list[RegisteredSchema]:
        """Return all versions of a subject, also deleted ones, the oldest first.

        Raises SchemaNotFoundError for an unknown subject.
        """
        return self._source.versions(subject)

    def latest(self, subject: str) -> RegisteredSchema:
        """Return a subject's latest version that is not deleted.

        Raises SchemaNotFoundError for a subject that is unknown or deleted.
        """
        return self._source.latest(subject)

    def ids(self) -> frozenset[int]:
        """Return the ids that are known without asking a server."""
        return self._source.ids()

    def register(self, subject: str, text: str, kind: SchemaKind = "AVRO") -> int:
        """Register a schema with a subject, and return its id."""
        raise InvalidInputError(
            f"{self._source}: nothing can be registered there. Use the registry's URL."
        )
