"""A map and a sequence that share their layers with the changed copies."""

from __future__ import annotations

import random

import pytest

from kafkalog.storage_engine.object_store.layered_map import LayeredMap
from kafkalog.storage_engine.object_store.layered_sequence import LayeredSequence

ITEMS = 2_000


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_map_has_the_changes_and_the_map_stays_as_it_was(seed: int) -> None:
    draw = random.Random(seed)
    expected: dict[str, int] = {}
    found = LayeredMap[int]()
    versions = [(found, expected)]
    for number in range(100):
        dropped = draw.sample(sorted(expected), min(len(expected), draw.choice([0, 0, 1, 9])))
        added = {f"k{draw.randrange(60)}": number for _ in range(draw.choice([0, 1, 1, 5]))}
        found = found.changed(added, dropped)
        kept = {name: value for name, value in expected.items() if name not in dropped}
        expected = kept | added
        versions.append((found, expected))
    for version, entries in versions:
        assert version == entries
        assert (len(version), {*version}) == (len(entries), {*entries})
        assert sorted(version.values()) == sorted(entries.values())
        assert all((name in version) == (name in entries) for name in map("k{}".format, range(60)))


def test_a_name_that_a_map_does_not_have_cannot_be_dropped() -> None:
    found = LayeredMap({"a": 1, "b": 2, "c": 3}).changed({}, ["a"])
    for name in ("a", "x"):
        with pytest.raises(KeyError):
            found.changed({}, [name])


def test_changes_of_a_map_copy_each_entry_a_few_times() -> None:
    found, copied = LayeredMap[int](), 0
    for number in range(ITEMS):
        found = found.changed({str(number): number})
        copied += len(found._layers[-1])
    assert copied < 12 * ITEMS


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_has_the_items_of_all_its_extensions(seed: int) -> None:
    draw = random.Random(seed)
    expected: list[int] = []
    found = LayeredSequence[int]()
    versions = [(found, [*expected])]
    for _ in range(60):
        more = [draw.randrange(9) for _ in range(draw.choice([0, 1, 1, 2, 30]))]
        found = found.extended(more)
        expected += more
        versions.append((found, [*expected]))
    for version, items in versions:
        assert [*version] == items
        assert [version[place] for place in range(-len(items), len(items))] == items * 2
        start, stop = draw.randrange(90), draw.randrange(90)
        assert [*version[start:stop]] == items[start:stop]
        with pytest.raises(IndexError):
            version[len(items)]


def test_extensions_of_a_sequence_copy_each_item_a_few_times() -> None:
    found, copied = LayeredSequence[int](), 0
    for number in range(ITEMS):
        found = found.extended([number])
        copied += len(found._layers[-1])
    assert copied < 12 * ITEMS
