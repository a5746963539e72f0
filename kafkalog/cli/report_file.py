"""The file of a report, which appears only once it is complete."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kafkalog.cli.terminal.output import check_outside
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files


@contextlib.contextmanager
def reserved(given: Path | None, stem: str, root: Path | str) -> Iterator[Path]:
    """Yield a path that can be written, so that a long run does not fail at its end.

    The default path is `STEM-TIME.json` in the working directory. An empty file with a temporary
    name reserves it; a killed run leaves that file. `root` is the log's directory or address.
    Raises InvalidInputError for a path in the log, an existing file, or a path that cannot be
    written.
    """
    path = _free(stem) if given is None else given
    check_outside(path, [root] if isinstance(root, Path) else [], "a report", "--report")
    if path.exists() or path.is_symlink():
        raise InvalidInputError(f"{path}: exists already; name another file with --report")
    temporary = _temporary(path)
    try:
        files.create(temporary)
    except OSError as fault:
        raise InvalidInputError(
            f"{path}: {fault.strerror}; name another file with --report"
        ) from fault
    try:
        yield path
    finally:
        files.remove(temporary)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + layout.TEMPORARY)


def _free(stem: str) -> Path:
    """Return a file name that no other run has used in this working directory."""
    stamp = f"{datetime.fromtimestamp(clock.now_ms() / 1000, UTC):%Y%m%dT%H%M%SZ}"
    for number in itertools.count(1):
        path = Path(f"{stem}-{stamp}{f'-{number}' if number > 1 else ''}.json")
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                os.close(files.open_empty(_temporary(path), exclusive=True))
                break
    return path
