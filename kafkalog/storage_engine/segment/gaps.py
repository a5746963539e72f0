"""The gaps in a partition's offsets: the files `kl-gaps` and `kl-raw-gaps` in its directory.

A batch's checksum does not cover its base offset. But a log of ours has no gap that is not listed
here. Every base offset therefore follows from the batch before it, and readers notice a changed
offset, a missing segment, or one truncated between two batches (`offset_chain`).

A *gap* is a pair (from_offset, to_offset). No batch has an offset in [from, to). The next batch, or
the next segment's base, or the end of the cleaned section is exactly `to`. Listed sources that
outlived an interrupted swap are an exception: they may begin within a cleaned segment's last gap.

- `kl-gaps` has a *section* for every segment that the cleaner has written, identified by the
  segment's base offset and the size of its `.log`. The cleaner writes it once, before the swaps. It
  keeps the sections of the old files next to the new ones until the next cleaning, and a reader
  uses that of its open file. The replaced files get a section too. A base thus has a section for
  every file that may have its name, and a file of another size is damaged.
- An empty section of base -1 or -2 has a number of the journal as its size. It's that of the last
  record when the cleaner wrote the file: before the swaps (-1), or after them (-2). It shows
  whether the journal is of the same moment (`moment_fault`), which it need not be in a copy of a
  live log.
- `kl-raw-gaps` lists the gaps of raw appends in one section, and is written before the commit. Gaps
  above the high watermark belong to a dead commit, and the next truncation removes them.

A section has parts, each with its checksum in a table at the file's beginning, so that readers hold
only one part in memory. Both files are replaced as a whole, so an open file keeps matching its
reader's listing.
"""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from crc32c import crc32c

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kafkalog.storage_engine.records.tables import BatchTable

    Gaps: TypeAlias = npt.NDArray[np.int64]
    """Gaps, ascending: int64 (g, 2), a row is (from_offset, to_offset)."""

COPY_AGAIN = "this copy was made while the log was cleaned: copy it again, as docs/backup.md says"
_BEGUN, _FINISHED = -1, -2
"""The bases of the sections whose size is a number of the journal."""
_UNLISTED = (-1, -1)
"""In place of the gaps of a segment whose gaps are not listed."""


@dataclass(frozen=True, slots=True)
class Section:
    """The gaps of a segment to list; `size` is that of its `.log` file in bytes."""

    base_offset: int
    size: int
    gaps: Gaps

    @property
    def key(self) -> tuple[int, int]:
        """The key of the section."""
        return self.base_offset, self.size


class GapCollector:
    """Collect the gaps of one segment from its batches, in order."""

    def __init__(self, base_offset: int) -> None:
        self.next_offset = base_offset
        """The last offset of the last batch plus one."""
        self._found: list[Gaps] = []

    def add(self, base_offsets: npt.NDArray[np.int64], last_offsets: npt.NDArray[np.int64]) -> None:
        """Add the next batches, (b,) each."""
        import numpy as np

        if not len(base_offsets):
            return
        expected = np.empty_like(base_offsets)
        expected[0] = self.next_offset
        np.add(last_offsets[:-1], 1, out=expected[1:])
        rows = np.flatnonzero(expected != base_offsets)
        if len(rows):
            self._found.append(np.stack((expected[rows], base_offsets[rows]), axis=1))
        self.next_offset = int(last_offsets[-1]) + 1

    def gaps(self, end: int) -> Gaps:
        """Return all gaps of the segment; offset `end` follows it."""
        import numpy as np

        last = [(self.next_offset, end)] if self.next_offset < end else []
        found = [*self._found, np.array(last, dtype=np.int64).reshape(-1, 2)]
        result: Gaps = np.concatenate(found)
        return result


class SourceGaps:
    """Collect the gaps of a segment to be cleaned, before its cleaning.

    A segment with messages v0 or v1 is a broker's. Its gaps depend on where a reader begins, so its
    section only says that they are not listed.
    """

    def __init__(self, base_offset: int, size: int) -> None:
        self._key = base_offset, size
        self._collector: GapCollector | None = GapCollector(base_offset)

    def add(self, table: BatchTable) -> None:
        """Add the next batches."""
        if table.has_messages:
            self._collector = None
        if self._collector is not None:
            self._collector.add(table.base_offsets, table.last_offsets)

    def section(self, end: int) -> Section:
        """Return the section of the segment; offset `end` follows it."""
        import numpy as np

        if self._collector is None:
            return Section(*self._key, np.array([_UNLISTED], dtype=np.int64))
        return Section(*self._key, self._collector.gaps(end))


@dataclass(frozen=True, slots=True)
class _Part:
    """An entry of a file's table, and the position of its gaps in the file (0: not written yet)."""

    position: int
    base_offset: int
    size: int
    number: int
    count: int
    first_from: int
    crc: int


class GapFile:
    """One of the two files, opened; a missing one has no sections. `close` it.

    It is read on demand.
    """

    def __init__(self, path: Path) -> None:
        """Open the file if there is one; raises StorageError."""
        self.path = path
        self._fd = -1
        self._parts: list[_Part] | None = None
        self._by_base: dict[int, list[list[_Part]]] | None = None
        try:
            self._fd = files.open_listed(path)
        except FileNotFoundError:
            self._parts = []

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def sections(self) -> Iterator[GapSection]:
        """Yield every section, in the file's order; raises like `sections_of`."""
        for found in self._grouped().values():
            for parts in found:
                yield GapSection(self, parts)

    def number(self, base: int) -> int:
        """Return the number of the journal that a section of the base has; 0 without one."""
        return max((section.size for section in self.sections_of(base)), default=0)

    @property
    def is_missing(self) -> bool:
        """Whether the file is missing."""
        return self._fd < 0

    def sections_of(self, base_offset: int) -> list[GapSection]:
        """Return the sections of a base offset; raises CorruptLogError, and OSError."""
        return [GapSection(self, parts) for parts in self._grouped().get(base_offset, ())]

    def _grouped(self) -> dict[int, list[list[_Part]]]:
        """Return the parts of each section, by base offset."""
        if self._by_base is None:
            grouped: dict[int, list[list[_Part]]] = {}
            for part in self.parts():
                sections = grouped.setdefault(part.base_offset, [])
                if part.number == 0:
                    sections.append([])
                if not sections:
                    expected = f"the first part of the gaps of offset {part.base_offset}"
                    raise CorruptLogError(
                        self.path, layout.GAPS_HEADER.size, expected, f"part {part.number}"
                    )
                sections[-1].append(part)
            self._by_base = grouped
        return self._by_base

    def parts(self) -> list[_Part]:
        """Return the part table after verifying its checksum."""
        if self._parts is None:
            self._parts = self._read_table()
        return self._parts

    def _read_table(self) -> list[_Part]:
        header = layout.GAPS_HEADER
        size = os.fstat(self._fd).st_size
        data = files.read_at(self._fd, header.size, 0)
        if len(data) < header.size:
            raise CorruptLogError(self.path, 0, f"{header.size} bytes and more", f"{size} bytes")
        magic, version, count = header.unpack(data)
        if magic != layout.GAPS_MAGIC:
            raise CorruptLogError(self.path, 0, f"{layout.GAPS_MAGIC!r}", f"{magic!r}")
        if version != layout.GAPS_VERSION:
            expected = f"format version {layout.GAPS_VERSION}"
            raise CorruptLogError(self.path, len(magic), expected, f"version {version}")
        end = header.size + count * layout.GAPS_PART.size
        start = end + layout.CHECKSUM.size
        if size < start:
            expected = f"{start} bytes and more, for {count} parts"
            raise CorruptLogError(self.path, size, expected, f"{size} bytes")
        data += files.read_at(self._fd, start - header.size, header.size)
        (crc,) = layout.CHECKSUM.unpack_from(data, end)
        found = crc32c(data[:end])
        if found != crc:
            raise CorruptLogError(self.path, end, f"checksum {found:#010x}", f"{crc:#010x}")
        parts = []
        for fields in layout.GAPS_PART.iter_unpack(data[header.size : end]):
            part = _Part(start, *fields)
            parts.append(part)
            start += part.count * layout.GAP.size
        if size != start:
            raise CorruptLogError(self.path, min(size, start), f"{start} bytes", f"{size} bytes")
        return parts

    def data(self, part: _Part) -> bytes:
        """Return the bytes of a part's gaps, checked; raises CorruptLogError."""
        data = files.read_at(self._fd, part.count * layout.GAP.size, part.position)
        if crc32c(data) != part.crc:
            expected = f"{part.count} gaps with the checksum {part.crc:#010x}"
            raise CorruptLogError(self.path, part.position, expected, "others")
        return data

    def gaps(self, part: _Part) -> Gaps:
        """Return a part's gaps; raises CorruptLogError."""

        return decoded(self.data(part))


def decoded(data: bytes) -> Gaps:
    """Return the gaps that are stored as pairs."""
    import numpy as np

    return np.frombuffer(data, dtype=">i8").astype(np.int64).reshape(-1, 2)


class GapRows:
    """The gaps of one segment, or a part of them, in memory."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps

    def between(self, low: int, high: int) -> Gaps:
        """Return the gaps that begin in [low, high]."""
        first, stop = self._gaps[:, 0].searchsorted((low, high + 1))
        return self._gaps[first:stop]


class GapSection:
    """The gaps of one segment, or of all raw appends; only one part is in memory."""

    def __init__(self, file: GapFile, parts: Sequence[_Part]) -> None:
        self.base_offset = parts[0].base_offset
        self.size = parts[0].size
        self.parts = parts
        self._file = file
        self._firsts = [part.first_from for part in parts]
        self._read: tuple[int, Gaps] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The (base offset, size) of the segment."""
        return self.base_offset, self.size

    @property
    def is_unlisted(self) -> bool:
        """Whether the section says that the segment's gaps are not listed."""
        return self.parts[0].count > 0 and self.parts[0].first_from == _UNLISTED[0]

    def between(self, low: int, high: int) -> Gaps:
        """Return the gaps that begin in [low, high]; raises CorruptLogError, and OSError."""
        import numpy as np

        found = []
        for place in range(max(0, bisect_right(self._firsts, low) - 1), len(self.parts)):
            if self._firsts[place] > high:
                break
            found.append(GapRows(self._gaps(place)).between(low, high))
        result: Gaps = np.concatenate([np.empty((0, 2), dtype=np.int64), *found])
        return result

    def last_to(self) -> int:
        """Return the end of the last gap; -1 without one."""
        gaps = self._gaps(len(self.parts) - 1)
        return int(gaps[-1, 1]) if len(gaps) else -1

    def all(self) -> Iterator[Gaps]:
        """Yield all gaps, part by part."""
        for place in range(len(self.parts)):
            yield self._gaps(place)

    def data(self) -> Iterator[tuple[_Part, bytes]]:
        """Yield the section's parts, as stored."""
        for part in self.parts:
            yield part, self._file.data(part)

    def _gaps(self, place: int) -> Gaps:
        if self._read is None or self._read[0] != place:
            self._read = place, self._file.gaps(self.parts[place])
        return self._read[1]


_Stored: TypeAlias = "tuple[_Part, GapFile | bytes]"


def moment_fault(file: GapFile, number: int, swapped_at: int) -> tuple[str, str] | None:
    """Return (expected, found) if `kl-gaps` is not of the journal's moment; None if it may be.

    `number` is that of the journal's last record, `swapped_at` that of the record before the last
    swap. In a log that is read where it was written, the two always fit. While a copy was made, the
    cleaner may have removed records in favour of ones that the copy lacks. It may also have left
    obsolete ones that nobody looks for any more. Raises CorruptLogError for a damaged file.
    """
    finished = file.number(_FINISHED)
    written = max(finished, file.number(_BEGUN))
    if written > number:
        expected = f"segments that were cleaned by record {number}, the journal's last"
        return expected, f"ones cleaned after record {written}: committed records may be missing"
    if swapped_at and (file.is_missing or 0 < finished < swapped_at):
        expected = f"segments that were cleaned at record {swapped_at} of the journal"
        return expected, f"ones of record {finished}: obsolete records may count as the latest"
    return None


def check_moment(directory: Path, number: int, swapped_at: int) -> None:
    """Raise StorageError for the fault of the same name: the log is a copy of several moments."""
    file = GapFile(directory / layout.GAPS)
    try:
        fault = moment_fault(file, number, swapped_at)
    finally:
        file.close()
    if fault:
        raise StorageError(f"{directory}: expected {fault[0]}, found {fault[1]}; {COPY_AGAIN}")


def list_sections(
    directory: Path,
    sections: Sequence[Section],
    *,
    present: Collection[tuple[int, int]],
    number: int = 0,
    is_finished: bool = False,
) -> None:
    """List the gaps of segments in `kl-gaps`, durably.

    `number` is that of the journal's last record (0: unknown), and `is_finished` says that the
    swaps are over.

    Drops sections of files that are not in `present`, as (base offset, size). One key may have two
    different sections, if an old file and a new one have the same size. The caller holds the
    partition's cleaner lock and the commit lock. Raises CorruptLogError for a damaged file, and
    OSError.
    """
    import numpy as np

    path = directory / layout.GAPS
    before = GapFile(path)
    try:
        kept: dict[tuple[int, int], list[GapSection]] = {}
        for known in before.sections():
            if known.key in present:
                kept.setdefault(known.key, []).append(known)
        stored: list[_Stored] = [
            (part, before) for alike in kept.values() for known in alike for part in known.parts
        ]
        for section in sections:
            added = list(_parts(section))
            if not any(_is_alike(known, added) for known in kept.get(section.key, ())):
                stored += added
        if number:
            base = _FINISHED if is_finished else _BEGUN
            stored += _parts(Section(base, number, np.empty((0, 2), dtype=np.int64)))
        _write(path, stored)
    finally:
        before.close()


def add_raw_gaps(directory: Path, gaps: Gaps, *, first_base: int) -> None:
    """Add gaps to `kl-raw-gaps`, durably; all lie after the listed ones.

    Drops gaps wholly below `first_base`, the base offset of the partition's first segment. The
    caller holds the commit lock and has truncated the file. Raises CorruptLogError, and OSError.
    """
    import numpy as np

    before = GapFile(directory / layout.RAW_GAPS)
    try:
        parts = before.parts()
        kept = [p for p, after in pairwise(parts) if after.first_from > first_base] + parts[-1:]
        if kept and kept[-1].count < layout.GAPS_PART_MAX:
            gaps = np.concatenate((before.gaps(kept.pop()), gaps))
        _write_raw(before, kept, gaps[gaps[:, 1] > first_base])
    finally:
        before.close()


def truncate_raw_gaps(directory: Path, end: int) -> None:
    """Drop the gaps that a dead commit listed above the log's end, durably.

    The caller holds the commit lock. Raises CorruptLogError for a damaged file, and OSError.
    """
    import numpy as np

    before = GapFile(directory / layout.RAW_GAPS)
    try:
        found = list(before.sections())
        if not found or found[0].last_to() <= end:
            return
        kept = [part for part in found[0].parts if part.first_from < end]
        gaps = before.gaps(kept.pop()) if kept else np.empty((0, 2), dtype=np.int64)
        _write_raw(before, kept, gaps[gaps[:, 1] <= end])
    finally:
        before.close()


def _write_raw(before: GapFile, kept: Sequence[_Part], gaps: Gaps) -> None:
    """Replace the list of raw gaps by some of its parts and the gaps after them."""
    stored: list[_Stored] = [
        (dataclasses.replace(part, number=number), before) for number, part in enumerate(kept)
    ]
    section = Section(0, layout.RAW_GAPS_SIZE, gaps)
    _write(before.path, stored + list(_parts(section, len(stored))))


def _is_alike(listed: GapSection, added: Sequence[_Stored]) -> bool:
    return len(listed.parts) == len(added) and all(
        dataclasses.replace(part, position=0) == other and data == stored
        for (part, data), (other, stored) in zip(listed.data(), added, strict=True)
    )


def _parts(section: Section, first_number: int = 0) -> Iterator[_Stored]:
    """Yield the parts of a section with their bytes; a section without gaps has one part."""
    gaps, step = section.gaps, layout.GAPS_PART_MAX
    for number, start in enumerate(range(0, max(len(gaps), 1), step), first_number):
        rows = gaps[start : start + step]
        if not len(rows) and number:
            return
        data = rows.astype(">i8").tobytes()
        first_from = int(rows[0, 0]) if len(rows) else -1
        base_offset, size = section.key
        yield _Part(0, base_offset, size, number, len(rows), first_from, crc32c(data)), data


def _write(path: Path, stored: Sequence[_Stored]) -> None:
    """Write a whole file piece by piece: temporary file, sync, rename, sync."""
    table = layout.GAPS_HEADER.pack(layout.GAPS_MAGIC, layout.GAPS_VERSION, len(stored))
    table += b"".join(
        layout.GAPS_PART.pack(p.base_offset, p.size, p.number, p.count, p.first_from, p.crc)
        for p, _ in stored
    )
    temporary = path.with_name(path.name + layout.TEMPORARY)
    files.create(temporary, table + layout.CHECKSUM.pack(crc32c(table)))
    with files.closing(files.open_to_write(temporary)) as fd:
        position = len(table) + layout.CHECKSUM.size
        for part, source in stored:
            data = source if isinstance(source, bytes) else source.data(part)
            if data:
                files.write_at(fd, data, position)
                position += len(data)
        files.sync_file(fd)
    files.rename(temporary, path)
    files.sync_directory(path.parent)
