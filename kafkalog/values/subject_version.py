"""A schema as one version of a subject, with the references that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

from kafkalog.errors import InvalidInputError, SchemaNotFoundError
from kafkalog.values.avro_references import self_contained
from kafkalog.values.registered_schema import RegisteredSchema, SchemaKind


class Reference(NamedTuple):
    """The version of a subject that a schema refers to."""

    subject: str
    version: int


@dataclass(frozen=True)
class SubjectVersion:
    """A version of a subject; an id that is read alone has the subject ''."""

    subject: str
    version: int
    id: int
    kind: str
    text: str
    references: tuple[Reference, ...] = ()
    is_deleted: bool = False

    def with_types(self, find: Find) -> RegisteredSchema:
        """Return the schema, an Avro text with the types of its references.

        Raises SchemaNotFoundError for a reference that is not there, and InvalidInputError for a
        text that is not a schema.
        """
        text = self.text
        if self.kind == "AVRO":
            try:
                text = self_contained(text, [found.text for found in _referenced([self], find)])
            except SchemaNotFoundError as fault:
                raise SchemaNotFoundError(f"schema {self.id} lacks a reference: {fault}") from None
            except InvalidInputError as fault:
                raise InvalidInputError(f"schema {self.id}: {fault}") from None
        return RegisteredSchema(self.id, cast(SchemaKind, self.kind), text)


Find: TypeAlias = Callable[[str, int, str], SubjectVersion]
"""From (subject, version, the subject that refers to it) to that version, deleted or not."""


def _referenced(referring: Sequence[SubjectVersion], find: Find) -> Iterator[SubjectVersion]:
    """Yield what schemas refer to, and what that refers to, each once."""
    seen: set[Reference] = set()
    waiting = list(referring)
    while waiting:
        each = waiting.pop()
        for reference in each.references:
            if reference not in seen:
                seen.add(reference)
                found = find(reference.subject, reference.version, each.subject)
                waiting.append(found)
                yield found
