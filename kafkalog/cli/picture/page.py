"""The page: `page.html` with a picture's figures in it."""

from __future__ import annotations

import json
import pkgutil
from typing import Any, Final

CONTENT_SECURITY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FIGURES: Final = "/*figures*/"
_MODE: Final = "/*mode*/"


def page(figures: dict[str, Any], *, is_live: bool) -> bytes:
    """Return the page with these figures; a live one asks its server for newer ones."""
    content = pkgutil.get_data(__package__, "page.html")
    assert content is not None
    text = content.decode().replace(_MODE, "live" if is_live else "still")
    return text.replace(_FIGURES, figures_json(figures)).encode("utf-8", "replace")


def figures_json(figures: dict[str, Any]) -> str:
    """Return figures as JSON for use within a page: no text in them can end the script."""
    told = json.dumps(figures, separators=(",", ":"))
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
