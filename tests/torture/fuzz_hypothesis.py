"""Draws inputs by hypothesis: seeds with numbers and pieces changed, plain bytes, plain text.

What it draws is small and simple first, and of a structure that it knows: numbers of all widths at
all places, not bits. It gets more examples to change as decoding ends at new places.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.torture.fuzz_mutation import SIZE_MAX, TOKENS

ROOM: Final = 512 << 20
"""Bytes that hypothesis itself may take."""
_EXAMPLES: Final = 200
"""Drawn at a time: what hypothesis remembers of them is forgotten then."""


class _TimeIsOverError(BaseException):
    """The seconds are over; hypothesis lets it pass, and draws nothing more."""


def hypothesise(
    run: Callable[[bytes], bool], seeds: list[bytes], number: int, seconds: float, *, is_text: bool
) -> None:
    """Draw inputs until the seconds of the processor are over; `run` tells which are worth keeping.

    What is drawn follows from `number`.
    """
    corpus = list(seeds)
    end = time.process_time() + seconds
    while time.process_time() < end:
        number += 1

        @seed(number)
        @settings(
            max_examples=_EXAMPLES,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(_inputs(corpus, is_text=is_text))
        def draw(data: bytes) -> None:
            if time.process_time() >= end:
                raise _TimeIsOverError
            if run(data):
                corpus.append(data)

        with contextlib.suppress(_TimeIsOverError):
            draw()


def _inputs(corpus: list[bytes], *, is_text: bool) -> st.SearchStrategy[bytes]:
    piece = st.one_of(
        st.sampled_from(TOKENS) if is_text else st.integers(1, 8).flatmap(_numbers),
        st.binary(max_size=16),
        st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")),
    )
    place = st.floats(0, 1)
    changes = st.lists(st.tuples(place, piece, st.booleans()), min_size=1, max_size=6)
    changed = st.builds(_changed, st.sampled_from(corpus), changes)
    cut = st.builds(lambda data, end: data[: int(end * len(data))], changed, place)
    return st.one_of(changed, changed, changed, cut, st.binary(max_size=200))


def _numbers(width: int) -> st.SearchStrategy[bytes]:
    limit = 1 << 8 * width - 1
    order = st.sampled_from(["big", "big", "little"])
    return st.builds(
        lambda number, order: number.to_bytes(width, order, signed=True),
        st.integers(-limit, limit - 1),
        order,
    )


def _changed(data: bytes, changes: list[tuple[float, bytes, bool]]) -> bytes:
    """Put pieces into an input, over what is there or in between."""
    made = bytearray(data)
    for place, piece, is_over in changes:
        start = int(place * len(made))
        made[start : start + len(piece) * is_over] = piece
    return bytes(made[:SIZE_MAX])
