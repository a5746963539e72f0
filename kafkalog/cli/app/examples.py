"""Examples at the end of a verb's help, as they are typed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["examples"]


def examples(lines: Sequence[str]) -> str | None:
    """Return the last part of a help; None without examples."""
    if not lines:
        return None
    # typer wraps a paragraph's lines, but for one that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
