"""A staged segment gets its place in the log, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.staged_segment import stamp_staged_segment
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import iterate_headers
from tests.builders.batch_builder import BuiltBatch, at_times

WIDEST = 2**31
"""Offsets that one batch, and one segment, can have."""


def wide(batch: BuiltBatch, offsets: int) -> bytes:
    data = bytearray(batch.data)
    data[23:27] = (offsets - 1).to_bytes(4, "big")  # last_offset_delta
    return bytes(data)


def stamped(path: Path, base_offset: int) -> list[tuple[int, int, int]]:
    end = stamp_staged_segment(path.parent, path, base_offset, 9)
    data = path.read_bytes()
    found = [header for _, header in iterate_headers(data)]
    assert found[-1].next_offset == end
    return [(each.base_offset, each.last_offset, each.leader_epoch) for each in found]


def test_batches_follow_each_other_from_where_the_log_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.staged"
    path.write_bytes(at_times(0, (1, 2)).data + at_times(2, (3,)).data)
    assert stamped(path, 70) == [(70, 71, 9), (72, 72, 9)]


def test_a_segment_has_as_many_offsets_as_its_indexes_can_count(tmp_path: Path) -> None:
    path = tmp_path / "run.staged"
    first = wide(at_times(0), WIDEST - 1)
    path.write_bytes(first + at_times(WIDEST - 1).data)
    assert stamped(path, 5)[-1] == (WIDEST + 4, WIDEST + 4, 9)
    path.write_bytes(first + at_times(WIDEST - 1, (1, 2)).data)
    with pytest.raises(
        StorageError, match=r"at most 2\^31 rows in a staged segment, found more by"
    ):
        stamp_staged_segment(tmp_path, path, 5, 9)


def test_offsets_end_where_64_bits_do(tmp_path: Path) -> None:
    path = tmp_path / "run.staged"
    path.write_bytes(at_times(0, (1, 2)).data)
    assert stamped(path, layout.INT64_MAX - 2)[-1][1] == layout.INT64_MAX - 1
    path.write_bytes(at_times(0, (1, 2)).data)
    with pytest.raises(StorageError, match=f"a log end of at most {layout.INT64_MAX}, found"):
        stamp_staged_segment(tmp_path, path, layout.INT64_MAX - 1, 9)
