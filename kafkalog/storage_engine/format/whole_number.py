"""Whole numbers that a caller gives."""

from __future__ import annotations

import operator

from kafkalog.errors import InvalidInputError


def whole_number(name: str, value: object) -> int:
    """Return a number, also of numpy; raises InvalidInputError for a fraction, a text, a bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # the TypeError decides
    except TypeError:
        pass
    raise InvalidInputError(f"{name}: expected a whole number, found {value!r}")
