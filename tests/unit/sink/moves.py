"""Micro-batches in which unique values move from key to key, and the rows they end with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CASES", "REFUSED_BESIDE", "Case", "end_state"]

Rows = Sequence[tuple[str, str | None]]


class Case(NamedTuple):
    """A table's rows (key, value), and the records of a micro-batch: a null value deletes."""

    name: str
    before: Rows
    batch: Rows


def end_state(case: Case) -> dict[str, str]:
    """Return the rows after all records: a dict takes them one by one."""
    rows = dict([*case.before, *case.batch])
    return {key: value for key, value in rows.items() if value is not None}


TWO = [("a", "v1"), ("b", "v2")]
CASES = [
    Case("a chain", TWO, [("b", "v3"), ("a", "v2")]),
    Case("a swap", TWO, [("b", "vx"), ("a", "v2"), ("b", "v1")]),
    Case("a swap in the other order", TWO, [("a", "vx"), ("b", "v1"), ("a", "v2")]),
    Case("a new key takes a value", TWO, [("a", "v9"), ("c", "v1")]),
    Case("a tombstone frees a value", TWO, [("a", None), ("c", "v1")]),
    Case("a key goes and comes again", TWO, [("a", None), ("b", "v1"), ("a", "v2")]),
    Case(
        "a circle of three and a chain of two",
        [("a", "v1"), ("b", "v2"), ("c", "v3"), ("d", "v4"), ("e", "v5")],
        [("a", "v2"), ("b", "v3"), ("c", "v1"), ("d", "v5"), ("e", "v6"), ("f", "v4")],
    ),
    Case(
        "a circle that a tombstone opens",
        [*TWO, ("c", "v3")],
        [("a", "v2"), ("b", "v3"), ("c", None), ("d", "v1")],
    ),
]
REFUSED_BESIDE: dict[str, Rows] = {
    "a swap": [("a", "2"), ("b", "1"), ("b", "x")],
    "a swap, the bad record first": [("b", "1"), ("b", "x"), ("a", "2")],
    "a chain": [("c", "4"), ("b", "3"), ("b", "x"), ("a", "2"), ("c", "x")],
    "a circle of three": [("a", "2"), ("b", "3"), ("c", "1"), ("c", "x"), ("b", "x")],
}
"""Records of which those with the value `x` are refused; the rows before are a=1, b=2, c=3."""
