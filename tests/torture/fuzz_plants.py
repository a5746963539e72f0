"""Faults put into decoders, one of each kind, to see that the fuzzer finds them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from kafkalog.cleaner.dedup import latest_records
from kafkalog.cleaner.state import delete_horizon, last_cleaning, uncleanable
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.ownership import adopted_topics
from kafkalog.storage_engine.records.kernels import legacy
from kafkalog.storage_engine.transactions import producer_snapshot

FOUND: Final = {
    "producer_snapshot": "MemoryError",
    "delete_horizon": "KeyError",
    "last_cleaning": "OvertimeError",
    "uncleanable": "the interpreter died of SIGSEGV",
    "leader_epoch_checkpoint": "leak",
    "spilling": "no end: killed",
}
"""By decoder: what a finding begins with."""
FOUND_BEYOND: Final = {"adopted_topics": "the interpreter died of SIGABRT"}
"""What shows only with bounds checks or sanitizers: a kernel that reads beyond its buffer."""
_kept: list[bytearray] = []


def plant() -> None:
    """Put a fault into each of them; before the targets are imported."""
    parse = producer_snapshot.parse_snapshot

    def allocating(data: Any, path: Path | str) -> Any:
        if len(data) >= layout.SNAPSHOT_HEADER.size:
            bytearray(max(0, layout.SNAPSHOT_HEADER.unpack_from(data)[2]) * 4)  # a stranger's count
        return parse(data, path)

    producer_snapshot.parse_snapshot = allocating
    _before(delete_horizon, "read_delete_horizon", layout.DELETE_HORIZON, _look_up)
    _before(last_cleaning, "read_cleanings", layout.LAST_CLEANING, _never_end)
    _before(uncleanable, "read_uncleanable", layout.UNCLEANABLE, _die)
    _before(checkpoints, "read_leader_epochs", layout.LEADER_EPOCH_CHECKPOINT, _keep)
    _before(latest_records, "_read_deaths", layout.SPILLING, _never_hear)
    _before(adopted_topics, "_read", layout.ADOPTED_TOPICS, _read_beyond)


def _before(module: Any, name: str, file: str, fault: Callable[[bytes], None]) -> None:
    decode = getattr(module, name)

    def planted(place: Any, *more: Any) -> Any:
        fault((getattr(place, "directory", place) / file).read_bytes())
        return decode(place, *more)

    setattr(module, name, planted)


def _look_up(data: bytes) -> None:
    if b"null" in data:
        raise KeyError("null")


def _never_end(data: bytes) -> None:
    while data.startswith(b"{") and b"-1" in data:
        pass


def _die(data: bytes) -> None:
    if b"\xff" in data:
        ctypes.string_at(0)


def _never_hear(data: bytes) -> None:
    if not data.startswith(b"{"):
        hashlib.pbkdf2_hmac("sha256", data, b"", 2**31 - 1)  # as deaf to signals as a kernel


def _read_beyond(data: bytes) -> None:
    buffer = np.frombuffer(data + bytes(8), np.uint8)
    legacy.crc32(buffer, 0, 1 + data.count(b"\n") * 9)  # it leaves the bounds to its caller


def _keep(data: bytes) -> None:
    if len(data) > 20:
        _kept.append(bytearray(8 << 20))
