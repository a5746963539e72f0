"""Open a log by its address: a directory, those of a broker, or a log in an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from kafkalog.storage_engine.log.log_engine import LogEngine
from kafkalog.storage_engine.log.log_store import LogStore
from kafkalog.storage_engine.object_store.address import StoreAddress, is_store_url

__all__ = ["LogEngine", "LogStore", "Place", "open_engine", "open_store"]

Place: TypeAlias = str | Path | Sequence[str | Path] | StoreAddress


def open_store(
    place: Place,
    *,
    read_only: bool = False,
    create: bool = True,
    options: Mapping[str, str] | None = None,
) -> LogStore:
    """Open a log as readers need it; close it after use.

    Args:
        place: A directory, several of a broker, a URL, or an address in an object store.
        read_only: Whether nothing is ever written.
        create: Whether a missing log is created.
        options: Options `store.*`, which complete a URL; others are left out.

    Returns:
        The log.

    Raises:
        InvalidInputError: The place has no log, or cannot have one.
        StorageError: The disk or the object store fails.
    """
    found = _address(place, options)
    if isinstance(found, StoreAddress):
        return _object_log(found, read_only=read_only, create=create)
    from kafkalog.storage_engine.store import Store

    return Store(found, read_only=read_only, create=create)


def open_engine(
    place: Place,
    *,
    read_only: bool = False,
    create: bool = True,
    options: Mapping[str, str] | None = None,
) -> LogEngine:
    """Open a log with all that can be done to it; arguments and errors are those of `open_store`.

    Raises LockedByBrokerError as well.
    """
    found = _address(place, options)
    if isinstance(found, StoreAddress):
        return _object_log(found, read_only=read_only, create=create)
    from kafkalog.storage_engine.engine import Engine

    return Engine(found, read_only=read_only, create=create)


def _address(place: Place, options: Mapping[str, str] | None) -> Place:
    """Return a place, a URL of an object store as the address that it is."""
    if isinstance(place, str) and is_store_url(place):
        return StoreAddress.parse(place, options)
    return place


def _object_log(address: StoreAddress, *, read_only: bool, create: bool) -> LogEngine:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    return ObjectLog(address, read_only=read_only, create=create)
