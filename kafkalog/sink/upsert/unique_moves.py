"""Unique values that move from row to row within a micro-batch.

A database compares each row that it writes with the rows at that moment. A micro-batch may give the
value of one row to another one, in chains and circles. Its end state is valid, but not each order
of its rows gets there. `arrange` finds an order that does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Claim(NamedTuple):
    """A row that gets a value which another row of the table has."""

    unique: int
    """The number of a unique index."""
    row: int
    """The row's number in the micro-batch; numbers are in the order of the log."""
    holder: int | None
    """The row that has the value now; None if the micro-batch does not store that row."""


class Rival(NamedTuple):
    """One of several rows of the micro-batch that get the same value."""

    unique: int
    value: int
    """A number of the value."""
    row: int


@dataclass(slots=True)
class Arrangement:
    """The rows that get values of others, arranged."""

    order: list[int] = field(default_factory=list)
    """Rows in an order in which each value is free when a row gets it."""
    parked: list[tuple[int, int]] = field(default_factory=list)
    """(row, index): rows of the table whose values must be freed before, since they are in a
    circle."""
    refused: list[int] = field(default_factory=list)
    """Rows that may have to be left out, since another row keeps their value: the later one of two,
    unless it has the value in the table already. They are to be tried last, in this order: a row
    comes behind that which keeps its value."""
    postponed: list[int] = field(default_factory=list)
    """Rows that wait for the value of a refused one, of which an earlier record may be stored."""


def arrange(
    claims: Iterable[Claim], rivals: Iterable[Rival], has_earlier: Callable[[int], bool]
) -> Arrangement:
    """Arrange rows; `has_earlier` says whether a row's key has earlier records to be tried."""
    return _Arranging(claims, rivals, has_earlier).result()


class _Arranging:
    def __init__(
        self, claims: Iterable[Claim], rivals: Iterable[Rival], has_earlier: Callable[[int], bool]
    ) -> None:
        self._has_earlier = has_earlier
        self._claims: dict[int, dict[int, int | None]] = {}
        """Per row and index, the holder."""
        self._waiting: dict[int, list[int]] = {}
        """Per holder, the rows that get its values."""
        for unique, row, holder in claims:
            self._claims.setdefault(row, {})[unique] = holder
            if holder is not None:
                self._waiting.setdefault(holder, []).append(row)
        self._rivals: dict[tuple[int, int], list[int]] = {}
        for index, value, row in rivals:
            self._rivals.setdefault((index, value), []).append(row)
        self._refused: dict[int, None] = {}
        self._postponed: set[int] = set()

    def result(self) -> Arrangement:
        for row, held in sorted(self._claims.items()):
            if None in held.values():
                self._refuse(row)
        for (index, _), rows in self._rivals.items():
            stored = sorted(row for row in rows if self._is_stored(row))
            if len(stored) > 1:
                holders = {self._claims.get(row, {}).get(index) for row in stored}
                keeper = next((row for row in stored if row in holders), stored[0])
                for row in stored:
                    if row != keeper:
                        self._refuse(row)
        found = Arrangement(refused=list(self._refused), postponed=sorted(self._postponed))
        members = {
            *self._claims,
            *self._waiting,
            *(r for each in self._rivals.values() for r in each),
        }
        self._order(sorted(filter(self._is_stored, members)), found)
        return found

    def _is_stored(self, row: int) -> bool:
        return row not in self._refused and row not in self._postponed

    def _refuse(self, row: int) -> None:
        """Refuse a row, and with it those that cannot have a value without it."""
        due = deque([(row, True)])
        while due:
            row, is_final = due.popleft()
            if row in self._refused or (not is_final and row in self._postponed):
                continue
            if is_final:
                self._refused[row] = None
                self._postponed.discard(row)
            else:
                self._postponed.add(row)
            if waiting := self._waiting.get(row):
                is_final = is_final and not self._has_earlier(row)
                due += [(each, is_final) for each in waiting]

    def _order(self, rows: Sequence[int], found: Arrangement) -> None:
        """Add each row after those whose values it gets; park one row of each circle."""
        begun: set[int] = set()
        done: set[int] = set()
        for start in rows:
            path = [(start, self._holders(start))] if start not in begun else []
            begun.add(start)
            while path:
                row, holders = path[-1]
                if not holders:
                    path.pop()
                    done.add(row)
                    found.order.append(row)
                    continue
                index, holder = holders.pop()
                if holder not in begun:
                    begun.add(holder)
                    path.append((holder, self._holders(holder)))
                elif holder not in done:
                    found.parked.append((holder, index))

    def _holders(self, row: int) -> list[tuple[int, int]]:
        held = self._claims.get(row, {})
        return [(index, each) for index, each in held.items() if each is not None]
