"""Check that the offsets of a segment follow each other, from batch to batch and to its end.

A log of ours has only listed gaps (`gaps`). The begin of a batch thus follows from the batch before
it, and a chain of batches is right from its first one on. That is the segment's first batch, whose
offset is in the file's name, or one that an entry of the offset index confirms.

A broker's part of the log, below `listed_from`, may have unlisted gaps, unless the cleaner has
rewritten it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.gaps import GapFile, GapRows, GapSection

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GapLists:
    """The lists of a partition's gaps, as of one time; `close` it.

    Open it together with the segments, under the segments lock, after loading the state.
    """

    def __init__(self, directory: Path) -> None:
        """Open the existing lists; raises StorageError."""
        self.cleaned = GapFile(directory / layout.GAPS)
        try:
            self.raw = GapFile(directory / layout.RAW_GAPS)
        except BaseException:
            self.cleaned.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self.cleaned.close()
        self.raw.close()

    def chain(
        self, base_offset: int, size: int | None, *, next_offset: int | None, listed_from: int
    ) -> OffsetChain:
        """Begin a chain in a segment whose `.log` has `size` bytes; None for the active one.

        The first batch must begin at `next_offset`; None accepts any offset. Raises
        CorruptLogError.
        """
        sections = [] if size is None else self.cleaned.sections_of(base_offset)
        if sections:
            sizes = [section.size for section in sections]
            exact = [section for section in sections if section.size == size]
            if any(section.is_unlisted for section in exact):
                return OffsetChain([], next_offset, layout.INT64_MAX)
            wrong_sizes = [] if exact else sizes
            return OffsetChain(exact or sections, next_offset, 0, wrong_sizes, self.cleaned)
        raw = list(self.raw.sections())
        return OffsetChain(raw, next_offset, listed_from)


class OffsetChain:
    """Follow the batches of one segment; not thread-safe."""

    def __init__(
        self,
        sections: Sequence[GapSection | GapRows],
        next_offset: int | None,
        listed_from: int,
        sizes: Sequence[int] = (),
        cleaned: GapFile | None = None,
    ) -> None:
        """Begin a chain.

        One of the sections describes the segment; without sections it has no gap. Gaps that end at
        or below `listed_from` need not be listed. `sizes` has the listed sizes of the file if its
        own is not among them. The sections are then those of other files, and the chain cannot end
        well. `cleaned` is the file of the sections, if they are of segments.
        """
        self.next_offset = next_offset
        """The required begin of the next batch, unless a gap is listed there; None: any."""
        self.sizes = sizes
        self.listed_from = listed_from
        self._sections = sections
        self._cleaned = cleaned

    @property
    def has_list(self) -> bool:
        """Whether a list of gaps describes the segment."""
        return bool(self._sections)

    def first_break(
        self, base_offsets: npt.NDArray[np.int64], last_offsets: npt.NDArray[np.int64]
    ) -> int | None:
        """Return the first of the next batches, (b,) each, that does not follow, or None.

        Offsets rise, and there is at least one batch. The chain advances only if all follow.
        """
        import numpy as np

        froms = np.empty_like(base_offsets)
        froms[0] = base_offsets[0] if self.next_offset is None else self.next_offset
        np.add(last_offsets[:-1], 1, out=froms[1:])
        rows = np.flatnonzero((froms != base_offsets) & (base_offsets > self.listed_from))
        broken = None
        if self._sections:
            breaks = [self._compare(s, froms, base_offsets, rows) for s in self._sections]
            fitting = [s for s, b in zip(self._sections, breaks, strict=True) if b is None]
            if fitting:
                self._sections = fitting
            else:
                broken = max(b for b in breaks if b is not None)
        elif len(rows):
            broken = int(rows[0])
        if broken is None:
            self.next_offset = int(last_offsets[-1]) + 1
        return broken

    def follows(self, base_offset: int, last_offset: int) -> bool:
        """Return whether the next batch follows; the chain advances only then."""
        if not self._sections and self.next_offset in (None, base_offset):
            self.next_offset = last_offset + 1
            return True
        if self.next_offset is not None and base_offset < self.next_offset:
            return False
        import numpy as np

        return self.first_break(np.array([base_offset]), np.array([last_offset])) is None

    def _compare(
        self,
        section: GapSection | GapRows,
        froms: npt.NDArray[np.int64],
        base_offsets: npt.NDArray[np.int64],
        rows: npt.NDArray[np.intp],
    ) -> int | None:
        """Return the first batch where the gaps and their list differ, or None."""
        import numpy as np

        listed = section.between(int(froms[0]), int(froms[-1]))
        found = np.stack((froms[rows], base_offsets[rows]), axis=1)
        count = min(len(listed), len(found))
        is_other = (listed[:count] != found[:count]).any(axis=1)
        if is_other.any():
            count = int(is_other.argmax())
        elif len(listed) == len(found):
            return None
        offsets = [int(gaps[count, 0]) for gaps in (listed, found) if len(gaps) > count]
        return min(int(np.searchsorted(froms, min(offsets))), len(froms) - 1)

    def expected_after(self, next_offset: int) -> int:
        """Return the begin of the next batch if all offsets below `next_offset` are present.

        It is the highest one by the sections that fit: a source's may end below its output's.
        """
        listed = (section.between(next_offset, next_offset) for section in self._sections)
        return max((int(gaps[0, 1]) for gaps in listed if len(gaps)), default=next_offset)

    def ends_at(self, end: int) -> bool:
        """Return whether the segment may end here, with the next one beginning at offset `end`.

        The list of a cleaned segment reaches to the end of its sources. After an interrupted swap
        some sources may remain, because names alone do not show that the segment covers them. The
        next segment may then begin within the last gap, if it is listed too.
        """
        next_offset = self.next_offset
        if next_offset is None:
            return True
        if self.sizes:
            return False
        if not self._sections:
            return next_offset == end or end <= self.listed_from
        return any(self._ends(section, next_offset, end) for section in self._sections)

    def _ends(self, section: GapSection | GapRows, next_offset: int, end: int) -> bool:
        listed: list[list[int]] = section.between(next_offset, end - 1).tolist()
        is_open = next_offset == end or end <= self.listed_from
        if listed == ([] if is_open else [[next_offset, end]]):
            return True
        if self._cleaned is None or len(listed) != 1 or not self._cleaned.sections_of(end):
            return False
        return listed[0][0] == next_offset and listed[0][1] > end
