"""The records of a registry's topic, taken in the order of the log.

Their form and their meaning are those of Confluent's KafkaStoreMessageHandler and InMemoryCache: a
JSON object as key, whose `keytype` says what the value is.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Final

from kafkalog.values.subject_version import Reference, SubjectVersion

DEFAULT_CONTEXT: Final = ""
_CONTEXT: Final = re.compile(r":\.([^:]*):")
"""A subject of another context than the default one begins with the name of its context."""
_WITHOUT_SCHEMA: Final = frozenset({"CONFIG", "MODE", "NOOP", "CONTEXT", "ASSOC"})


def context_of(subject: str) -> str:
    """Return the context of a subject."""
    found = _CONTEXT.match(subject)
    return found[1] if found else DEFAULT_CONTEXT


class RegistryRecords:
    """The versions of all subjects, by subject and number, and by id."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int], SubjectVersion] = {}
        self.unread = 0
        """How many records are not a registry's."""
        self._with_id: dict[tuple[str, int], set[tuple[str, int]]] = {}

    def ids(self) -> frozenset[int]:
        """Return the ids of the default context."""
        return frozenset(number for context, number in self._with_id if context == DEFAULT_CONTEXT)

    def with_id(self, number: int, context: str = DEFAULT_CONTEXT) -> SubjectVersion | None:
        """Return a version that has the id."""
        names = self._with_id.get((context, number))
        return self.versions[min(names)] if names else None

    def of_subject(self, subject: str) -> list[SubjectVersion]:
        """Return a subject's versions, deleted ones too, the oldest first."""
        found = [each for each in self.versions.values() if each.subject == subject]
        return sorted(found, key=lambda each: each.version)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take the next record; one that is not a registry's is counted."""
        try:
            named = json.loads(key or b"")
            given = json.loads(value) if value else None
            is_read = self._apply(named["keytype"], named, given)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_read = False
        self.unread += not is_read

    def _apply(self, kind: str, named: Any, given: Any) -> bool:
        if kind == "SCHEMA":
            name = str(named["subject"]), int(named["version"])
            if given is not None:
                return self._put(_version(*name, given))
            self._remove(name)
        elif kind == "DELETE_SUBJECT" and given:
            for each in self.of_subject(given["subject"]):
                if each.version <= int(given["version"]):
                    self.versions[each.subject, each.version] = replace(each, is_deleted=True)
        elif kind == "CLEAR_SUBJECT" and given:
            for name in [name for name, each in self.versions.items() if each.is_deleted]:
                if _is_meant(given.get("subject"), name[0]):
                    self._remove(name)
        return kind in {*_WITHOUT_SCHEMA, "SCHEMA", "DELETE_SUBJECT", "CLEAR_SUBJECT"}

    def _put(self, version: SubjectVersion) -> bool:
        """Add a version, or change it.

        A text that claims the id of another text is passed over, as in Confluent's registry.
        """
        known = self.with_id(version.id, context_of(version.subject))
        if known is not None and known.text != version.text:
            return False
        name = version.subject, version.version
        self._remove(name)
        self.versions[name] = version
        self._with_id.setdefault((context_of(version.subject), version.id), set()).add(name)
        return True

    def _remove(self, name: tuple[str, int]) -> None:
        version = self.versions.pop(name, None)
        if version is not None:
            place = context_of(version.subject), version.id
            self._with_id[place].remove(name)
            if not self._with_id[place]:
                del self._with_id[place]


def _version(subject: str, number: int, given: Any) -> SubjectVersion:
    """Return the version of a subject that a record of type SCHEMA registers."""
    references = tuple(
        Reference(str(each["subject"]), int(each["version"]))
        for each in given.get("references") or ()
    )
    kind = given.get("schemaType") or "AVRO"
    is_deleted = bool(given.get("deleted"))
    text = str(given["schema"])
    return SubjectVersion(subject, number, int(given["id"]), kind, text, references, is_deleted)


def _is_meant(cleared: str | None, subject: str) -> bool:
    """Return whether a subject is the one that is cleared, or is in a context that is."""
    is_context = bool(_CONTEXT.fullmatch(cleared or ""))
    return not cleared or cleared == subject or (is_context and subject.startswith(cleared))
