"""Find the log that was meant by an address without one: inside of a log, or one level above."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Final

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.directory_signs import meant
from kafkalog.storage_engine.metadata.other_systems import TANSU_CLUSTERS, is_tansu, tansu
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient

_LEVELS_ABOVE: Final = 3
"""An object lies at most so deep in a log: `segments/<seen>/<name>`."""
_LOOKED_AT: Final = 100
"""Prefixes below the address; each takes one request."""


def nearby(address: StoreAddress) -> str:
    """Return which log was meant, as the end of a message, or ''; what the store refuses is left.

    Sends a few requests, and none again.
    """
    for above, inner in _above(address):
        if _has_log(above):
            return meant(inner, str(above), is_at=above.below(inner) == address)
    names: list[str] = []
    with contextlib.suppress(StorageError):
        names += islice(_client(address).prefixes(), _LOOKED_AT)
    if TANSU_CLUSTERS in names and _is_tansu(address.below(TANSU_CLUSTERS)):
        return tansu()
    return meant("", None, [str(each) for each in map(address.below, names) if _has_log(each)])


def check_is_free(address: StoreAddress) -> None:
    """Raise InvalidInputError if no log may be created, as it would lie in another or around it."""
    if advice := nearby(address):
        raise InvalidInputError(f"{address}: no log is created inside or around another{advice}")


def _above(address: StoreAddress) -> Iterator[tuple[StoreAddress, str]]:
    """Yield the addresses above, the nearest first, each with the next part of the address."""
    parts = address.prefix.split("/") if address.prefix else []
    for count in range(len(parts) - 1, max(-1, len(parts) - 1 - _LEVELS_ABOVE), -1):
        yield dataclasses.replace(address, prefix="/".join(parts[:count])), parts[count]


def _has_log(address: StoreAddress) -> bool:
    with contextlib.suppress(StorageError):
        return _client(address).head(layout.STORED_LOG) is not None
    return False


def _is_tansu(clusters: StoreAddress) -> bool:
    """Return whether the first prefix below `clusters` has what Tansu keeps of a cluster."""
    with contextlib.suppress(StorageError):
        for name in islice(_client(clusters).prefixes(), 1):
            return is_tansu([*islice(_client(clusters.below(name)).prefixes(), _LOOKED_AT)])
    return False


def _client(address: StoreAddress) -> ObjectClient:
    return ObjectClient(address, patience_s=0)
