"""Schemas that the caller has by id."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kafkalog.errors import InvalidInputError, SchemaNotFoundError
from kafkalog.values.avro_references import parsed
from kafkalog.values.registered_schema import RegisteredSchema


class GivenSchemas:
    """Avro schemas by id, those of one subject: the one with the highest id is the latest."""

    def __init__(self, schemas: Mapping[int, str]) -> None:
        if not isinstance(schemas, Mapping):
            raise InvalidInputError(
                "SchemaRegistry: expected schemas as {7: '...'}, the text of each by its id, "
                f"found {schemas!r}"
            )
        self._schemas: dict[int, RegisteredSchema] = {}
        for number, text in sorted(schemas.items()):
            if not isinstance(number, int) or not isinstance(text, str):
                raise InvalidInputError(
                    "SchemaRegistry: expected schemas as {7: '...'}, the text of each by its id, "
                    f"found {type(number).__name__}: {type(text).__name__}"
                )
            parsed(text)
            self._schemas[number] = RegisteredSchema(number, "AVRO", text)

    def __str__(self) -> str:
        return "the given schemas"

    def text(self) -> str:
        """Return all ids with their schemas, as JSON."""
        return json.dumps({number: each.text for number, each in self._schemas.items()})

    def schema(self, number: int) -> RegisteredSchema:
        """Return the schema of an id; raises SchemaNotFoundError."""
        if number not in self._schemas:
            raise SchemaNotFoundError(
                f"{self}: there is no schema of the id {number} (the ids are: "
                f"{', '.join(map(str, self._schemas))}). Add it."
            )
        return self._schemas[number]

    def versions(self, subject: str) -> list[RegisteredSchema]:
        """Return all schemas, whatever the subject; raises SchemaNotFoundError."""
        if not self._schemas:
            raise SchemaNotFoundError(f"{self}: there is none for the subject {subject!r}. Add it.")
        return list(self._schemas.values())

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the schema with the highest id; raises SchemaNotFoundError."""
        return self.versions(subject)[-1]

    def ids(self) -> frozenset[int]:
        """Return the ids."""
        return frozenset(self._schemas)
