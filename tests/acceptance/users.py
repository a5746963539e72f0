"""Other users, and other masks for what is created, in this very process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import pytest

__all__ = ["as_nobody", "umask"]

_NOBODY: Final = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user without any right but everybody's."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
