"""Objects of a store with a right checksum and a content that no writer makes: typed errors."""

from __future__ import annotations

import json

import pytest
from crc32c import crc32c

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import StoreState
from tests.unit.storage_engine.store_log import memory_address

NO_TABLES = [b"{", b"\xff", b"[[1]]", b'[["a", -1, 0]]', b"7", b"[" * 100_000]
RUN = ["t", "id", 0, 0, 9, 1, -1]


@pytest.mark.parametrize("table", [*NO_TABLES, b'[["t", "id", 0, 0, -9, 1, -1]]', b'[["t"]]'])
def test_a_footer_that_lists_no_runs_is_damage(table: bytes) -> None:
    trailer = layout.MIXED_TRAILER.pack(
        len(table), crc32c(table), layout.MIXED_VERSION, layout.MIXED_MAGIC
    )
    with pytest.raises(CorruptLogError, match="expected a list of runs"):
        footer_of("s3://bucket/log/data/1/x.mixed", table + trailer)


def test_a_footer_is_the_list_of_its_runs() -> None:
    table = json.dumps([RUN]).encode()
    trailer = layout.MIXED_TRAILER.pack(
        len(table), crc32c(table), layout.MIXED_VERSION, layout.MIXED_MAGIC
    )
    assert footer_of("x", table + trailer) == [RUN]


@pytest.mark.parametrize("table", NO_TABLES)
def test_a_side_object_whose_table_lists_no_sections_is_damage(table: bytes) -> None:
    header = layout.SIDE_HEADER.pack(
        layout.SIDE_MAGIC, layout.SIDE_VERSION, len(table), crc32c(table)
    )
    side = SideObject(ObjectClient(memory_address()), "x.side", header + table)
    with pytest.raises(CorruptLogError, match="expected a table of sections"):
        side.section(layout.INDEX)


@pytest.mark.parametrize(
    ("size", "side_size"), [(99, 0), (-1, 0), (100, -1)], ids=["too short", "negative", "its side"]
)
def test_an_object_that_is_shorter_than_its_extents_is_none(size: int, side_size: int) -> None:
    extent = ["A" * 22, 0, 60, 40, 0, 5, 0, -1]
    state = StoreState()

    def change(size: int, side_size: int) -> dict[str, object]:
        return {"time_ms": 1, "objects": {"segments/0/x.log": [size, [extent], 0, side_size]}}

    state.apply(1, change(100, 1), 9)
    with pytest.raises(ValueError, match="no object"):
        state.apply(1, change(size, side_size), 9)


def test_an_extent_may_have_no_leader_epoch() -> None:
    extent = ["A" * 22, 0, 0, 40, 0, 5, -1, -1]
    state = StoreState().apply(
        1, {"time_ms": 1, "objects": {"segments/0/x.log": [40, [extent]]}}, 9
    )
    assert state.objects["segments/0/x.log"].extents[0].leader_epoch == -1
    with pytest.raises(ValueError, match="no extent"):
        extent[6] = -2
        StoreState().apply(1, {"time_ms": 1, "objects": {"segments/0/x.log": [40, [extent]]}}, 9)


def test_an_extent_of_an_early_release_has_an_unknown_number_of_gaps() -> None:
    def gaps_of(*more: int) -> int:
        objects = {"segments/0/x.log": [40, [["A" * 22, 0, 0, 40, 0, 5, 0, -1, *more]]]}
        state = StoreState().apply(1, {"time_ms": 1, "objects": objects}, 9)
        return state.objects["segments/0/x.log"].extents[0].gaps

    assert (gaps_of(), gaps_of(0), gaps_of(3)) == (-1, 0, 3)
    with pytest.raises(ValueError, match="no extent"):
        gaps_of(-2)
    with pytest.raises(TypeError):
        gaps_of(0, 0)
