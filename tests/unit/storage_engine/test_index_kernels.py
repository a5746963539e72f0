"""The kernel that chooses index entries, against its naive twin."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.storage_engine.segment import kernels

pytestmark = pytest.mark.usefixtures("compared_kernels")


def integers(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("interval", [0, 100, 10**6])
def test_choose_index_entries_decides_batch_by_batch_across_calls(interval: int) -> None:
    rng = random.Random(interval)
    n = 60
    sizes = [rng.randrange(61, 200) for _ in range(n)]
    positions = [sum(sizes[:i]) for i in range(n)]
    lasts = sorted(rng.sample(range(1000), n))
    times = [rng.randrange(-1, 50) for _ in range(n)]
    expected, since, top, top_offset = [], 0, -1, 7
    for i in range(n):
        if times[i] > top:
            top, top_offset = times[i], lasts[i]
        if since > interval:
            expected.append((i, top, top_offset))
            since = 0
        since += sizes[i]
    found, state = [], (0, -1, 7)
    for first in range(0, n, 13):
        part = slice(first, first + 13)
        out = [np.empty(13, dtype=np.int64) for _ in range(3)]
        count, *state = kernels.choose_index_entries(
            integers(positions[part]), integers(lasts[part]), integers(times[part]),
            state[0], interval, state[1], state[2], *out,
        )  # fmt: skip
        rows, tops, offsets = (array[:count].tolist() for array in out)
        found += [(first + r, t, o) for r, t, o in zip(rows, tops, offsets, strict=True)]
    assert found == expected
    assert tuple(state) == (sum(sizes) - since, top, top_offset)
