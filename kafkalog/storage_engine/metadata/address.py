"""Addresses of log directories: the argument of a log, and Spark's option `path`.

Several log directories of a cluster's brokers form one log. An address may therefore be a list of
paths with commas between them, unless a directory has that very name.

Spark's JVM and its Python workers may have different current directories. Only an absolute path or
a `file:` URI is therefore an address.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.directory_signs import check_is_no_file

PATH: Final = "path"
PATHS: Final = "paths"
"""Spark makes it of a list that `load` is given."""
SCHEMES: Final = ("s3", "gs", "az", "memory")
"""Those of object stores."""
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URL, also of one that became a Path."""
_SCHEME: Final = re.compile(r"(?:^|,)\s*[A-Za-z][A-Za-z0-9+.-]*:/*")
_SECRET: Final = re.compile(r"[@?#]")
"""A sign of user information, a query or a fragment."""
_LOCAL_HOSTS: Final = ("", "localhost")


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Raise a StorageError when a path cannot even be looked up; one that is missing can be."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as fault:
        raise StorageError(f"{fault.filename}: cannot be looked at: {fault.strerror}") from fault


def is_url(given: str) -> bool:
    """Return whether a path begins like a URL, whatever its scheme."""
    return _URL.match(given) is not None


def shown(given: str) -> str:
    """Return an address as an error may repeat it.

    All that follows the scheme is left out if it has user information, a query or a fragment, which
    may be a secret.
    """
    scheme = _SCHEME.search(given)
    if scheme and _SECRET.search(given, scheme.end()):
        return f"{given[: scheme.end()]}..."
    return given


@looking()
def directories(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the directories of an address, as absolute paths; they need not exist.

    Raises InvalidInputError for a file, a URL, a repeated directory, or no address; StorageError.
    """
    if isinstance(given, str):
        texts = _split(given)
    else:
        listed = given if isinstance(given, Sequence) else [given]
        texts = [str(path) for path in listed if isinstance(path, (str, Path))]
        if len(texts) < len(listed):
            raise InvalidInputError(
                f"expected a path, an address or a list of paths, found {given!r}"
            )
    paths = [local_path(text) for text in texts]
    if not paths:
        raise InvalidInputError("no log directory is given: expected at least one path")
    for place, path in enumerate(paths):
        check_is_no_file(path)
        if resolved(path) in map(resolved, paths[:place]):
            raise InvalidInputError(f"{path}: the log directory is given twice")
    return paths


def local_path(given: str) -> Path:
    """Return the absolute path that a text means; it need not exist.

    Raises InvalidInputError for an empty text, one with a null character, a URL, and a `~`, which
    only a shell reads as a home directory.
    """
    _refuse_null(given)
    if not given.strip():
        raise InvalidInputError(
            f"{given!r}: the path is empty (expected a directory). Is a variable not set? For the "
            "current directory give `.`."
        )
    if is_url(given):
        raise InvalidInputError(
            f"{shown(given)}: a log directory has no URL (expected a path). Only a log in an "
            f"object store has one, as text: its scheme is {', '.join(SCHEMES[:-1])} or "
            f"{SCHEMES[-1]}."
        )
    home = _of_a_home(given)
    if home is not None:
        raise InvalidInputError(
            f"{given}: only a shell reads `~` as a home directory (expected a path). Give {home}."
        )
    return Path(given).absolute()


def _refuse_null(given: str) -> None:
    if "\0" in given:
        raise InvalidInputError(f"{shown(given)!r}: no path has a null character")


def _of_a_home(given: str) -> str | None:
    """Return the path that a shell would make of one with `~`; None for any other."""
    expanded = os.path.expanduser(given)
    is_plain = expanded == given or Path(given.split("/", 1)[0]).exists()
    return None if is_plain else expanded


def resolved(path: Path) -> Path:
    """Return a path without links; one that leads in a circle stays, and has no log."""
    return Path(os.path.realpath(path))


def is_broker_directory(root: Path) -> bool:
    """Return whether a directory is a broker's: it has `meta.properties` and no `commit`."""
    if (root / layout.COMMIT).exists():
        return False
    return any((root / name).exists() for name in (layout.META_PROPERTIES, layout.META_ASIDE))


def _split(given: str) -> list[str]:
    if "," not in given or Path(given).exists():
        return [given]
    return [part.strip() for part in given.split(",") if part.strip()]


def log_directory(options: Mapping[str, str]) -> Path:
    """Return the one log directory that the option `path` names, for a writer.

    Raises InvalidInputError like `log_directories`, and for several directories.
    """
    first, *more = log_directories(options)
    if more:
        raise InvalidInputError(
            f"option 'path' names {first} and {more[0]}: several log directories are those of "
            "Kafka brokers, and can only be read; write to one log directory"
        )
    return first


@looking()
def log_directories(options: Mapping[str, str]) -> list[Path]:
    """Return the log directories that the option `path` names; the key's letter case is ignored.

    They need not exist. The option `paths` names them too, if Spark has made it. Raises
    InvalidInputError if the option is missing, relative, not local, or names a file; StorageError.
    """
    found = {key.lower(): value for key, value in options.items()}
    parts = _of_spark(found[PATHS]) if PATHS in found else _listed(found.get(PATH, ""))
    if not parts:
        raise InvalidInputError(
            "option 'path' is missing: give the log directory as .option('path', '/dir') or "
            ".load('/dir'); in SQL use CREATE TEMPORARY VIEW, since Spark drops the OPTIONS of "
            "CREATE TABLE when it reads the table"
        )
    paths = [spark_local_path(part) for part in parts]
    for path in paths:
        check_is_no_file(path)
    return paths


def _of_spark(given: str) -> list[str]:
    """Return the addresses of an option `paths`: Spark writes a list of them as JSON."""
    with contextlib.suppress(ValueError):
        parts = json.loads(given)
        if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
            return parts
    raise InvalidInputError(
        "option 'paths' is Spark's own, a JSON list of what load() is given. Give the log "
        "directories as .load(['/dir', '/more'])."
    )


def _listed(given: str) -> list[str]:
    """Return the addresses of an option `path`."""
    parts = [part.strip() for part in given.split(",")]
    # A name may contain a comma too; in a list every part is an address by itself.
    is_list = all(
        part.startswith("/") or part.lower().startswith("file:") or is_url(part) for part in parts
    )
    if not is_list or (len(parts) > 1 and Path(given).exists()):
        parts = [given]
    return parts if given.strip() else []


def spark_local_path(given: str) -> Path:
    """Return the path of an absolute path or a `file:` URI; raises InvalidInputError."""
    _refuse_null(given)
    if given.startswith("/"):
        return Path(given)
    scheme, separator, _ = given.partition(":")
    if separator and "/" not in scheme:
        if scheme.lower() != "file":
            raise InvalidInputError(
                f"path {shown(given)!r} is not local: a log directory is an absolute path or a "
                f"file: URI; one in an object store begins with {', '.join(SCHEMES[:-1])} or "
                f"{SCHEMES[-1]}, and ://"
            )
        return _path_of_uri(given)
    raise InvalidInputError(
        f"path {given!r} is relative, and Spark's JVM and Python workers have current directories "
        f"of their own; did you mean {_of_a_home(given) or str(Path.cwd() / given)!r}?"
    )


def _path_of_uri(uri: str) -> Path:
    parts = urlsplit(uri)
    place = f"path {shown(uri)!r}"
    if parts.netloc.lower() not in _LOCAL_HOSTS:
        raise InvalidInputError(
            f"{place} names the host {parts.hostname!r}; a local file: URI is file:///dir"
        )
    path = unquote(parts.path)
    if not path.startswith("/"):
        meant = str(Path.cwd() / path)
        raise InvalidInputError(f"{place} is relative; did you mean 'file://{meant}'?")
    if "\0" in path or parts.query or parts.fragment:
        raise InvalidInputError(f"{place} is not a plain file: URI; write ? and # as %3F and %23")
    return Path(path)
