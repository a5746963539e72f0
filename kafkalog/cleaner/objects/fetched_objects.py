"""Objects of a store in temporary files, each fetched at most once, some side by side.

An object is read while it is fetched: a reader waits for the bytes that it needs. The last one is
there once the object is known to end with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.object_store.fetched_ranges import FetchedRanges
from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.object_store.client import ObjectClient
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent
    from kafkalog.storage_engine.segment.byte_source import ByteSource

_REQUESTS: Final = 2
"""Objects that are fetched side by side, in pieces: the reader waits for the first of them."""
_BEGINNING: Final = 4 << 10
"""Bytes that are read first of a file: all others are as near."""


@dataclass(slots=True)
class _Arriving:
    """An object that is being fetched, or was."""

    path: Path
    size: int
    count: int = 0
    """Its first bytes that can be read; all of them only once it is known to have no more."""
    fault: BaseException | None = None


class FetchedObjects:
    """The objects of some names, read as an `ObjectClient` reads them; `close` it. Thread-safe.

    An object is fetched whole when `begin` is called or when it is first read. Others are read from
    the store.
    """

    def __init__(self, client: ObjectClient, directory: Path, sizes: Mapping[str, int]) -> None:
        """Take an empty directory, and the objects' sizes by name; send no request."""
        self.address = client.address
        self._client = client
        self._directory = directory
        self.sizes = sizes
        """The sizes of the objects that are read from files, by name."""
        self._found: dict[str, _Arriving] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(_REQUESTS, "kafkalog-clean")

    def close(self) -> None:
        """Fetch no more, and wait for what is under way."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, name: str) -> None:
        """Begin to fetch an object, unless that was done."""
        with self._changed:
            self._begun(name)

    def forget(self, names: Iterable[str]) -> None:
        """Remove objects' files, which nobody reads any more, while others are read."""
        with self._changed:
            gone = [self._found.pop(name).path for name in names if name in self._found]
        for path in gone:
            self._pool.submit(files.remove, path)

    def _begun(self, name: str) -> _Arriving:
        found = self._found.get(name)
        if found is None:
            # Names of a damaged state may end alike: no file is ever another's.
            path = self._directory / f"{next(self._numbers)}.object"
            found = self._found[name] = _Arriving(path, self.sizes[name])
            files.create(path)
            self._pool.submit(self._fetch, name, found)
        return found

    def _fetch(self, name: str, found: _Arriving) -> None:
        position = 0
        try:
            with files.closing(files.open_to_write(found.path)) as fd:
                if found.size:
                    files.preallocate(fd, found.size)  # cheaper than block by block
                for piece in self._client.pieces(name, found.size):
                    files.write_at(fd, piece, position)
                    position += len(piece)
                    self._tell(found, min(position, found.size - 1))
            self._tell(found, found.size)
        except BaseException as fault:
            self._tell(found, found.count, fault)

    def _tell(self, found: _Arriving, count: int, fault: BaseException | None = None) -> None:
        with self._changed:
            found.count, found.fault = count, fault
            self._changed.notify_all()

    def first_bytes(self, name: str, size: int) -> bytes:
        """Return an object's first bytes, `size` or fewer. Raises StorageError, OSError."""
        if name not in self.sizes:
            return self._client.first_bytes(name, size)
        return self.read(name, min(size, _BEGINNING), 0)

    def fetch(self, name: str, position: int, size: int) -> memoryview:
        """Return `size` bytes at `position`. Raises StorageError, OSError."""
        if name not in self.sizes:
            return self._client.fetch(name, position, size)
        return memoryview(self.read(name, size, position))

    def read(self, name: str, size: int, position: int) -> bytes:
        """Return `size` bytes of an object at `position`; fewer only at its end."""
        known = self._found.get(name)
        if known is None or known.count < min(position + size, known.size):
            known = self._awaited(name, position + size)
        with files.closing(files.open_to_read(known.path)) as fd:
            return files.read_at(fd, size, position)

    def _awaited(self, name: str, end: int) -> _Arriving:
        """Wait for an object's bytes up to `end`, or for all; raises what fetching it raised."""
        with self._changed:
            found = self._begun(name)
            end = min(end, found.size)
            self._changed.wait_for(lambda: found.count >= end or found.fault is not None)
            if found.count < end and found.fault is not None:
                raise found.fault
        return found


class _FetchedBytes:
    """The bytes of a segment object, in a file."""

    def __init__(self, objects: FetchedObjects, name: str, size: int) -> None:
        self._objects = objects
        self._name = name
        self._size = size

    def size(self) -> int:
        return self._size

    def read_at(self, size: int, position: int) -> bytes:
        return self._objects.read(self._name, min(size, self._size - position), position)

    def scattered(self, reads: int) -> ByteSource:
        return self


class FetchedSnapshot(ObjectSnapshot):
    """A snapshot of a partition; some of its objects are read from files."""

    def __init__(
        self,
        objects: FetchedObjects,
        topic: str,
        partition: int,
        state: PartitionState,
        extents: Sequence[PlacedExtent],
    ) -> None:
        super().__init__(FetchedRanges(objects, extents), topic, partition, state, extents)
        self._objects = objects

    def _bytes_of(self, placed: PlacedExtent, following: Sequence[PlacedExtent]) -> ByteSource:
        if placed.object_name not in self._objects.sizes:
            return super()._bytes_of(placed, following)
        return _FetchedBytes(self._objects, placed.object_name, placed.extent.size)
