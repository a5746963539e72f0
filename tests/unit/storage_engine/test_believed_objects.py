"""Objects of a store with a right checksum and a content that no writer makes: typed errors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from crc32c import crc32c

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.side_object import SideObject
from kafkalog.storage_engine.object_store.store_state import StoreState, _values
from tests.unit.storage_engine.store_log import WithoutProbe, memory_address

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


TOPIC_ID = "A" * 22
NAME = "segments/0/x.log"
EXTENT = {
    "topic_id": TOPIC_ID,
    "partition": 0,
    "position": 60,
    "size": 40,
    "base_offset": 0,
    "next_offset": 5,
    "leader_epoch": 0,
    "max_timestamp": -1,
    "gaps": 0,
    "first_timestamp": -1,
    "segment": 0,
    "skipped": 0,
}
BEYOND = layout.INT64_MAX + 1


def adding(
    size: int = 100, added_at: int = 0, side_size: int = 1, added_ms: int = 1, **extent: int | str
) -> dict[str, Any]:
    """Return a commit that adds one object with one extent, of a topic with two partitions."""
    values = [*(EXTENT | extent).values()]
    return {
        "time_ms": 1,
        "topics": {"t": {"id": TOPIC_ID, "partitions": 2, "config": {}}},
        "objects": {NAME: [size, [values], added_at, side_size, added_ms]},
    }


def other(**changes: Any) -> dict[str, Any]:
    return adding() | changes


@pytest.mark.parametrize(
    "change",
    [
        adding(),
        adding(leader_epoch=-1),
        adding(leader_epoch=layout.INT32_MAX),
        adding(gaps=-1),
        adding(first_timestamp=-2),
        adding(segment=-1),
        adding(partition=1),
        adding(partition=7, topic_id="B" * 22),
        adding(added_ms=-1),
    ],
    ids=[
        "whole",
        "no epoch",
        "largest epoch",
        "gaps unknown",
        "first timestamp unknown",
        "a segment of its own",
        "last partition",
        "topic is gone",
        "replaced empty ones",
    ],
)
def test_an_object_that_a_writer_can_have_made_is_believed(change: dict[str, Any]) -> None:
    state = StoreState().apply(1, change, 9)
    assert _values(state.objects[NAME].extents[0]) == change["objects"][NAME][1][0]


NUMBERS = "expected numbers from"
REFUSED = [
    (adding(size=99), "no object"),
    (adding(size=-1), NUMBERS),
    (adding(added_at=-1), NUMBERS),
    (adding(side_size=-1), NUMBERS),
    (adding(added_ms=-2), NUMBERS),
    (adding(added_ms=BEYOND), NUMBERS),
    (adding(partition=-1), NUMBERS),
    (adding(partition=2), "no partition 2 of A"),
    (adding(position=-1), NUMBERS),
    (adding(base_offset=-1), NUMBERS),
    (adding(next_offset=0), "no extent"),
    (adding(next_offset=BEYOND), NUMBERS),
    (adding(leader_epoch=-2), NUMBERS),
    (adding(leader_epoch=layout.INT32_MAX + 1), "a leader epoch of 32 bits"),
    (adding(max_timestamp=-2), NUMBERS),
    (adding(max_timestamp=BEYOND), NUMBERS),
    (adding(gaps=-2), NUMBERS),
    (adding(first_timestamp=-3), NUMBERS),
    (adding(segment=-2), NUMBERS),
    (adding(segment=1), "no extent"),
    (adding(skipped=-1), NUMBERS),
    (adding(skipped=1), "no extent"),
    (other(time_ms=-1), NUMBERS),
    (other(time_ms=BEYOND), NUMBERS),
    (other(swept=-2), NUMBERS),
    (other(forgotten_seen=BEYOND), NUMBERS),
    (other(cleaned={"t-0": [-1, 0, {}]}), NUMBERS),
    (other(cleaned={"t-0": [0, BEYOND, {}]}), NUMBERS),
    (other(dead={NAME: [0, -1, 0]}), NUMBERS),
    (other(writers={"w": [-1, 0, 0]}), NUMBERS),
    (other(writers={"w": [0, BEYOND, 0]}), NUMBERS),
    (other(forgotten_writers={"w": -1}), NUMBERS),
    (other(forgotten_writers={"w": BEYOND}), NUMBERS),
    (other(writers={"w": [0, 0, 0]}, ends={"w": "1-" + "0" * 33}), "no ends"),
    (other(writers={"w": [0, 0, 0]}, ends={"w": "1" * 10 + "-" + "0" * 32}), "no ends"),
    (other(writers={"w": [0, 0, 0]}, ends={"w": 7}), "no ends"),
    (other(deleting={TOPIC_ID: ["t", 2, BEYOND]}), NUMBERS),
    (other(topics={"../t": {"id": TOPIC_ID, "partitions": 2, "config": {}}}), "is not allowed"),
]


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_a_commit_with_a_number_or_a_name_that_no_writer_makes_is_refused(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises((ValueError, IndexError), match=expected):
        StoreState().apply(1, change, 9)


def test_only_an_object_with_a_side_object_may_be_empty() -> None:
    extent = [*(EXTENT | {"size": 0}).values()]

    def change(side_size: int) -> dict[str, Any]:
        return other(objects={NAME: [60, [extent], 0, side_size]})

    assert StoreState().apply(1, change(1), 9).objects[NAME].side_size == 1
    with pytest.raises(ValueError, match="no object"):
        StoreState().apply(1, change(0), 9)


def with_last_commit(content: dict[str, Any]) -> StoreAddress:
    """Return a log with a topic of one partition whose last commit has another content."""
    address = memory_address()
    assert CommitLog.create(WithoutProbe(address))
    log = ObjectLog(address)
    log.create_topic("t", 1)
    log.append("t", [(b"k", b"v")])
    name = layout.stored_commit(log.store_state().number)
    found = log.client.get(name)
    assert found is not None
    commit = NumberedObject.decode(name, layout.STORED_COMMIT_MAGIC, found.data)
    log.client.put_unique(name, dataclasses.replace(commit, content=content).encode())
    return address


def test_such_a_commit_in_a_log_is_damage_of_the_log() -> None:
    with pytest.raises(CorruptLogError, match="no partition 2"):
        ObjectLog(with_last_commit(adding(partition=2)))


def test_a_partition_at_the_largest_offset_takes_no_more_rows() -> None:
    end = {"t": {"0": [layout.INT64_MAX - 1, 0, 0]}}
    log = ObjectLog(with_last_commit({"time_ms": 1, "partitions": end}))
    log.append("t", [(b"k", b"v")])
    before = log.store_state()
    with pytest.raises(StorageError, match=f"t-0: .* at most {layout.INT64_MAX}, found"):
        log.append("t", [(b"k", b"v")])
    assert log.store_state() == before


def test_an_extent_of_an_early_release_has_an_unknown_number_of_gaps() -> None:
    def gaps_of(*more: int) -> int:
        objects = {"segments/0/x.log": [40, [["A" * 22, 0, 0, 40, 0, 5, 0, -1, *more]]]}
        state = StoreState().apply(1, {"time_ms": 1, "objects": objects}, 9)
        return state.objects["segments/0/x.log"].extents[0].gaps

    assert (gaps_of(), gaps_of(0), gaps_of(3)) == (-1, 0, 3)
    with pytest.raises(ValueError, match="expected numbers"):
        gaps_of(-2)
    with pytest.raises(ValueError, match="no extent"):
        gaps_of(0, 0)
