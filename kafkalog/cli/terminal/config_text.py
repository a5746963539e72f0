"""Topic configs as they are typed and shown: `retention.ms=1d`, `segment.bytes=64MiB`.

Kafka's names take whole milliseconds and bytes. A value may have a unit, which is the largest one
that leaves a whole number where it is shown. JSON has the plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from kafkalog.cli.terminal.time_text import UNITS
from kafkalog.errors import InvalidInputError

_SIZES: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_KINDS: Final[Mapping[str, Mapping[str, int]]] = {".ms": UNITS, ".bytes": _SIZES}
"""The units of a config, by the end of its name."""
_VALUE: Final = re.compile(r"([0-9]{1,18})([A-Za-z]+)")


def config_value(name: str, text: str) -> str:
    """Return a typed value as Kafka has it; raises InvalidInputError for an unknown unit."""
    units = _units(name)
    found = _VALUE.fullmatch(text)
    if not units or found is None:
        return text
    if found[2] not in units:
        raise InvalidInputError(
            f"config {name}: {found[2]!r} is not a unit (expected one of {', '.join(units)})"
        )
    return str(int(found[1]) * units[found[2]])


def configs(given: Sequence[str]) -> dict[str, str]:
    """Return `name=value` texts as a mapping, with the values that Kafka has."""
    found = {}
    for text in given:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name:
            raise InvalidInputError(f"config {text!r}: expected name=value")
        found[name] = config_value(name, value)
    return found


def config_text(config: Mapping[str, str]) -> str:
    """Return configs as people read them, by name."""
    return " ".join(f"{name}={_shown(name, config[name])}" for name in sorted(config))


def _shown(name: str, value: str) -> str:
    if value.isdecimal() and int(value):
        for unit, size in sorted(_units(name).items(), key=lambda pair: -pair[1]):
            if size > 1 and int(value) % size == 0:
                return f"{int(value) // size}{unit}"
    return value


def _units(name: str) -> Mapping[str, int]:
    return next((units for end, units in _KINDS.items() if name.endswith(end)), {})


def topic_configs(given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the configs by topic of arguments `topic:name=value`; raises InvalidInputError."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        topic, colon, rest = text.partition(":")
        name, equals, value = rest.partition("=")
        if not (topic and colon and name and equals):
            raise InvalidInputError(f"config {text!r}: expected topic:name=value")
        name = name.strip()
        found.setdefault(topic, {})[name] = config_value(name, value.strip())
    return found
