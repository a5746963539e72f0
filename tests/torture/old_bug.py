"""A bug that somebody's cleaner once had, as a patch that brings it back, and the tests for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["OldBug", "replace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OldBug:
    """One fault, and what has to notice it."""

    name: str
    what: str
    """What the patch does, in words."""
    patch: Callable[[pytest.MonkeyPatch], None]
    tests: tuple[str, ...]
    """Names of tests, below tests/; every one of them must fail, with all its parameters
    unless it is named with one."""
    sign: str
    """A pattern that is found in what each failure says: so it is this fault that was seen."""

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return the tests as pytest names them."""
        return tuple(f"tests/unit/{test}" for test in self.tests)

    def is_sign(self, failure: str) -> bool:
        """Tell whether a test failed since it saw the fault."""
        return re.search(self.sign, failure) is not None


def replace(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Put what `make` makes of a function in its place; `owner` is a module or a class."""
    patch.setattr(owner, name, make(getattr(owner, name)))
