"""The engine of a log that all writes of a process share, so that its journal is read once.

Spark makes a writer for every micro-batch, several times, and keeps the processes in which it does
so: with an engine of its own each would replay the whole journal, up to a megabyte of it.
"""

from __future__ import annotations

from pathlib import Path

from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import address

__all__ = ["engine_of"]

_ENGINES_MAX = 8
_engines: dict[tuple[Path, bool], tuple[tuple[int, int], Engine]] = {}
"""By place, and whether it is only read: which file the journal was, and the engine."""


def engine_of(root: Path, *, read_only: bool = False) -> Engine:
    """Return the engine of a log, which is created where there is none; never to be closed.

    To close it would sync what a relaxed topic leaves unsynced. `read_only` is for tasks: they may
    run on another host than those who write the journal. Raises what `Engine` does.
    """
    place = root, read_only
    journal, known = _engines.pop(place, (None, None))
    found = _journal(root)
    # Another file may be another history of the same log, put back from a copy. What is no log any
    # more, or was a broker's, is opened anew; and so is one with a deletion under way, since that
    # moves the deleted directories away.
    if known is None or found is None or found != journal or _is_deleting(known):
        known = Engine(root, read_only=read_only)
        found = found or _journal(root)
    if found is not None and not known.is_brokers:
        if len(_engines) >= _ENGINES_MAX:
            _engines.clear()
        _engines[place] = found, known
    return known


def _journal(root: Path) -> tuple[int, int] | None:
    """Tell which file is the journal now; None for no log. Raises StorageError."""
    try:
        with address.looking():
            found = (root / layout.COMMIT).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _is_deleting(engine: Engine) -> bool:
    return not engine.read_only and bool(engine.state().deleting)
