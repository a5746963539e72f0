"""Opens a log to be read, for the verbs that only do that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = ["check_log", "open_readable"]


def open_readable(path: str) -> Engine:
    """Open a log, or the directories of a broker; raises InvalidInputError if nothing is there."""
    from kafkalog.storage_engine.engine import Engine

    check_log(path)
    return Engine(path, read_only=True)


def check_log(path: str) -> None:
    """Raise InvalidInputError if there is no log; the error names the verb that makes one."""
    from kafkalog.storage_engine.metadata import address, directory_signs

    root, *more = address.directories(path)
    if not more and not address.is_broker_directory(root):
        directory_signs.check_is_log(root, f"kafkalog topics create {root} NAME")
