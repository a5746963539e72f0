"""The segments that a round reads, which of them become one, and what they became."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeVar

from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
    from kafkalog.storage_engine.segment.gaps import Section


class Source(Protocol):
    """A closed segment that a round reads: a file in a directory, or an object in a store."""

    @property
    def base_offset(self) -> int:
        """Its first offset."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def segment(self) -> int:
        """The base offset of its whole segment; an object may have only a part of that."""

    def index_sizes(self) -> tuple[int, int]:
        """Return the bytes of its offset index and of its time index."""

    def last_time(self) -> int | None:
        """Return the timestamp of its time index's last entry (ms); None without one."""

    def transactions(self) -> bytes:
        """Return its packed transaction index."""

    def modified_ns(self) -> int | None:
        """Return the modification time of its file; None if the file is missing, or gone by now."""


_Source = TypeVar("_Source", bound=Source)


def group_segments_by_size(
    segments: Sequence[_Source], *, max_size: int, max_index_size: int, end: int
) -> list[list[_Source]]:
    """Group consecutive segments so that a group fits into one segment (rules C45, C46).

    The sums of the `.log` sizes and of both index sizes keep their limits, and a group's offsets
    span at most 2^31-1. A segment ends where the next one begins, the last one at `end`. A segment
    that is too large is a group of its own.
    """
    groups: list[list[_Source]] = []
    totals = (0, 0, 0)
    limits = (max_size, max_index_size, max_index_size)
    wholes = [[*parts] for _, parts in groupby(segments, key=lambda each: each.segment)]
    for place, whole in enumerate(wholes):
        sizes = [(each.size, *each.index_sizes()) for each in whole]
        figures = tuple(map(sum, zip(*sizes, strict=True)))
        following = wholes[place + 1][0].base_offset if place + 1 < len(wholes) else end
        sums = tuple(a + b for a, b in zip(totals, figures, strict=True))
        if (
            groups
            and all(total <= limit for total, limit in zip(sums, limits, strict=True))
            and (figures[0] == 0 or following - 1 - groups[-1][0].base_offset <= layout.INT32_MAX)
        ):
            groups[-1] += whole
            totals = (sums[0], sums[1], sums[2])
        else:
            groups.append(whole)
            totals = (figures[0], figures[1], figures[2])
    return groups


@dataclass(frozen=True, slots=True)
class RewrittenGroup:
    """The outputs of a group of segments."""

    sources: Sequence[Source]
    end: int
    """Base offset of the next segment."""
    outputs: Sequence[CleanedSegment]
    """Finished, ascending."""
    sections: Sequence[Section]
    """The gaps of the outputs."""
    source_sections: Sequence[Section]
    """The gaps of the sources."""
    is_changed: bool
    """Whether the outputs differ from their sources."""
    records_removed: int
    bytes_removed: int

    @property
    def size(self) -> int:
        """Bytes of the outputs' `.log` files."""
        return sum(output.size for output in self.outputs)

    @property
    def gap_count(self) -> int:
        """Number of gaps in memory."""
        return sum(len(section.gaps) for section in (*self.sections, *self.source_sections))

    def discard(self) -> None:
        """Remove the outputs."""
        for output in self.outputs:
            output.discard()
