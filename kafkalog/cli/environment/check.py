"""`Check`: one thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the environment. Without advice it is fine."""

    name: str
    found: str
    advice: str | None = None
    is_wrong: bool = True
    """Whether something fails without what is advised; otherwise it is only slower or nearer a
    limit."""

    @property
    def state(self) -> Literal["fine", "advice", "wrong"]:
        """The check in one word."""
        if self.advice is None:
            return "fine"
        return "wrong" if self.is_wrong else "advice"
