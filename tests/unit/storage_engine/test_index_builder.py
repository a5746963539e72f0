"""The rule of index entries, against a plain reference: one loop over the batches."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import numpy as np
import pytest

from kafkalog.storage_engine.segment.index_builder import IndexBuilder

BASE = 5000


@dataclass(frozen=True)
class Batch:
    position: int
    last_offset: int
    max_timestamp: int


def batches(seed: int, count: int = 80) -> list[Batch]:
    rng = random.Random(seed)
    made, position, offset = [], 0, BASE - 1
    for _ in range(count):
        offset += rng.randrange(1, 9)
        made.append(Batch(position, offset, rng.randrange(-1, 60)))
        position += rng.randrange(61, 300)
    return made


def plain_entries(
    found: list[Batch], interval: int, room: int = 10**9
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Kafka's rule for an append of each batch, and for the segment's end."""
    offsets: list[tuple[int, int]] = []
    times: list[tuple[int, int]] = []
    indexed, largest = 0, (-1, BASE)
    for batch in found:
        if batch.max_timestamp > largest[0]:
            largest = batch.max_timestamp, batch.last_offset
        if batch.position > indexed + interval:
            indexed = batch.position
            if len(offsets) < room:
                offsets.append((batch.last_offset - BASE, batch.position))
            if largest[0] > (times[-1][0] if times else -1):
                times.append((largest[0], largest[1] - BASE))
    if largest[0] > (times[-1][0] if times else -1):
        times.append((largest[0], largest[1] - BASE))
    return offsets, times


def add_one_by_one(builder: IndexBuilder, found: list[Batch]) -> None:
    for batch in found:
        builder.add(batch.position, batch.last_offset, batch.max_timestamp)


def add_in_tables(builder: IndexBuilder, found: list[Batch], size: int = 7) -> list[int]:
    chosen = []
    for first in range(0, len(found), size):
        part = found[first : first + size]
        columns = (
            [batch.position for batch in part],
            [batch.last_offset for batch in part],
            [batch.max_timestamp for batch in part],
        )
        rows = builder.add_batches(*(np.array(column, dtype=np.int64) for column in columns))
        chosen += [part[row].position for row in rows]
    return chosen


def entries(builder: IndexBuilder) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    builder.add_time()
    offsets = list(struct.iter_unpack(">ii", builder.offset_entries))
    times = list(struct.iter_unpack(">qi", builder.time_entries))
    assert (builder.offset_count, builder.time_count) == (len(offsets), len(times))
    return offsets, times


@pytest.mark.parametrize("interval", [0, 100, 1000, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_batches_get_the_entries_of_the_plain_rule(seed: int, interval: int) -> None:
    found = batches(seed)
    singly, tables = IndexBuilder(BASE, interval), IndexBuilder(BASE, interval)
    add_one_by_one(singly, found)
    chosen = add_in_tables(tables, found)
    expected = plain_entries(found, interval)
    assert chosen == [position for _, position in expected[0]]
    assert entries(singly) == entries(tables) == expected


@pytest.mark.parametrize("cut", [0, 1, 40, 79])
def test_entries_go_on_where_the_files_end(cut: int) -> None:
    found = batches(7)
    first = IndexBuilder(BASE, 400)
    add_one_by_one(first, found[:cut])
    largest = max(((b.max_timestamp, b.last_offset) for b in found[:cut]), default=(-1, BASE))
    second = IndexBuilder(BASE, 400)
    second.resume(
        (first.offset_count, first.indexed_position),
        (first.time_count, first.indexed_timestamp),
        largest,
    )
    add_one_by_one(second, found[cut:])
    second.add_time()
    written = first.offset_entries + second.offset_entries
    times = first.time_entries + second.time_entries
    assert (
        list(struct.iter_unpack(">ii", written)),
        [time for time, _ in struct.iter_unpack(">qi", times)],
    ) == (plain_entries(found, 400)[0], [time for time, _ in plain_entries(found, 400)[1]])


@pytest.mark.parametrize("room", [0, 3])
def test_offset_entries_without_room_are_left_out_and_times_are_not(room: int) -> None:
    found = batches(3)
    singly = IndexBuilder(BASE, 200, offset_entries_max=room)
    tables = IndexBuilder(BASE, 200, offset_entries_max=room)
    add_one_by_one(singly, found)
    add_in_tables(tables, found)
    assert entries(singly) == entries(tables) == plain_entries(found, 200, room)


def test_an_offset_too_far_above_the_base_is_refused() -> None:
    builder = IndexBuilder(0, 0)
    with pytest.raises(struct.error):
        builder.add(100, 1 << 31, -1)
