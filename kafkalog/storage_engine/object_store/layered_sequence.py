"""A sequence that never changes, so a longer copy costs little.

The items lie in layers. A copy gets one more layer, merged with those before that are less than
twice as long. An item is therefore copied about log n times in all, and not at each change.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

_Item = TypeVar("_Item")


class LayeredSequence(Sequence[_Item], Generic[_Item]):
    """A sequence; see the module."""

    __slots__ = ("_ends", "_layers")

    def __init__(self, layers: Sequence[Sequence[_Item]] = ()) -> None:
        """Take the layers, none of them empty; nobody may change them afterwards."""
        self._layers = layers
        self._ends = [*itertools.accumulate(map(len, layers))]

    def extended(self, more: Sequence[_Item]) -> LayeredSequence[_Item]:
        """Return a copy with more items at the end."""
        before = [*self._layers]
        size = len(more)
        merged = [more]
        while before and len(before[-1]) < 2 * size:
            merged.append(before.pop())
            size += len(merged[-1])
        last = tuple(itertools.chain.from_iterable(reversed(merged)))
        return LayeredSequence((*before, last) if last else before)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> _Item: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[_Item]: ...

    def __getitem__(self, place: int | slice) -> _Item | Sequence[_Item]:
        if isinstance(place, slice):
            return tuple(self)[place]
        place = range(len(self))[place]
        layer = bisect_right(self._ends, place)
        return self._layers[layer][place - self._ends[layer]]  # counted from the layer's end

    def __iter__(self) -> Iterator[_Item]:
        return itertools.chain.from_iterable(self._layers)
