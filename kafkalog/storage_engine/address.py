"""The address of a log directory, as Spark hands it over: the option `path`.

Spark's JVM and its Python workers need not share a current directory, so a relative path would mean
two places. Only an absolute path or a `file:` URI is an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kafkalog.errors import InvalidInputError

__all__ = ["log_directory"]

PATH: Final = "path"
_LOCAL_HOSTS: Final = ("", "localhost")


def log_directory(options: Mapping[str, str]) -> Path:
    """Return the log directory that the option `path` names; the key's letter case is ignored.

    The directory need not exist. Raises InvalidInputError when the option is missing, relative,
    not local, or names a file.
    """
    given = next((value for key, value in options.items() if key.lower() == PATH), None)
    if given is None or not given.strip():
        raise InvalidInputError(
            "option 'path' is missing: give the log directory as .option('path', '/dir') or "
            ".load('/dir'); in SQL use CREATE TEMPORARY VIEW, since Spark drops the OPTIONS of "
            "CREATE TABLE when it reads the table"
        )
    path = _local_path(given)
    if path.exists() and not path.is_dir():
        raise InvalidInputError(f"path {str(path)!r} is a file, expected a log directory")
    return path


def _local_path(given: str) -> Path:
    """Return an absolute path, or the path of a `file:` URI."""
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
