"""A record as a JSON object on a line, for `append`."""

from __future__ import annotations

import json as json_module
import re
from typing import Any, Final, NoReturn

from kafkalog.cli.terminal.output import Encoding, decoded

_FIELDS: Final = ("key", "value", "headers", "timestamp", "partition")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_PASSED_OVER: Final = {"topic", "offset", "timestampType"}


def json_record(line: bytes, partition: int | None, encoding: Encoding) -> dict[str, Any] | None:
    """Return a record's fields, in `partition` if given; None for an empty line."""
    if not line.strip():
        return None
    try:
        text = line.decode("utf-8-sig")
        found = json_module.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the object is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("expected a JSON object in UTF-8, found other bytes") from None
    except json_module.JSONDecodeError as fault:  # its own text would number lines too
        where = f"{fault.msg} at character {fault.pos + 1}"
        advice = "; lines of text are for --text and --key-separator" if fault.pos == 0 else ""
        raise ValueError(f"expected a JSON object: {where}{advice}") from None
    except ValueError as fault:
        raise ValueError(f"expected a JSON object: {fault}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {str(found)[:40]!r}")
    unknown = sorted(found.keys() - set(_FIELDS) - _PASSED_OVER)
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r}; known: {', '.join(_FIELDS)}")
    if "value" not in found:
        raise ValueError("the field 'value' is missing; null is a tombstone")
    if partition is not None:
        found["partition"] = partition
    headers = found.get("headers") or []
    if not isinstance(headers, list):
        raise ValueError("headers: expected a list of objects with key and value")
    return {
        "key": _text_or_json(found, "key", text, encoding),
        "value": _text_or_json(found, "value", text, encoding),
        "headers": [_header(header, encoding) for header in headers],
        "timestamp": _integer(found.get("timestamp"), "timestamp", 64),
        "partition": _integer(found.get("partition"), "partition", 32),
    }


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _text_or_json(found: dict[str, Any], name: str, line: str, encoding: Encoding) -> bytes | None:
    """Return text as its bytes, and an object, list, number or truth value as JSON."""
    value = found.get(name)
    if value is None or isinstance(value, str) or encoding is not Encoding.UTF8:
        return _bytes(value, name, encoding)
    return _bytes(_json_of(name, line), name, encoding)


def _json_of(field: str, line: str) -> str:
    """Return the JSON of a field as the line has it, so that no number is rounded."""
    decoder = json_module.JSONDecoder()
    json, place = "", line.index("{")
    while place >= 0:
        name, end = decoder.raw_decode(line, _skip_space(line, place + 1))
        start = _skip_space(line, line.index(":", end) + 1)
        _, end = decoder.raw_decode(line, start)
        if name == field:  # the last one counts, as in json.loads
            json = line[start:end]
        place = line.find(",", end)
    return json


def _skip_space(line: str, place: int) -> int:
    found = _SPACE.match(line, place)
    return found.end() if found else place


def _header(header: Any, encoding: Encoding) -> tuple[str, bytes | None]:
    if not isinstance(header, dict) or not header.keys() <= {"key", "value"}:
        raise ValueError("headers: expected objects with key and value")
    key = header.get("key")
    if not isinstance(key, str):
        raise ValueError("headers: a header's key is text")
    decoded(key, Encoding.UTF8, "headers")
    return key, _bytes(header.get("value"), "value of a header", encoding)


def _bytes(value: Any, name: str, encoding: Encoding) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text or null, found {str(value)[:40]!r}")
    return decoded(value, encoding, name)


def _integer(value: Any, name: str, bits: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << (bits - 1):
        raise ValueError(
            f"{name}: expected a whole number of {bits} bits, found {str(value)[:40]!r}"
        )
    return value
