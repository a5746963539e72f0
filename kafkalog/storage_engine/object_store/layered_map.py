"""A map that never changes, so a changed copy costs little.

The entries lie in layers. A copy gets one more layer, merged with those below that are less than
twice as large. An entry is therefore copied about log n times in all, and not at each change.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Final, Generic, TypeVar

_Value = TypeVar("_Value")
_DROPPED: Final = object()
"""The value of a name that a layer below may have."""


class LayeredMap(Mapping[str, _Value], Generic[_Value]):
    """A map by name; see the module."""

    __slots__ = ("_layers", "_size")

    def __init__(self, entries: Mapping[str, _Value] | None = None) -> None:
        """Take the entries, which nobody changes from now on."""
        self._layers: Sequence[Mapping[str, Any]] = (entries,) if entries else ()
        self._size = len(entries or ())

    def changed(
        self, added: Mapping[str, _Value], dropped: Iterable[str] = ()
    ) -> LayeredMap[_Value]:
        """Return a copy without some names and with some entries; raises KeyError."""
        gone = {name: self[name] for name in dropped}
        layer: dict[str, Any] = {**dict.fromkeys(gone, _DROPPED), **added}
        below = [*self._layers]
        while below and len(below[-1]) < 2 * len(layer):
            layer = {**below.pop(), **layer}
        if not below:
            layer = {name: value for name, value in layer.items() if value is not _DROPPED}
        copy = LayeredMap[_Value]()
        copy._layers = (*below, layer) if layer else below
        copy._size = (
            self._size - len(gone) + sum(name in gone or name not in self for name in added)
        )
        return copy

    def __getitem__(self, name: str) -> _Value:
        for layer in reversed(self._layers):
            if name in layer:
                if layer[name] is _DROPPED:
                    break
                found: _Value = layer[name]
                return found
        raise KeyError(name)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat())

    def items(self) -> ItemsView[str, _Value]:
        """Return all entries, the earliest first."""
        return self._flat().items()

    def values(self) -> ValuesView[_Value]:
        """Return all values, the earliest first."""
        return self._flat().values()

    def _flat(self) -> Mapping[str, _Value]:
        if len(self._layers) == 1:
            return self._layers[0]
        flat: dict[str, Any] = {}
        for layer in self._layers:
            flat |= layer
        return {name: value for name, value in flat.items() if value is not _DROPPED}
