"""The surface of a log: the same in a directory and in an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from kafkalog.log import KafkaLog
from tests.unit.conftest import OBJECT_STORE

NOW_MS = 1_700_000_000_000


@pytest.fixture
def log(place: Path | str) -> Iterator[KafkaLog]:
    with kafkalog.open(place) as log:
        yield log


def rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def values(log: KafkaLog, *span: int) -> list[bytes | None]:
    return [row["value"] for row in rows(log.read("t", 0, *span))]


@pytest.fixture
def filled(log: KafkaLog) -> KafkaLog:
    """Return a log whose topic `t` has four commits of three records in partition 0."""
    log.create_topic("t", config={"cleanup.policy": "compact,delete"}, now_ms=NOW_MS)
    for number in range(4):
        records = [(f"k{key}", f"{number}-{key}") for key in range(3)]
        log.append("t", records, now_ms=NOW_MS + 10 * number)
    return log


def test_records_are_read_as_they_were_appended(log: KafkaLog) -> None:
    log.create_topic("t", 1, {"cleanup.policy": "delete"})
    log.append("t", [("k1", "v1"), ("k2", None)], now_ms=NOW_MS)
    log.append("t", [("k3", b"v3", [("by", b"ann")], NOW_MS - 1)], now_ms=NOW_MS)
    log.append("t", pa.table({"value": ["v4"]}), now_ms=NOW_MS)
    found = rows(log.read("t", 0, include_headers=True))
    assert [(row["offset"], row["key"], row["value"]) for row in found] == [
        (0, b"k1", b"v1"),
        (1, b"k2", None),
        (2, b"k3", b"v3"),
        (3, None, b"v4"),
    ]
    assert [row["timestamp"].timestamp() * 1000 for row in found] == [
        NOW_MS,
        NOW_MS,
        NOW_MS - 1,
        NOW_MS,
    ]
    assert [row["headers"] for row in found][2] == [{"key": "by", "value": b"ann"}]
    assert {(row["topic"], row["partition"]) for row in found} == {("t", 0)}


def test_a_range_ends_before_its_end_and_may_cut_batches(filled: KafkaLog) -> None:
    everything = [b"%d-%d" % (number, key) for number in range(4) for key in range(3)]
    for start in range(13):
        for end in range(start, 13):
            assert values(filled, start, end) == everything[start:end]
    assert filled.offsets("t") == {0: (0, 12)}
    for span in ((0, 13), (13, 14)):
        with pytest.raises(OffsetOutOfRangeError):
            values(filled, *span)
    with pytest.raises(InvalidInputError, match="ends before it starts"):
        values(filled, 5, 4)


def test_what_is_committed_is_there_for_another_that_is_open(
    place: Path | str, filled: KafkaLog
) -> None:
    with kafkalog.open(place, read_only=True) as reader:
        filled.append("t", [("k", "new")])
        assert values(reader)[-1] == b"new"
        filled.delete_topic("t")
        with pytest.raises(UnknownTopicError):
            reader.offsets("t")


def test_the_latest_record_of_each_key_is_found(filled: KafkaLog) -> None:
    filled.append("t", [("k1", None)], now_ms=NOW_MS)
    assert sorted(row["value"] for row in rows(filled.latest("t"))) == [b"3-0", b"3-2"]
    found = filled.lookup("t", "k2")
    assert found is not None
    assert (found.offset, found.value) == (11, b"3-2")
    assert filled.lookup("t", "k1") is None
    assert filled.lookup("t", "unknown") is None


@pytest.mark.parametrize(
    ("ms", "offset"),
    [(NOW_MS, 0), (NOW_MS + 1, 3), (NOW_MS + 30, 9), (-1, 12), (-2, 0), (-3, 9)],
)
def test_a_time_leads_to_an_offset(filled: KafkaLog, ms: int, offset: int) -> None:
    found = filled.offset_for_time("t", ms)[0]
    assert found is not None
    assert (found.offset, found.leader_epoch) == (offset, 0)
    assert filled.offset_for_time("t", NOW_MS + 31) == {0: None}


def test_deleted_records_are_not_read(filled: KafkaLog) -> None:
    assert filled.delete_records("t", 0, 4) == 4
    assert values(filled) == [b"%d-%d" % (n // 3, n % 3) for n in range(4, 12)]
    with pytest.raises(OffsetOutOfRangeError, match="4"):
        values(filled, 3)
    assert filled.delete_records("t", 0, -1) == 12
    assert values(filled) == []
    filled.append("t", [("k", "v")])
    assert filled.offsets("t") == {0: (12, 13)}


@pytest.mark.parametrize(
    ("now_ms", "fault"),
    [(-1, "from 0 to"), (1 << 63, "from 0 to"), (1.5, "a whole number"), (True, "a whole number")],
)
@pytest.mark.parametrize(
    "act",
    [
        lambda log, now_ms: log.create_topic("u", now_ms=now_ms),
        lambda log, now_ms: log.alter_topic("t", {"retention.ms": "7"}, now_ms=now_ms),
        lambda log, now_ms: log.delete_topic("t", now_ms=now_ms),
        lambda log, now_ms: log.append("t", [("k", "v")], now_ms=now_ms),
        lambda log, now_ms: log.delete_records("t", 0, 1, now_ms=now_ms),
        lambda log, now_ms: log.clean("t", now_ms=now_ms),
        lambda log, now_ms: log.status(now_ms=now_ms),
        lambda log, now_ms: log.explain("t", now_ms=now_ms),
    ],
    ids=["create", "alter", "delete", "append", "delete records", "clean", "status", "explain"],
)
def test_a_time_that_no_commit_can_have_is_refused(
    filled: KafkaLog, act: Callable[[KafkaLog, Any], Any], now_ms: Any, fault: str
) -> None:
    before = filled.describe("t")
    with pytest.raises(InvalidInputError, match=f"now_ms: expected .*{fault}"):
        act(filled, now_ms)
    assert (filled.topics(), filled.describe("t")) == (["t"], before)


@pytest.mark.parametrize("place", [OBJECT_STORE], indirect=True)
@pytest.mark.parametrize(
    "act",
    [
        lambda log: log.append_raw("t", 0, b""),
        lambda log: log.root,
    ],
)
def test_what_needs_a_directory_says_so(filled: KafkaLog, act: Callable[[KafkaLog], Any]) -> None:
    with pytest.raises(InvalidInputError, match="object store cannot do this"):
        act(filled)


@pytest.mark.parametrize("given", [None, 5, b"log", "a\0b", [None], ["log", 5]])
def test_an_argument_that_is_not_a_path_is_refused_and_named(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="path"):
        kafkalog.open(given, create=False)
