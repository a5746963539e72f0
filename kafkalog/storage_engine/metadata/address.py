"""Addresses of log directories: the argument of the engine, and Spark's option `path`.

Several log directories of one broker form one log. An address may therefore be a list of paths with
commas between them, unless a directory has that very name.

Spark's JVM and its Python workers may have different current directories. Only an absolute path or
a `file:` URI is therefore an address.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout

PATH: Final = "path"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL, also of one that became a Path."""
_LOCAL_HOSTS: Final = ("", "localhost")


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Raise a StorageError when a path may not even be looked up."""
    try:
        yield
    except PermissionError as fault:
        raise StorageError(f"{fault.filename}: cannot be looked at: {fault.strerror}") from fault


@looking()
def directories(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the directories of an address, as absolute paths; they need not exist.

    Raises InvalidInputError for a file, a URL, a repeated directory, or no address; StorageError.
    """
    if isinstance(given, str):
        paths = _split(given)
    elif isinstance(given, Path):
        paths = [given]
    else:
        paths = [Path(path) for path in given]
    for path in paths:
        if url := _URL.match(str(path)):  # the rest may hold a secret
            raise InvalidInputError(
                f"{url[0]}...: a log directory has no URL (expected a path). A log in an object "
                "store is opened by kafkalog.open and by Spark: give them its URL as text."
            )
    paths = [path.absolute() for path in paths]
    if not paths:
        raise InvalidInputError("no log directory is given: expected at least one path")
    for place, path in enumerate(paths):
        if path.exists() and not path.is_dir():
            raise InvalidInputError(f"{path}: a log is a directory, this is a file")
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise InvalidInputError(f"{path}: the log directory is given twice")
    return paths


def is_broker_directory(root: Path) -> bool:
    """Return whether a directory is a broker's: it has `meta.properties` and no `commit`."""
    if (root / layout.COMMIT).exists():
        return False
    return any((root / name).exists() for name in (layout.META_PROPERTIES, layout.META_ASIDE))


def _split(given: str) -> list[Path]:
    if "," not in given or Path(given).exists():
        return [Path(given)]
    return [Path(part.strip()) for part in given.split(",") if part.strip()]


def log_directory(options: Mapping[str, str]) -> Path:
    """Return the one log directory that the option `path` names, for a writer.

    Raises InvalidInputError like `log_directories`, and for several directories.
    """
    first, *more = log_directories(options)
    if more:
        raise InvalidInputError(
            f"option 'path' names {first} and {more[0]}: several log directories are those of a "
            "Kafka broker, and can only be read; write to one log directory"
        )
    return first


@looking()
def log_directories(options: Mapping[str, str]) -> list[Path]:
    """Return the log directories that the option `path` names; the key's letter case is ignored.

    They need not exist. Raises InvalidInputError if the option is missing, relative, not local, or
    names a file; StorageError.
    """
    given = next((value for key, value in options.items() if key.lower() == PATH), None)
    if given is None or not given.strip():
        raise InvalidInputError(
            "option 'path' is missing: give the log directory as .option('path', '/dir') or "
            ".load('/dir'); in SQL use CREATE TEMPORARY VIEW, since Spark drops the OPTIONS of "
            "CREATE TABLE when it reads the table"
        )
    parts = [part.strip() for part in given.split(",")]
    # A name may contain a comma too; in a list every part is an address by itself.
    is_list = all(part.startswith("/") or part.lower().startswith("file:") for part in parts)
    if not is_list or (len(parts) > 1 and Path(given).exists()):
        parts = [given]
    paths = [_local_path(part) for part in parts]
    for path in paths:
        if path.exists() and not path.is_dir():
            raise InvalidInputError(f"path {str(path)!r} is a file, expected a log directory")
    return paths


def _local_path(given: str) -> Path:
    if "\0" in given:
        raise InvalidInputError(f"path {given!r} holds a zero byte")
    if given.startswith("/"):
        return Path(given)
    scheme, separator, _ = given.partition(":")
    if separator and "/" not in scheme:
        if scheme.lower() != "file":
            raise InvalidInputError(
                f"path {given!r} is not local: a log directory is an absolute path or a file: URI"
            )
        return _path_of_uri(given)
    raise InvalidInputError(
        f"path {given!r} is relative, and Spark's JVM and Python workers have current directories "
        f"of their own; did you mean {str(Path.cwd() / given)!r}?"
    )


def _path_of_uri(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc.lower() not in _LOCAL_HOSTS:
        raise InvalidInputError(
            f"path {uri!r} names the host {parts.netloc!r}; a local file: URI is file:///dir"
        )
    path = unquote(parts.path)
    if not path.startswith("/"):
        meant = str(Path.cwd() / path)
        raise InvalidInputError(f"path {uri!r} is relative; did you mean 'file://{meant}'?")
    if "\0" in path or parts.query or parts.fragment:
        raise InvalidInputError(f"path {uri!r} is no plain file: URI; write ? and # as %3F and %23")
    return Path(path)
