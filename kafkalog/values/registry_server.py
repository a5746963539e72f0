"""A schema registry that runs: one with Confluent's API, asked by Confluent's client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kafkalog.errors import InvalidInputError, SchemaNotFoundError, SchemaRegistryError
from kafkalog.extras import install_command
from kafkalog.values.registered_schema import RegisteredSchema, SchemaKind
from kafkalog.values.subject_version import Reference, SubjectVersion

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

_TIMEOUT_SECONDS: Final = 30
"""The client's own default is to wait for ever."""
_NOT_FOUND: Final = (40401, 40402, 40403)
"""No such subject, version, schema (Confluent's API reference, "Errors")."""


class RegistryServer:
    """The schemas of a registry's URL, or of several that are one registry, between commas.

    Schemas are kept by id, because an id never gets another meaning; the latest version is asked
    for each time. A copy for another process has them too, and the configuration with its secrets.
    """

    def __init__(self, url: str, config: Mapping[str, Any]) -> None:
        self._url = url
        self._config = dict(config)
        self._shown = ",".join(map(_without_secrets, url.split(",")))
        self._known: dict[int, RegisteredSchema] = {}
        self._mutex = threading.Lock()
        self._client: SchemaRegistryClient | None = None
        self._connected()

    def __str__(self) -> str:
        return self._shown

    def __getstate__(self) -> tuple[str, dict[str, Any], dict[int, RegisteredSchema]]:
        return self._url, self._config, self._known

    def __setstate__(self, state: tuple[str, dict[str, Any], dict[int, RegisteredSchema]]) -> None:
        url, config, known = state
        self.__init__(url, config)  # type: ignore[misc]  # a new client, by the same rules
        self._known = known

    def schema(self, number: int) -> RegisteredSchema:
        """Return the schema of an id; asks the server once.

        Raises SchemaNotFoundError and SchemaRegistryError.
        """
        if number not in self._known:
            with self._asking(f"schema of the id {number}"):
                found = self._connected().get_schema(number)
                version = _version("", 0, number, found)
            self._known[number] = version.with_types(self._find)
        return self._known[number]

    def versions(self, subject: str) -> list[RegisteredSchema]:
        """Return all versions of a subject, deleted ones included; asks for each once."""
        with self._asking(f"subject {subject!r}"):
            numbers = sorted(self._connected().get_versions(subject, deleted=True))
        return [self._whole(self._find(subject, number)) for number in numbers]

    def latest(self, subject: str) -> RegisteredSchema:
        """Return a subject's latest version that is not deleted."""
        with self._asking(f"subject {subject!r} with a version that is not deleted"):
            found = self._connected().get_version(subject, "latest")
            version = _version(subject, found.version, found.schema_id, found.schema)
        return self._whole(version)

    def ids(self) -> frozenset[int]:
        """Return the ids that were asked for."""
        return frozenset(self._known)

    def register(self, subject: str, text: str, kind: SchemaKind) -> int:
        """Register a schema with a subject, and return its id.

        Raises SchemaRegistryError, also for a schema that the subject's compatibility forbids.
        """
        from confluent_kafka.schema_registry import Schema

        with self._asking(f"registration with the subject {subject!r}"):
            return int(self._connected().register_schema(subject, Schema(text, kind)))

    def _find(self, subject: str, number: int, _: str = "") -> SubjectVersion:
        with self._asking(f"version {number} of the subject {subject!r}"):
            found = self._connected().get_version(subject, number, deleted=True)
            return _version(subject, number, found.schema_id, found.schema)

    def _whole(self, version: SubjectVersion) -> RegisteredSchema:
        if version.id not in self._known:
            self._known[version.id] = version.with_types(self._find)
        return self._known[version.id]

    def _connected(self) -> SchemaRegistryClient:
        with self._mutex:
            if self._client is None:
                self._client = _client(self._url, self._config)
            return self._client

    @contextlib.contextmanager
    def _asking(self, wanted: str) -> Iterator[None]:
        """Raise the client's errors as ours, without a secret; they say what is `wanted`."""
        from confluent_kafka.schema_registry import error

        try:
            yield
        except error.SchemaRegistryError as fault:
            if fault.error_code in _NOT_FOUND:
                raise SchemaNotFoundError(f"{self}: there is no {wanted}.") from None
            raise SchemaRegistryError(f"{self}: no {wanted}: {_refusal(fault)}") from None
        except error.OAuthTokenError as fault:
            raise SchemaRegistryError(
                f"{self}: no {wanted}: there is no OAuth token for the registry. Set bearer.auth.* "
                "in config="
            ) from fault
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise SchemaRegistryError(
                f"{self}: no {wanted}: the answer is not a schema registry's "
                f"({type(fault).__name__}). Give the URL under which Confluent's API is."
            ) from fault
        except Exception as fault:
            if not isinstance(fault, OSError) and "httpx" not in type(fault).__module__:
                raise
            reason = f"{type(fault).__name__}: {fault}".replace(self._url, self._shown)
            raise SchemaRegistryError(
                f"{self}: no {wanted}: the schema registry cannot be reached ({reason}). Check the "
                "URL and the ssl.* of config=, and start again once it answers."
            ) from None


def _refusal(fault: Any) -> str:
    status = fault.http_status_code
    if status in {401, 403}:
        return (
            f"the schema registry refuses (HTTP {status}). Give credentials that may read it, such "
            "as config={'basic.auth.user.info': 'name:password'}."
        )
    if status == 404:
        return (
            f"there is no schema registry (HTTP {status}). Give the URL under which Confluent's "
            "API is."
        )
    if 300 <= status < 400:
        return f"the server redirects (HTTP {status}). Give the URL to which it leads."
    return f"the schema registry answers HTTP {status}: {fault.error_message}"


def _client(url: str, config: Mapping[str, Any]) -> SchemaRegistryClient:
    """Return Confluent's client; raises InvalidInputError for a wrong configuration."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as fault:
        raise InvalidInputError(
            f"SchemaRegistry(url) needs Confluent's client: {install_command('schema-registry')} "
            f"({fault})"
        ) from fault
    wrong = [each for each in url.split(",") if not _is_url(each.strip())]
    if wrong:
        raise InvalidInputError(
            f"SchemaRegistry: expected an http or https URL, found {_without_secrets(wrong[0])!r}"
        )
    try:
        return SchemaRegistryClient({"timeout": _TIMEOUT_SECONDS, **config, "url": url})
    except (ValueError, TypeError, OSError) as fault:  # the secrets are in no text of these
        raise InvalidInputError(
            f"SchemaRegistry: config= is not what Confluent's client takes: {fault}"
        ) from fault


def _is_url(given: str) -> bool:
    try:
        parts = urlsplit(given)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # as for an address without its bracket, or a port beyond 65535
        return False


def _without_secrets(url: str) -> str:
    """Return a URL without its user and password."""
    start, separator, rest = url.strip().partition("://")
    authority, slash, path = rest.partition("/")
    return f"{start}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _version(subject: str, version: Any, number: Any, schema: Any) -> SubjectVersion:
    """Return what the client has read; raises TypeError for an answer without a schema."""
    if not isinstance(schema.schema_str, str):
        raise TypeError("no schema")
    references = tuple(Reference(each.subject, each.version) for each in schema.references or ())
    kind = schema.schema_type or "AVRO"
    return SubjectVersion(subject, version, number, kind, schema.schema_str, references)
