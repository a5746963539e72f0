"""The side object of a segment object: what a directory has in the other files of a segment.

It has a header, a table of sections, and the sections. They have the content of the files of their
suffixes, but the gaps, which are bare pairs. The producers are those at an offset in the segment or
at its end, which the partition's state names (`producer_snapshot`). The key index comes after them,
as it may be large and is read block by block. The last one is its filter, which a reader of many
segments keeps. A reader of the others needs the object's beginning alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.segment.gaps import decoded

if TYPE_CHECKING:
    from kafkalog.storage_engine.fs.files import Buffer
    from kafkalog.storage_engine.object_store.client import ObjectReader
    from kafkalog.storage_engine.segment.byte_source import ByteSource
    from kafkalog.storage_engine.segment.gaps import Gaps

AROUND: Final = 64 << 10
"""Bytes on both sides of a block of the key index that are fetched with it: the next guess."""
BEGINNING: Final = 512 << 10
"""Bytes of the first request: the indexes of most segments, and the head of the key index."""
PIECE: Final = 256 << 10
"""Bytes of a section that are handed out at a time."""
SECTIONS: Final = (
    layout.INDEX,
    layout.TIME_INDEX,
    layout.TRANSACTION_INDEX,
    layout.SNAPSHOT,
    layout.GAPS,
    layout.KEYS,
    layout.STORED_FILTER,
)
"""The names of the sections, in their order."""


def encoded(sections: Mapping[str, Buffer]) -> Sequence[Buffer]:
    """Return the pieces of an object with some of the sections."""
    held = [(name, sections[name]) for name in SECTIONS if name in sections]
    table = json.dumps([[name, len(data), crc32c(data)] for name, data in held]).encode()
    header = layout.SIDE_HEADER.pack(
        layout.SIDE_MAGIC, layout.SIDE_VERSION, len(table), crc32c(table)
    )
    return [header + table, *(data for _, data in held)]


class _SectionBytes:
    """The bytes of a section; those around the last place that was read are kept."""

    def __init__(self, side: SideObject, position: int, size: int) -> None:
        self._side = side
        self._position = position
        self._size = size
        self._kept: tuple[int, bytes] = (0, b"")

    def size(self) -> int:
        """Return the size of the section."""
        return self._size

    def read_at(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`; fewer only at the end."""
        end = min(position + size, self._size)
        if self._side.holds(self._position + end):
            return self._side.read(self._position + position, end - position)
        start, kept = self._kept
        if not start <= position <= end <= start + len(kept):
            start = max(0, position - AROUND)
            kept = self._side.read(self._position + start, min(end + AROUND, self._size) - start)
            self._kept = start, kept
        return kept[position - start : end - start]

    def scattered(self, reads: int) -> ByteSource:
        """Return this: each read fetches little."""
        return self


class SideObject:
    """The sections of one object, fetched on demand; threads may share it."""

    def __init__(self, client: ObjectReader, name: str, data: Buffer = b"") -> None:
        """Name an object; `data` is its beginning, or all of it, if that is here."""
        self._client = client
        self._name = name
        self._data = data
        self._kept: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._table: Mapping[str, tuple[int, int, int]] | None = None

    @property
    def place(self) -> str:
        """The address of the object, for errors."""
        return f"{self._client.address}/{self._name}"

    def section(self, name: str) -> bytes:
        """Return a section, its checksum compared; empty if it is missing.

        Raises CorruptLogError, StorageError.
        """
        return b"".join(self.pieces(name, self.size_of(name)))

    def pieces(self, name: str, step: int = PIECE) -> Iterator[bytes]:
        """Yield a section, `step` bytes at a time; raises as `section` does, at the end."""
        position, size, crc = self._sections().get(name, (0, 0, 0))
        found = 0
        for start in range(position, position + size, max(1, step)):
            piece = self.read(start, min(step, position + size - start))
            found = crc32c(piece, found)
            yield piece
        if found != crc:
            raise CorruptLogError(self.place, position, f"{name} of its checksum", "other bytes")

    def kept_section(self, name: str) -> bytes:
        """Return a section, and keep it for the next call."""
        if name not in self._kept:
            self._kept[name] = self.section(name)
        return self._kept[name]

    def gaps(self) -> Gaps:
        """Return the gaps of the segment: int64 (g, 2), ascending. Raises as `section` does."""
        return decoded(self.kept_section(layout.GAPS))

    def size_of(self, name: str) -> int:
        """Return the size of a section; 0 if it is missing. Raises as `section` does."""
        return self._sections().get(name, (0, 0, 0))[1]

    def source(self, name: str) -> ByteSource:
        """Return the bytes of a section, to be read in parts; raises as `section` does."""
        position, size, _ = self._sections().get(name, (0, 0, 0))
        return _SectionBytes(self, position, size)

    def holds(self, end: int) -> bool:
        """Return whether all bytes before `end` are here."""
        return end <= len(self._data)

    def read(self, position: int, size: int) -> bytes:
        """Return bytes of the object; a request if they are not in its beginning."""
        if self.holds(position + size):
            return bytes(self._data[position : position + size])
        return bytes(self._client.fetch(self._name, position, size))

    def _sections(self) -> Mapping[str, tuple[int, int, int]]:
        with self._lock:
            if self._table is None:
                self._table = self._parsed()
            return self._table

    def _parsed(self) -> Mapping[str, tuple[int, int, int]]:
        header = layout.SIDE_HEADER
        if not self._data:
            self._data = self._client.first_bytes(self._name, BEGINNING)
        if len(self._data) < header.size:
            raise CorruptLogError(self.place, len(self._data), "a header", "the end")
        magic, version, size, crc = header.unpack_from(self._data)
        if (magic, version) != (expected := (layout.SIDE_MAGIC, layout.SIDE_VERSION)):
            raise CorruptLogError(self.place, 0, f"{expected}", f"{(magic, version)}")
        table = bytes(self._data[header.size : header.size + size])
        if len(table) < size or crc32c(table) != crc:
            raise CorruptLogError(self.place, header.size, "a table of its checksum", "another one")
        found: dict[str, tuple[int, int, int]] = {}
        position = header.size + size
        try:
            for name, length, checksum in json.loads(table):
                if int(length) < 0:
                    raise ValueError(f"a section of {length} bytes")
                found[str(name)] = position, int(length), int(checksum)
                position += int(length)
        except (ValueError, TypeError, RecursionError) as fault:
            told = f"{type(fault).__name__}: {str(fault)[:80]}"
            raise CorruptLogError(self.place, header.size, "a table of sections", told) from fault
        return found
