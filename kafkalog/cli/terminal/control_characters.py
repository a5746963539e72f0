r"""Escapes what a terminal would obey, not show: `\x1b` for an escape, `\n` for a newline.

Keys, values, names and error texts are other people's data. On a terminal they could move its
cursor, change its title, or forge a row. A pipe gets them as they are, and `--raw` a terminal too.
"""

from __future__ import annotations

import re
import sys
from typing import Final

# C0 and DEL, C1, marks and overrides of the direction (Unicode TR 9), line and paragraph separators
_CONTROLS: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(text: str, *, kept: str = "") -> str:
    """Return a text in which no character is obeyed, but those that are `kept`."""
    if _CONTROLS.search(text) is None:
        return text
    return _CONTROLS.sub(lambda found: found[0] if found[0] in kept else _escape(found[0]), text)


def shown(text: str) -> str:
    """Return the same if the standard output is a terminal; else the text."""
    return escaped(text) if sys.stdout.isatty() else text


def escaped_json(text: str) -> str:
    """Return a line of JSON with JSON's own escapes; JSON has escaped C0 already."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(character: str) -> str:
    code = ord(character)
    named = _NAMED.get(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
