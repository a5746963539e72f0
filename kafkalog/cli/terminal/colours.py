"""Colours, which only a terminal gets, and none where the environment asks for none.

NO_COLOR with any value (no-color.org) and TERM=dumb mean none.
"""

from __future__ import annotations

import os
from typing import IO, Final, Literal

Style = Literal["bold", "red", "green", "yellow"]
_CODES: Final[dict[Style, str]] = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


def is_terminal(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, style: Style, stream: IO[str]) -> str:
    """Return a text with its style; without it if the stream shows no colours."""
    if not text or os.environ.get("NO_COLOR") or not is_terminal(stream):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
