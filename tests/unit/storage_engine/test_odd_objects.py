"""What a rescued store may have in place of a log's objects, or beside them: nothing is lost of it.

`test_odd_files` does the same with a directory.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from obstore import exceptions

from kafkalog.cleaner.objects.upkeep import regroup_due
from kafkalog.errors import CorruptLogError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import client as clients
from kafkalog.storage_engine.object_store import store_state
from kafkalog.storage_engine.object_store.collector import sweep
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.failure import PermanentError, described
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.regroup import fresh_objects
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, new_object_log

COMMITS = 5


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ObjectLog:
    """Return a log with two topics, and fresh objects of both."""
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", COMMITS)
    log = new_object_log()
    for topic in ("t", "u"):
        log.create_topic(topic)
        for number in range(COMMITS):
            log.append(topic, [("k", str(number))])
    return log


def values(log: ObjectLog, topic: str) -> list[bytes]:
    return [row["value"] for batch in log.read(topic, 0) for row in batch.to_pylist()]


def later_ms(log: ObjectLog) -> int:
    """Return a time at which all orphans are old enough for a sweep."""
    return max(each.modified_ms for each in log.client.list("")) + 30 * 86_400_000


def names(log: ObjectLog) -> list[str]:
    return [each.name for each in log.client.list("")]


@pytest.mark.parametrize("number", [50, 10**9, 10**20 - 1])
def test_a_commit_of_any_number_after_a_gap_is_an_error_that_names_both_sides(
    log: ObjectLog, number: int
) -> None:
    """Nobody lists, or fetches, the commits of a gap of any length."""
    last = log.store_state().number
    log.client.put_unique(layout.stored_commit(number), b"x")
    told = rf"expected commit {last + 1}, found {layout.stored_commit(number)} after it"
    with pytest.raises(StorageError, match=told):
        Impatient(log.client)


def lost_commits(log: ObjectLog, count: int) -> ObjectLog:
    """Return the log without its last commits, as after a restore of an older commit log."""
    last = log.store_state().number
    lost = range(last - count + 1, last + 1)
    log.client.delete([layout.stored_commit(number) for number in lost])
    log.client.delete([layout.stored_snapshot(number) for number in lost])
    return ObjectLog(log.address, create=False)


@pytest.mark.parametrize("count", [3, 2 * COMMITS + 2], ids=["the last ones", "all"])
def test_objects_of_lost_commits_are_damage_and_stay(
    log: ObjectLog, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Their names tell which commit their writers had seen."""
    whole = names(log)
    short = lost_commits(log, count)
    number = short.store_state().number
    found = [str(each) for each in verify_store(short) if each.is_damage]
    assert found and all("commits are lost" in each for each in found)
    held = {name for name in whole if layout.is_stored_data(name)}
    beyond = {name for name in held if layout.seen_by_stored(name) > number}
    with caplog.at_level(logging.WARNING):
        sweep(short, now_ms=later_ms(short))
    assert "commits are missing" in caplog.text
    assert beyond <= {*names(short)}
    short.create_topic("new")
    short.append("new", [("k", "goes on")])  # no sweep has passed what this writer has seen
    assert values(short, "new") == [b"goes on"]


def test_a_log_without_its_mark_is_made_again_from_its_boundary(log: ObjectLog) -> None:
    log.client.delete([layout.STORED_LOG])
    with pytest.raises(InvalidInputError, match=r"but commits of one\. Open it to write"):
        ObjectLog(log.address, read_only=True)
    assert not CommitLog.create(WithoutProbe(log.address))
    assert len(values(ObjectLog(log.address), "t")) == COMMITS


def test_no_log_is_created_over_one_that_has_lost_mark_and_boundary(log: ObjectLog) -> None:
    log.client.delete([layout.STORED_LOG, layout.STORED_BOUNDARY])
    before = names(log)
    for read_only in (True, False):
        with pytest.raises(StorageError, match="a log has lost its objects kl-log and boundary"):
            ObjectLog(log.address, read_only=read_only)
    assert names(log) == before


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-1], lambda data: data + b"x"]
)
def test_an_object_of_another_size_costs_no_other_one_its_regrouping(
    log: ObjectLog, change: Any
) -> None:
    spoilt = fresh_objects(log.store_state())[0]
    found = log.client.get(spoilt)
    assert found is not None
    log.client.put_unique(spoilt, change(found.data))
    faults: list[KafkaLogError] = []
    regroup_due(log, now_ms=0, force=True, on_damaged=lambda name, fault: faults.append(fault))
    assert spoilt in str(faults[0])
    assert f"expected an object of {len(found.data)} bytes" in str(faults[0])
    assert fresh_objects(log.store_state()) == [spoilt]
    assert len(values(log, "u")) == COMMITS


@pytest.mark.parametrize(
    "name",
    [
        layout.STORED_LOG,
        layout.STORED_BOUNDARY,
        layout.stored_commit(2 * COMMITS + 2),
        layout.stored_snapshot(2 * COMMITS),
    ],
)
def test_an_object_of_the_commit_log_that_is_huge_is_not_fetched(
    log: ObjectLog, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "WHOLE_SIZE_MAX", 100_000)
    found = log.client.get(name)
    assert found is not None
    log.client.put_unique(name, found.data + bytes(100_000))
    with pytest.raises(CorruptLogError, match=f"{name}: .*expected at most 100000 bytes, found 1"):
        ObjectLog(log.address, create=False)


def test_an_empty_range_is_empty(log: ObjectLog) -> None:
    """No store answers a request for it, which was repeated for a minute: `verify` sends it for an
    object that ends with its records, without a footer.
    """
    before = log.client.counts
    assert bytes(log.client.fetch(fresh_objects(log.store_state())[0], 3, 0)) == b""
    assert log.client.counts["GET"] == before["GET"] + 1  # that of the state


def test_a_larger_object_is_not_read_at_all(log: ObjectLog) -> None:
    log.client.put_unique("data/0/x.mixed", b"larger")
    with pytest.raises(CorruptLogError, match="an object of 3 bytes, found 6"):
        next(log.client.pieces("data/0/x.mixed", 3))


INVALID = """Encountered object with invalid path: Path "p/data//x" contained empty path segment

Debug source:
InvalidPath {
    source: EmptySegment {
        path: "p/data//x",
    },
}"""


def test_a_name_that_obstore_does_not_take_is_said_and_not_tried_again() -> None:
    fault = described("LIST", "s3://b/p/data", exceptions.InvalidPathError(INVALID))
    assert isinstance(fault, PermanentError)
    assert "found 'p/data//x'). Delete it, or rename it." in str(fault)


def test_digits_of_other_scripts_are_not_numbers() -> None:
    assert not layout.is_stored_data("data/\N{ARABIC-INDIC DIGIT ONE}/x.mixed")
