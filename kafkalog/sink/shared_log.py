"""The log that all writes of a process share, so that its state is read once.

Spark creates several writers per micro-batch and keeps the processes that run them. A log per
writer would read the whole journal each time, up to a megabyte, or all commits of an object store.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import address
from kafkalog.storage_engine.object_store.address import StoreAddress

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.seen_log import SeenLog

_Opened = TypeVar("_Opened", bound=ReadableDirectory)
_OPENED_MAX = 8
_opened: dict[
    tuple[Path, type[ReadableDirectory], bool], tuple[tuple[int, int], ReadableDirectory]
] = {}
"""By (root, class, read only): the journal's device and inode, and the opened log."""


def shared_log(root: Path | StoreAddress) -> Log:
    """Return the shared log at a place, which is created if it is missing. Never close it.

    Closing it would sync what a relaxed topic leaves unsynced. Raises the errors of `DirectoryLog`.
    """
    if isinstance(root, StoreAddress):
        return _object_log(root)
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog

    return _shared(root, DirectoryLog, read_only=False)


def shared_readable(root: Path | StoreAddress, *, read_only: bool = False) -> ReadableLog:
    """Return the shared log at a place, for what only reads it. Never close it.

    Tasks pass `read_only`: they may run on another host than the writers of the journal. Raises the
    errors of `ReadableDirectory`.
    """
    if isinstance(root, StoreAddress):
        return _object_log(root)
    return _shared(root, ReadableDirectory, read_only=read_only)


def seen_by_driver(root: Path | StoreAddress, topic: str | None) -> SeenLog | None:
    """Return what the driver knows of a log in an object store, for tasks; None for a directory.

    `topic` is the one that they write to, if it is known. Sends no request if the log is open.
    """
    if not isinstance(root, StoreAddress):
        return None
    from kafkalog.storage_engine.object_store.seen_log import SeenLog

    return SeenLog.of(_object_log(root), topic)


def requests_of(root: Path | StoreAddress) -> Counter[str]:
    """Return the requests that this process has sent to a log, by kind; none to a directory."""
    if not isinstance(root, StoreAddress):
        return Counter()
    from kafkalog.storage_engine.object_store.client import requests_sent

    return requests_sent(root)


def _object_log(address: StoreAddress) -> ObjectLog:
    found = _opened_object_log(address)
    if found.is_replaced:
        _opened_object_log.cache_clear()
        found = _opened_object_log(address)
    return found


@functools.lru_cache(_OPENED_MAX)
def _opened_object_log(address: StoreAddress) -> ObjectLog:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    return ObjectLog(address)


def _shared(root: Path, kind: type[_Opened], *, read_only: bool) -> _Opened:
    place = root, kind, read_only
    journal, known = _opened.pop(place, (None, None))
    found = _journal(root)
    # Open the log again if its journal is another file, as after a restore from a copy, if there is
    # no journal, or if the directory was a broker's. Open a written log again while a deletion is
    # under way: opening it moves the deleted directories away.
    is_kept = found is not None and found == journal
    if (
        not isinstance(known, kind)
        or not is_kept
        or (kind is not ReadableDirectory and known.state().deleting)
    ):
        known = kind(root, read_only=read_only)
        found = found or _journal(root)
    if found is not None and not known.is_brokers:
        if len(_opened) >= _OPENED_MAX:
            _opened.clear()
        _opened[place] = found, known
    return known


def _journal(root: Path) -> tuple[int, int] | None:
    """Return the journal's device and inode, or None without a log."""
    try:
        with address.looking():
            found = (root / layout.COMMIT).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
