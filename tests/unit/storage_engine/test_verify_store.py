"""`kafkalog verify` of a log in an object store: what it finds, and what it takes for sound."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from kafkalog.errors import UnknownTopicError
from kafkalog.inspection.verify_store import stored_size, verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.object_store import regroup
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.storage_engine.store_log import new_object_log
from tests.unit.storage_engine.test_regroup import fill


@pytest.fixture
def log() -> ObjectLog:
    """Return a log with segment objects and fresh objects, both with records of two topics."""
    log = new_object_log()
    for topic in ("t", "u"):
        log.create_topic(topic, 2)
        fill(log, topic, 2, commits=3)
    regroup.regroup(log, regroup.fresh_objects(log.store_state()), now_ms=0)
    for topic in ("t", "u"):
        fill(log, topic, 2, commits=2)
    return log


def found(log: ObjectLog, topic: str | None = None, *, deep: bool = False) -> list[str]:
    """Return the findings, damage before notices."""
    findings = sorted(verify_store(log, topic, deep=deep), key=lambda one: not one.is_damage)
    return [f"{'damage' if one.is_damage else 'notice'}: {one}" for one in findings]


def first(log: ObjectLog, suffix: str) -> str:
    """Return the first live object of topic t with a suffix."""
    topic_id = log.describe("t").topic_id
    names = [
        name
        for name, each in log.store_state().objects.items()
        if any(extent.topic_id == topic_id for extent in each.extents)
    ]
    names += [layout.stored_side(name) for name in names if layout.is_stored_segment(name)]
    return min(name for name in names if name.endswith(suffix))


def test_a_sound_log_has_no_finding(log: ObjectLog) -> None:
    done: list[int] = []
    assert not [*verify_store(log)]
    assert not [*verify_store(log, deep=True, progress=done.append)]
    assert sum(done) == stored_size(log) > 0
    assert not found(log, "u", deep=True)
    with pytest.raises(UnknownTopicError):
        found(log, "no")


@pytest.mark.parametrize("suffix", [".mixed", ".log", ".side"])
def test_an_object_that_is_missing_is_damage(log: ObjectLog, suffix: str) -> None:
    name = first(log, suffix)
    log.client.delete([name])
    (finding,) = found(log)
    assert finding.startswith(f"damage: {log.root}/{name}: at byte 0: expected an object of")
    assert finding.endswith("found no object: records are lost")
    assert not found(log, "u", deep=True)
    assert found(log, deep=True)[0].startswith("damage")


@pytest.mark.parametrize("suffix", [".mixed", ".log", ".side"])
def test_an_object_of_another_size_is_damage(log: ObjectLog, suffix: str) -> None:
    name = first(log, suffix)
    entry = log.client.get(name)
    assert entry is not None
    size = len(entry.data)
    log.client.put_unique(name, entry.data[:-1])
    assert found(log) == [
        f"damage: {log.root}/{name}: at byte 0: expected {size} bytes, found {size - 1}"
    ]


@pytest.mark.parametrize("suffix", [".mixed", ".log", ".side"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_any_changed_byte_is_found_by_a_deep_check_alone(
    log: ObjectLog, suffix: str, place: float
) -> None:
    name = first(log, suffix)
    entry = log.client.get(name)
    assert entry is not None
    data = bytearray(entry.data)
    data[int(place * (len(data) - 1))] ^= 0xFF
    log.client.put_unique(name, bytes(data))
    assert not found(log)
    findings = found(log, deep=True)
    assert findings and all(name in each for each in findings if each.startswith("damage"))
    assert findings[0].startswith("damage")
    assert not found(log, "u", deep=True)


def test_orphans_and_foreign_objects_are_notices(log: ObjectLog) -> None:
    number = log.state().number
    orphan = layout.stored_segment(number, "A" * 22, 0, 0, "r")
    for name in (orphan, layout.stored_side(orphan), f"data/{number}/x.mixed", "data/notes.txt"):
        log.client.put_unique(name, b"x")
    findings = found(log)
    assert [each.partition(":")[0] for each in findings] == ["notice"] * 4
    assert sum("a sweep deletes it" in each for each in findings) == 3
    assert sum("found a foreign one" in each for each in findings) == 1


def test_records_that_no_object_has_are_damage(log: ObjectLog) -> None:
    name = first(log, ".log")
    extent = log.store_state().objects[name].extents[0]
    partition = extent.partition

    def lose(act: Callable[[], None]) -> list[str]:
        act()
        return found(log)

    def drop() -> None:
        log.change(lambda draft: draft.swap([name], []), now_ms=0)

    (finding,) = lose(drop)
    assert f"t-{partition}: at byte 0: expected the records of offset 0" in finding
    assert f"found the next ones at offset {extent.next_offset}" in finding


def test_a_topic_that_its_first_commit_creates_is_sound() -> None:
    """Its tasks do not know its id, so the footers of their objects have none."""
    log = new_object_log()
    new = NewTopic(2, {"cleanup.policy": "compact"})
    writer = StagedWriter(log, log.state(), now_ms=lambda: 0, new_topic=new)
    writer.append("n", pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"1", b"2"]}))
    log.commit([writer.finish()], create=new, now_ms=0)
    assert not found(log, deep=True)
