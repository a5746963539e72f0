"""An object of the commit log: a header with number, token and checksum, then JSON.

The log's mark, a commit, a snapshot and the boundary have this form. Their magic tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class NumberedObject:
    """An object's magic, number, token and content."""

    magic: bytes
    number: int
    token: bytes
    content: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the object's bytes."""
        payload = _encode(self.content).encode("ascii")
        crc = _checksum(self.number, self.token, payload)
        head = layout.STORED_HEADER.pack(
            self.magic, layout.STORED_VERSION, crc, self.number, self.token
        )
        return head + payload

    @classmethod
    def decode(cls, place: str, magic: bytes, data: bytes) -> Self:
        """Return an object from its bytes.

        Raises CorruptLogError for damage, StorageError for the format of a later release.
        """
        size = layout.STORED_HEADER.size
        if len(data) < size:
            raise CorruptLogError(place, len(data), f"at least {size} bytes", "the end")
        found, version, crc, number, token = layout.STORED_HEADER.unpack_from(data)
        if found != magic:
            raise CorruptLogError(place, 0, repr(magic), repr(found))
        if version != layout.STORED_VERSION:
            raise StorageError(
                f"{place}: the format is one of another release of kafkalog (expected version "
                f"{layout.STORED_VERSION}, found {version}). Install the newest release."
            )
        payload = data[size:]
        if _checksum(number, token, payload) != crc:
            raise CorruptLogError(place, size, "the content of its checksum", "another content")
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            raise CorruptLogError(place, size, "JSON", repr(payload[:40])) from None
        if not isinstance(content, dict):
            raise CorruptLogError(place, size, "a JSON object", repr(payload[:40]))
        return cls(magic, number, token, content)


def _checksum(number: int, token: bytes, payload: bytes) -> int:
    return crc32c(payload, crc32c(layout.STORED_CHECKED.pack(number, token)))
