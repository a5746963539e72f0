"""Write the fields of a message as the JSON of Kafka's own tools.

Kafka: the generated JsonConverter of each message, Jackson's JsonNode.toString.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any, Final

_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-f]{4})|.)")
_DIGITS: Final = 17
"""As many tell any number from its neighbours."""
_PLAIN_FROM: Final = 1e-3
_PLAIN_BELOW: Final = 1e7


def as_json(value: Any) -> Any:
    """Return a value with its bytes as JSON has them: in base64."""
    match value:
        case dict():
            return {name: as_json(each) for name, each in value.items()}
        case list():
            return [as_json(each) for each in value]
        case bytes():
            return base64.b64encode(value).decode()
    return value


def kafka_json(value: Any) -> str:
    """Return JSON without spaces; bytes are base64, and numbers are as Java writes them."""
    match value:
        case dict():
            return "{" + ",".join(f"{_text(k)}:{kafka_json(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(kafka_json, value)) + "]"
        case bytes():
            return _text(as_json(value))
        case str():
            return _text(value)
        case float():
            return _double(value)
    return json.dumps(value)


def _text(value: str) -> str:
    """Return a JSON string; the hexadecimal digits of its escapes are capitals."""
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPE.sub(lambda m: m[0] if m[1] is None else rf"\u{m[1].upper()}", text)


def _double(value: float) -> str:
    """Return a number as Double.toString does."""
    if not math.isfinite(value):
        return {math.inf: '"Infinity"', -math.inf: '"-Infinity"'}.get(value, '"NaN"')
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_BELOW:
        return repr(value)
    texts = (f"{value:.{size}e}" for size in range(_DIGITS))
    digits, _, exponent = next(text for text in texts if float(text) == value).partition("e")
    return f"{digits if '.' in digits else digits + '.0'}E{int(exponent)}"
