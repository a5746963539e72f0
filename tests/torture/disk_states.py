"""The states in which a power cut may leave a disk at one moment."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Final

from tests.torture.disk import Disk, State, Tear

__all__ = ["states"]

_ALL_SUBSETS: Final = 4
"""Of so few acts all subsets are tried."""


def states(disk: Disk, dice: random.Random, *, draws: int = 8) -> Iterator[State]:
    """Yield what the disk may have at this moment; equal trees may come more than once.

    None and all of the unsynced acts, each of them lost, each of them alone, each write torn at
    each sector with all others and with none; and subsets: all of them where they are few, some
    of the pairs and larger ones, torn ones among them, otherwise.
    """
    unsynced = disk.unsynced()
    numbers = [number for number, _ in unsynced]
    all_kept: dict[int, Tear | None] = dict.fromkeys(numbers)
    yield disk.everything()
    yield disk.state("none", {})
    tears = {number: disk.tears(act) for number, act in unsynced}
    for number in numbers:
        yield disk.state(f"lost-{number}", {n: None for n in numbers if n != number})
        yield disk.state(f"only-{number}", {number: None})
        for how, at in tears[number]:
            yield disk.state(f"torn-{number}-{how}-{at}", {**all_kept, number: (how, at)})
            yield disk.state(f"alone-{number}-{how}-{at}", {number: (how, at)})
    if len(numbers) <= _ALL_SUBSETS:
        for count in range(2, len(numbers) - 1):
            for chosen in itertools.combinations(numbers, count):
                yield disk.state("set-" + "-".join(map(str, chosen)), dict.fromkeys(chosen))
        return
    for draw in range(draws):
        yield disk.state(f"draw-{draw}", _draw(numbers, tears, dice))


def _draw(
    numbers: list[int], tears: Mapping[int, list[Tear]], dice: random.Random
) -> dict[int, Tear | None]:
    """Draw a subset: a pair, all but a pair, or of any size, with a write torn now and then."""
    how = dice.random()
    if how < 0.5:
        pair = dice.sample(numbers, 2)
        chosen = pair if how < 0.2 else [number for number in numbers if number not in pair]
    else:
        share = dice.random()
        chosen = [number for number in numbers if dice.random() < share]
    return {
        number: dice.choice(tears[number]) if tears[number] and dice.random() < 0.2 else None
        for number in chosen
    }
