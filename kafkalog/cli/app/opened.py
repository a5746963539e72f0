"""Opens a log for a verb: to read it, or to write to it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log


def open_readable(path: str) -> Log:
    """Open a log, or the directories of a broker; raises InvalidInputError without either."""
    from kafkalog.storage_engine.place import open_log

    _check_log(path)
    return open_log(path, read_only=True, create=False)


def open_writable(path: str, *, create: bool = False) -> Log:
    """Open a log; raises InvalidInputError if the path has no log, and for a broker's directory."""
    from kafkalog.storage_engine.place import open_log

    if not create:
        _check_log(path)
    log = open_log(path, create=create)
    log.check_writable()
    return log


def _check_log(path: str) -> None:
    """Raise InvalidInputError for a path without a log; the error names the verb that makes one."""
    from kafkalog.storage_engine.broker import owner
    from kafkalog.storage_engine.metadata import address
    from kafkalog.storage_engine.object_store.address import is_store_url

    if is_store_url(path):
        return  # opening it tells
    roots = address.directories(path)
    owner.check_has_log(roots, f"kafkalog topics create {shlex.quote(str(roots[0]))} NAME")
