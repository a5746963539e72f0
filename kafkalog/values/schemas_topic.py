"""The schemas of a registry that need not run: those of its topic, `_schemas`, in a log."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kafkalog.errors import InvalidInputError, SchemaNotFoundError
from kafkalog.storage_engine.place import open_log
from kafkalog.values.registered_schema import RegisteredSchema
from kafkalog.values.registry_records import DEFAULT_CONTEXT, RegistryRecords, context_of
from kafkalog.values.subject_version import SubjectVersion


class SchemasTopic:
    """The schemas of a topic, as of its end when something is asked that is not known yet.

    Raises UnknownTopicError, InvalidInputError for a topic of several partitions, and what reading
    a log raises.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        topic: str,
        options: Mapping[str, str] | None,
    ) -> None:
        self._place = path if isinstance(path, str | Path) else list(path)
        self._topic = topic
        self._options = dict(options or {})
        self._mutex = threading.Lock()
        self._span = (0, 0)
        self._records = RegistryRecords()
        self._refresh()

    def __str__(self) -> str:
        shown = self._place if isinstance(self._place, str | Path) else self._place[0]
        return f"topic {self._topic} of {shown}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mutex"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _mutex=threading.Lock())

    def schema(self, number: int) -> RegisteredSchema:
        """Return the schema of an id of the default context; raises SchemaNotFoundError."""
        found = self._records.with_id(number)
        if found is None:
            self._refresh()
            found = self._records.with_id(number)
        if found is None:
            raise self._missing(f"there is no schema of the id {number}")
        return found.with_types(self._find)

    def versions(self, subject: str) -> list[RegisteredSchema]:
        """Return all versions, deleted ones too; raises SchemaNotFoundError."""
        self._refresh()
        if found := self._records.of_subject(subject):
            return [version.with_types(self._find) for version in found]
        raise self._missing(f"there is no subject {subject!r}")

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the latest version that is not deleted; raises SchemaNotFoundError."""
        self._refresh()
        found = self._records.of_subject(subject)
        alive = [version for version in found if not version.is_deleted]
        if not alive:
            is_deleted = "the subject {!r} is deleted" if found else "there is no subject {!r}"
            raise self._missing(is_deleted.format(subject))
        return alive[-1].with_types(self._find)

    def ids(self) -> frozenset[int]:
        """Return all ids of the default context."""
        self._refresh()
        return self._records.ids()

    def _find(self, subject: str, version: int, referring: str) -> SubjectVersion:
        """Return what a schema refers to, by default in its own context."""
        own = context_of(referring)
        is_own = own != DEFAULT_CONTEXT and not subject.startswith(":.")
        name = f":.{own}:{subject}" if is_own else subject
        found = self._records.versions.get((name, version))
        if found is None:
            raise self._missing(
                f"there is no version {version} of the subject {name!r}, to which a schema of "
                f"{referring!r} refers"
            )
        return found

    def _missing(self, what: str) -> SchemaNotFoundError:
        unread = self._records.unread
        but = f" ({unread} of its records are not a registry's)" if unread else ""
        return SchemaNotFoundError(f"{self}: {what}{but}.")

    def _refresh(self) -> None:
        """Read the topic unless it is as it was."""
        with (
            self._mutex,
            open_log(self._place, read_only=True, create=False, options=self._options) as log,
        ):
            offsets = log.offsets(self._topic)
            if [*offsets] != [0]:
                raise InvalidInputError(
                    f"{self}: expected the one partition of a registry's topic, found "
                    f"{len(log.describe(self._topic).partitions)}. Give topic="
                )
            if offsets[0] == self._span:
                return
            records = RegistryRecords()
            for batch in log.read(self._topic, 0, columns=["key", "value"]):
                for record in batch.to_pylist():
                    records.apply(record["key"], record["value"])
            self._records, self._span = records, offsets[0]
