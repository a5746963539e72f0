"""The same work makes the same files: nothing is random, and no clock or reboot is real."""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from kafkalog.cleaner.directory import directory_round
from kafkalog.cleaner.rewrite import round as round_module
from kafkalog.cleaner.schedule import partition_cleaner
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.fs import clock, files, host

__all__ = ["booted", "repeatable"]

_NOW_MS: Final = 1_800_000_000_000
"""Later than all workloads: what waits for the real time is due."""


@contextlib.contextmanager
def booted(boot: str) -> Iterator[None]:
    """Let this host run in a boot of that name: another one tells of a power cut."""
    known = host.boot_id
    setattr(host, "boot_id", lambda: boot)  # noqa: B010  (a function but for this)
    try:
        yield
    finally:
        setattr(host, "boot_id", known)  # noqa: B010


@contextlib.contextmanager
def repeatable(seed: str) -> Iterator[None]:
    """Let the same work make the same files: ids and secrets are drawn, and time stands still."""
    dice = random.Random(seed)
    still = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=lambda: 0.0)
    stands: list[tuple[Any, str, Any]] = [
        (uuid, "uuid4", lambda: uuid.UUID(int=dice.getrandbits(128), version=4)),
        (secrets, "token_bytes", dice.randbytes),
        # Threads that sync side by side have no order of their own.
        (files, "_SIDE_BY_SIDE_MIN", sys.maxsize),
        (clock, "now_ms", lambda: _NOW_MS),
        (directory_round, "time", still),
        (round_module, "time", still),
        (partition_cleaner, "time", still),
        # No other process asks about a pin, so the second answer need not wait.
        (pins, "_ASK_PAUSE_S", 0.0),
    ]
    known = [(where, name, getattr(where, name)) for where, name, _ in stands]
    try:
        for where, name, stand in stands:
            setattr(where, name, stand)
        yield
    finally:
        for where, name, real in known:
            setattr(where, name, real)
