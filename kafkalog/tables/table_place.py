"""The place of a materialized table: a directory, or a prefix in an object store.

Names are below the location. A file is written once and never changed. If several processes create
a file of one name, one succeeds.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.address import (
    PATH,
    is_url,
    local_path,
    log_directory,
    looking,
    resolved,
    spark_local_path,
)
from kafkalog.storage_engine.object_store.address import StoreAddress, is_store_url
from kafkalog.tables.manifest import (
    Manifest,
    manifest_name,
    version_of_data,
    version_of_manifest,
)

if TYPE_CHECKING:
    from kafkalog.storage_engine.fs.files import Buffer
    from kafkalog.storage_engine.object_store.client import ObjectClient

KEY_COLUMN: Final = b"kafkalog.key"
"""The name in a Parquet file's metadata under which it says which column has the key."""
_TRIES: Final = 100
_TEMPORARY: Final = ".tmp"


class TablePlace(ABC):
    """The files below one location."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield the names of all files."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing."""

    @abstractmethod
    def write(self, name: str, data: Buffer) -> None:
        """Write a file whose name nobody else uses; it is durable after `create`."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Make a durable file; returns False if there is one of that name."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""

    def newest(self) -> Manifest | None:
        """Return the manifest that counts; None before the first. Raises StorageError."""
        while True:
            found = [v for name in self._tops() if (v := version_of_manifest(name)) is not None]
            if not found:
                return None
            name = manifest_name(max(found))
            if (data := self.read(name)) is not None:  # else it was collected: there is a later one
                return Manifest.decode(f"{self}/{name}", data)

    def collect(self, current: Manifest, *, before_ms: int) -> None:
        """Remove versions that were replaced before a time, and what failed refreshes left.

        Files for a version that exists, and that no manifest names, belong to a refresh that came
        second or died. Those for a later version may belong to one that runs.
        """
        names = [*self.names()]
        versions = sorted(v for name in names if (v := version_of_manifest(name)) is not None)
        keep, replaced_ms = {current.version}, current.made_ms
        named = current.paths
        for version in reversed([v for v in versions if v < current.version]):
            data = self.read(manifest_name(version)) if replaced_ms >= before_ms else None
            if data is None:
                break
            older = Manifest.decode(f"{self}/{manifest_name(version)}", data)
            keep.add(version)
            named |= older.paths
            replaced_ms = older.made_ms
        gone = [manifest_name(v) for v in versions if v < current.version and v not in keep]
        gone += [
            name
            for name in names
            if name not in named
            and (version_of_data(name) or current.version + 1) <= current.version
        ]
        self.remove(gone)

    def _tops(self) -> Iterator[str]:
        """Yield the names that may be manifests."""
        return self.names()


class _TableDirectory(TablePlace):
    """A table in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> Iterator[str]:
        yield from (name for name in self._tops() if name != "data")
        with contextlib.suppress(FileNotFoundError):
            for directory in files.list_names(self.root / "data"):
                # Another process may remove it, or a user may have put a file there.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for name in files.list_names(self.root / "data" / directory):
                        yield f"data/{directory}/{name}"

    def _tops(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from files.list_names(self.root)

    def read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return files.read_file(self.root / name)
        return None

    def write(self, name: str, data: Buffer) -> None:
        path = self.root / name
        files.make_directories(path.parent)
        files.create(path, data)
        for directory in (path.parent, path.parent.parent, self.root):
            files.sync_directory(directory)

    def create(self, name: str, data: bytes) -> bool:
        files.make_directories(self.root)
        temporary = self.root / f".{uuid.uuid4().hex}{_TEMPORARY}"
        files.create(temporary, data)
        try:
            is_ours = files.link(temporary, self.root / name)
        finally:
            files.remove(temporary)
        files.sync_directory(self.root)
        return is_ours

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.root / name
            files.remove(path)
            if path.parent != self.root and not files.list_names(path.parent):
                with contextlib.suppress(FileNotFoundError):
                    files.remove_directory(path.parent)


class _StoredTable(TablePlace):
    """A table in an object store."""

    def __init__(self, client: ObjectClient) -> None:
        self.client = client

    def __str__(self) -> str:
        return str(self.client.address)

    def names(self) -> Iterator[str]:
        return (entry.name for entry in self.client.list(""))

    def read(self, name: str) -> bytes | None:
        found = self.client.get(name)
        return None if found is None else found.data

    def write(self, name: str, data: Buffer) -> None:
        self.client.put_unique(name, data)

    def create(self, name: str, data: bytes) -> bool:
        from kafkalog.storage_engine.object_store.client import Outcome

        for _ in range(_TRIES):
            if self.client.create(name, data) is Outcome.DONE:
                return True
            if (found := self.read(name)) is not None:  # no answer may hide our own success
                return found == data
        raise StorageError(
            f"{self}/{name}: the store neither creates the manifest nor has it. Refresh again."
        )

    def remove(self, names: Iterable[str]) -> None:
        self.client.delete(names)


@looking()
def table_location(given: str | PathLike[str]) -> str:
    """Return where a table is: an absolute path, or the URL of a prefix in an object store.

    Raises InvalidInputError, also for a file and for what is below one, and StorageError.
    """
    text = fspath(given) if isinstance(given, (str, PathLike)) else ""
    if is_store_url(text):
        return text
    is_file_uri = text.lower().startswith("file:")
    if not text.strip() or (is_url(text) and not is_file_uri):
        raise InvalidInputError(
            "the location of a materialized table: expected a directory, or the URL of a prefix in "
            f"an object store, found {given!r}. Give another location."
        )
    path = spark_local_path(text) if is_file_uri else local_path(text)
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir():
        raise InvalidInputError(
            f"{path}: a materialized table is a directory, and {nearest} is a file. Give another "
            "location."
        )
    return str(path)


def table_place(location: str, options: Mapping[str, str]) -> TablePlace:
    """Return the place of a location, a directory or a URL that options `store.*` complete.

    Raises InvalidInputError.
    """
    if not is_store_url(location):
        return _TableDirectory(Path(table_location(location)))
    from kafkalog.storage_engine.object_store.client import shared_client

    return _StoredTable(shared_client(StoreAddress.parse(location, options)))


def check_outside_log(location: str, path: str) -> None:
    """Raise InvalidInputError if a table would lie inside its log, whose files a broker loads."""
    if is_store_url(location) != is_store_url(path):
        return
    if is_store_url(path):
        is_inside = f"{location.rstrip('/')}/".startswith(f"{path.rstrip('/')}/")
    else:
        is_inside = resolved(Path(location)).is_relative_to(resolved(log_directory({PATH: path})))
    if is_inside:
        raise InvalidInputError(
            f"{location}: a materialized table cannot lie inside its log (expected a place outside "
            f"{path}). Give another location."
        )
