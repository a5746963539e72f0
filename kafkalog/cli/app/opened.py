"""Opens a log for a verb: to read it, or to write to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine


def open_readable(path: str) -> Engine:
    """Open a log, or the directories of a broker; raises InvalidInputError if there is none."""
    from kafkalog.storage_engine.engine import Engine

    _check_log(path)
    return Engine(path, read_only=True)


def open_writable(path: str, *, create: bool = False) -> Engine:
    """Open a log; raises InvalidInputError if there is none, and for a broker's directory."""
    from kafkalog.storage_engine.engine import Engine

    if not create:
        _check_log(path)
    log = Engine(path, create=create)
    if log.read_only:
        raise InvalidInputError(
            f"{log.root}: a Kafka broker's log directory is only read; to write to it, stop "
            f"the broker and run: kafkalog adopt {log.root}"
        )
    return log


def _check_log(path: str) -> None:
    """Raise InvalidInputError if there is no log; the error names the verb that makes one."""
    from kafkalog.storage_engine.metadata import address, directory_signs

    root, *more = address.directories(path)
    if not more and not address.is_broker_directory(root):
        directory_signs.check_is_log(root, f"kafkalog topics create {root} NAME")
