"""The source of the schemas of framed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from kafkalog.errors import InvalidInputError
from kafkalog.values.given_schemas import GivenSchemas
from kafkalog.values.registered_schema import RegisteredSchema, SchemaKind
from kafkalog.values.registry_server import RegistryServer
from kafkalog.values.schemas_topic import SchemasTopic

_TOPIC: Final = "_schemas"


class SchemaSource(Protocol):
    """The questions to a registry, wherever its schemas lie."""

    def schema(self, number: int, /) -> RegisteredSchema:
        """Return the schema of an id; raises SchemaNotFoundError."""

    def versions(self, subject: str, /) -> list[RegisteredSchema]:
        """Return all versions, the oldest first; raises SchemaNotFoundError."""

    def latest(self, subject: str, /) -> RegisteredSchema:
        """Return the latest version that is not deleted; raises SchemaNotFoundError."""

    def ids(self) -> frozenset[int]:
        """Return the ids that are known without asking a server."""


class SchemaRegistry:
    """The schemas of framed values, by id and by subject.

        SchemaRegistry("https://host:8081", config={"basic.auth.user.info": "me:secret"})
        SchemaRegistry(path="/rescued/disk")  # the topic _schemas of a log: nothing has to run
        SchemaRegistry(schemas={7: '{"type": "record", ...}'})

    `config` is that of Confluent's client: `ssl.*`, `basic.auth.*`, `bearer.auth.*`, `proxy`,
    `timeout` (seconds, 30), `max.retries`. `path` is that of `kafkalog.open`, with its `options`.
    The latest version of a subject is that of the moment of asking; an id is asked for once. Given
    `schemas` are Avro and have no subjects: the highest id is the latest of any.

    Only the driver asks a registry. It can be pickled, as Spark Connect does with a function of
    `foreachBatch`; secrets of `config` are then in the pickle, and nowhere else: no plan, error,
    or `repr` has them.

    Raises InvalidInputError for arguments that do not fit together, or without Confluent's client;
    with `path` also UnknownTopicError and what reading a log raises. Every method raises
    SchemaRegistryError if a server does not answer or refuses.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        path: str | Path | Sequence[str | Path] | None = None,
        topic: str = _TOPIC,
        options: Mapping[str, str] | None = None,
        schemas: Mapping[int, str] | None = None,
    ) -> None:
        self._server: RegistryServer | None = None
        if [url, path, schemas].count(None) != 2:
            raise InvalidInputError("SchemaRegistry: give one of a URL, path= and schemas=")
        if url is not None and not isinstance(url, str):
            raise InvalidInputError(f"SchemaRegistry: expected the text of a URL, found {url!r}")
        if config is not None and url is None:
            raise InvalidInputError("SchemaRegistry: config= belongs to a URL")
        if path is None and (options is not None or topic != _TOPIC):
            raise InvalidInputError(
                "SchemaRegistry: topic= and options= belong to path=. Give it, or leave them out."
            )
        self._source: SchemaSource
        if url is not None:
            self._source = self._server = RegistryServer(url, config or {})
        elif path is not None:
            self._source = SchemasTopic(path, topic, options)
        else:
            assert schemas is not None
            self._source = GivenSchemas(schemas)

    def __repr__(self) -> str:
        return f"SchemaRegistry({self._source})"

    @property
    def identity(self) -> str:
        """Its mark among registries: its place without secrets, or all given schemas."""
        given = self._source
        return given.text() if isinstance(given, GivenSchemas) else repr(self)

    @property
    def has_subjects(self) -> bool:
        """Whether it knows whose its schemas are; those given by id belong to no subject."""
        return not isinstance(self._source, GivenSchemas)

    def schema(self, id: int) -> RegisteredSchema:
        """Return the schema of an id, also one of a deleted version.

        A version that was deleted permanently has none, as in Confluent's registry. Raises
        SchemaNotFoundError.
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
        """Register a schema with a subject, and return its id.

        Raises SchemaRegistryError if the registry refuses, and InvalidInputError without a URL.
        """
        if self._server is None:
            raise InvalidInputError(
                f"{self._source}: nothing can be registered there. Use the registry's URL."
            )
        return self._server.register(subject, text, kind)
