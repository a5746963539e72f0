"""Where the sound batches of a file end."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import pytest

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment import log_walk
from kafkalog.storage_engine.segment.log_walk import LogWalk
from tests.unit.storage_engine.log_builder import batch
from tests.unit.storage_engine.naive_messages import Message, message, wrapper
from tests.unit.storage_engine.raw_log import RawBatch, joined

BATCHES = [RawBatch(base, (base,) * 3, value_size=base) for base in range(0, 90, 3)]


def ends(path: Path, *, check: bool = True) -> tuple[int, int, tuple[str, str] | None]:
    with LogWalk(path, 0) as walk:
        positions = []
        for found in walk.batches(check=check):
            positions += (found.table.positions + found.file_position).tolist()
        sizes = sorted(positions)
        assert sizes == positions
    return walk.end, walk.next_offset, walk.fault


@pytest.mark.parametrize("chunk_size", [64, 300, 1 << 20])
def test_a_walk_ends_at_the_first_byte_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    monkeypatch.setattr(log_walk, "CHUNK_SIZE", chunk_size)
    data = joined(BATCHES)
    starts = [len(joined(BATCHES[:count])) for count in range(len(BATCHES) + 1)]
    path = tmp_path / "f"
    path.write_bytes(data)
    assert ends(path) == (len(data), 90, None)
    rng = random.Random(5)
    for _ in range(60):
        place = rng.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        number = sum(start <= place for start in starts) - 1
        end, next_offset, fault = ends(path)
        in_batch = place - starts[number]
        if end == starts[number]:
            assert next_offset == 3 * number and fault is not None
        else:  # bytes that no checksum covers: a base offset that still rises, a leader epoch
            assert in_batch < 8 or 12 <= in_batch < 16
            assert end >= starts[number + 1]


def test_a_torn_end_and_zeros_are_no_batches(tmp_path: Path) -> None:
    data = joined(BATCHES)
    last = len(joined(BATCHES[:-1]))
    path = tmp_path / "f"
    for size in range(last + 1, len(data)):
        path.write_bytes(data[:size])
        assert ends(path)[:2] == (last, 87)
    for count in (1, 17, 61, 5000):
        path.write_bytes(data + bytes(count))
        end, _, fault = ends(path)
        assert end == len(data)
        assert fault is not None and fault[0] == "a whole record batch"


def test_without_checks_only_what_stands_around_a_batch_counts(tmp_path: Path) -> None:
    data = bytearray(joined(BATCHES))
    data[100] ^= 1
    path = tmp_path / "f"
    path.write_bytes(data)
    assert ends(path, check=False) == (len(data), 90, None)


def test_messages_and_batches_may_follow_each_other(tmp_path: Path) -> None:
    first = message(1, 0, b"k", b"v", timestamp=5)
    old = first + wrapper(1, 1, [Message(n, 5, b"k", b"v") for n in (1, 2, 3)])
    new = RawBatch(4, (1, 2)).data()
    path = tmp_path / "f"
    path.write_bytes(old + new)
    assert ends(path) == (len(old + new), 6, None)
    damaged = bytearray(old + new)
    damaged[len(old) - 1] ^= 1
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    end, next_offset, _ = ends(path)
    assert (end, next_offset) == (len(first), 1)


def test_a_batch_beyond_the_last_offset_there_can_be_ends_the_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum does not cover the base offset: a flipped bit, and the last is too high."""
    data = bytearray(joined(BATCHES))
    second = len(joined(BATCHES[:1]))
    data[second : second + 8] = layout.INT64_MAX.to_bytes(8, "big")
    path = tmp_path / "f"
    path.write_bytes(data)
    for chunk_size in (1 << 20, 64):  # the second one is read as a large batch
        monkeypatch.setattr(log_walk, "CHUNK_SIZE", chunk_size)
        end, next_offset, fault = ends(path)
        assert (end, next_offset) == (second, 3)
        assert fault is not None and "offset" in fault[1]


def test_a_large_batch_is_checked_piece_by_piece(tmp_path: Path) -> None:
    large = batch(0, 1, size=24 << 20).data()
    path = tmp_path / "f"
    path.write_bytes(large + RawBatch(1, (1,)).data())
    tracemalloc.start()
    assert ends(path)[1:] == (2, None)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    damaged = bytearray(large)
    damaged[20 << 20] ^= 1
    path.write_bytes(damaged)
    end, next_offset, fault = ends(path)
    assert (end, next_offset) == (0, 0)
    assert fault is not None and fault[0].startswith("checksum")


def test_a_length_that_no_file_has_costs_no_memory(tmp_path: Path) -> None:
    data = bytearray(RawBatch(0, (1,)).data())
    data[8:12] = (2**31 - 1).to_bytes(4, "big")
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(2**31 - 1)
    tracemalloc.start()
    assert ends(path)[:2] == (0, 0)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_file_cut_while_it_is_walked_ends_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(joined(BATCHES))
    with LogWalk(path, 0) as walk:
        os.truncate(path, 0)
        assert list(walk.batches(check=True)) == []
    assert (walk.end, walk.fault is not None) == (0, True)
