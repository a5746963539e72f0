"""The option `keys`: a read returns only the records of these keys."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from kafkalog.errors import InvalidInputError

_EXAMPLE: Final = '["apple", {"base64": "AAE="}]'
_SHOWN: Final = 60


def parse_keys(text: str) -> frozenset[bytes]:
    """Return the keys of a JSON array of texts or {"base64": ...}; raises InvalidInputError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise _fault("no JSON array", text)
    if not found:
        raise InvalidInputError(
            "option keys: the array is empty (expected one key or more, found none). "
            "Leave the option out to read the records of all keys."
        )
    return frozenset(_key_bytes(key) for key in found)


def _key_bytes(key: Any) -> bytes:
    try:
        if isinstance(key, str):
            return key.encode()
        if isinstance(key, dict) and key.keys() == {"base64"}:
            return base64.b64decode(key["base64"], validate=True)
    except (ValueError, TypeError):  # half of a surrogate pair; no base64
        pass
    raise _fault("no key", json.dumps(key))


def _fault(problem: str, found: str) -> InvalidInputError:
    shown = found if len(found) <= _SHOWN else found[:_SHOWN] + "..."
    return InvalidInputError(
        f"option keys: {problem} (expected an array such as {_EXAMPLE}, found {shown}). "
        "Write a key as text, or its bytes in base64."
    )
