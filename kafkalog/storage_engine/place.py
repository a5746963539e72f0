"""The place of a log, and opening it: a directory, those of a broker, or an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.broker import owner
from kafkalog.storage_engine.metadata import directory_signs
from kafkalog.storage_engine.metadata.address import (
    is_url,
    local_path,
    log_directories,
    log_directory,
    resolved,
)
from kafkalog.storage_engine.object_store.address import StoreAddress, store_address

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.object_store.object_log import ObjectLog


Place: TypeAlias = str | Path | Sequence[str | Path] | StoreAddress


def open_log(
    place: Place,
    *,
    read_only: bool = False,
    create: bool = True,
    options: Mapping[str, str] | None = None,
) -> Log:
    """Open a log with all that can be done to it; close it after use.

    Args:
        place: A directory, several of a broker, a URL, or an address in an object store.
        read_only: Whether nothing is ever written.
        create: Whether a missing log is created.
        options: Options `store.*`, which complete a URL; a directory takes none.

    Raises:
        InvalidInputError: The place has no log, or cannot have one.
        LockedByBrokerError: A broker runs in the directory.
        StorageError: The disk or the object store fails.
    """
    found = _address(place, options)
    if isinstance(found, StoreAddress):
        return _object_log(found, read_only=read_only, create=create)
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog

    return DirectoryLog(found, read_only=read_only, create=create)


def spark_path(place: str | PathLike[str]) -> str:
    """Return a log's path as Spark's option `path` takes it: absolute, or the URL that it is.

    Raises InvalidInputError for an empty text, and one with `~`.
    """
    given = fspath(place)
    is_address = given.lower().startswith(("/", "file:")) or is_url(given)
    return given if is_address else str(local_path(given))


def opened_for_spark(options: Mapping[str, str]) -> ReadableLog:
    """Open the log that Spark's options `path` and `store.*` name, only to read it.

    Raises InvalidInputError, also for a relative path, and StorageError.
    """
    address = store_address(options)
    if address is not None:
        return _object_log(address, read_only=True, create=False)
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

    return ReadableDirectory(log_directories(options), read_only=True, create=False)


def check_has_log(
    place: Sequence[Path] | StoreAddress, creating: str = directory_signs.TO_CREATE
) -> None:
    """Raise InvalidInputError if Spark's option `path` names no log; one GET of an object store.

    `creating` says how to create one in a directory.
    """
    try:
        if not isinstance(place, StoreAddress):
            owner.check_has_log(place, creating)
        else:
            from kafkalog.storage_engine.object_store.client import shared_client
            from kafkalog.storage_engine.object_store.commit_log import CommitLog

            CommitLog.id_of(shared_client(place))
    except InvalidInputError as error:
        raise InvalidInputError(f"option path: {error}") from None


def read_places(options: Mapping[str, str]) -> Sequence[Path | StoreAddress]:
    """Return what Spark's options `path` and `store.*` name to read; two spellings are one.

    Raises InvalidInputError.
    """
    store = store_address(options)
    return [resolved(path) for path in log_directories(options)] if store is None else [store]


def written_place(options: Mapping[str, str]) -> Path | StoreAddress:
    """Return what Spark's options `path` and `store.*` name to write; two spellings are one.

    Raises InvalidInputError.
    """
    store = store_address(options)
    return resolved(log_directory(options)) if store is None else store


def _address(place: Place, options: Mapping[str, str] | None) -> Place:
    """Parse an object-store URL into a StoreAddress; return any other place unchanged."""
    if isinstance(place, StoreAddress):
        return place
    return store_address({"path": str(place), **(options or {})}) or place


def _object_log(address: StoreAddress, *, read_only: bool, create: bool) -> Log:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    return ObjectLog(address, read_only=read_only, create=create)


class OpenedLog(Protocol):
    """The log that `kafkalog.open` returns, as the rooms below it see it."""

    @property
    def _log(self) -> Log: ...


def directory_log_of(log: Log | OpenedLog) -> DirectoryLog:
    """Return the log of a directory that `kafkalog.open` has opened, or this one itself.

    Raises InvalidInputError for a log in an object store.
    """
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.log.log import Log, only_in_directory

    found = log if isinstance(log, Log) else log._log
    if isinstance(found, DirectoryLog):
        return found
    raise only_in_directory(found.root)


def object_log_of(log: Log | OpenedLog) -> ObjectLog | None:
    """Return the log in an object store that is open; None, loading nothing, for a directory's."""
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.log.log import Log

    found = log if isinstance(log, Log) else log._log
    if isinstance(found, DirectoryLog):
        return None
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    return found if isinstance(found, ObjectLog) else None
