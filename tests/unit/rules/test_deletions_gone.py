"""A log knows up to which offset deletions are gone, so that followers know what they missed."""

from __future__ import annotations

from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.metadata.state import Change, PartitionState, State
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import open_log
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.acts import dies_at
from tests.unit.rules.places import DAY_MS, DIRECTORY, HOUR_MS, OBJECTS, Place, new_log, new_place
from tests.unit.storage_engine.spoiled_client import SpoiledClient


def gone_to(place: Place) -> int:
    """Return what state and status say."""
    found = place.state().deletions_gone_to
    assert place.status(NOW_MS).deletions_gone_to == found
    return found


def force(place: Place, now_ms: int = NOW_MS) -> Place:
    for stats in place.log.clean("t", force=True, now_ms=now_ms):
        assert stats.error is None
    return place


def test_a_deletion_is_gone_once_its_tombstone_is_removed(place: Place) -> None:
    force(place.topic().append(("a", "1"), ("a", None), ("b", "1")))
    assert gone_to(place) == 0
    force(place, NOW_MS + DAY_MS)
    assert gone_to(place) == 2
    assert gone_to(place.reopen()) == 2


def test_a_tombstone_that_a_later_record_replaces_is_not_a_loss(place: Place) -> None:
    place.topic(delete_retention_ms=0).append(("a", None), ("b", None), ("a", "2"), ("c", "1"))
    force(force(place), NOW_MS + 1)
    assert gone_to(place) == 2
    place.append(("c", None), ("c", "2"))
    force(force(place, NOW_MS + 2), NOW_MS + 3)
    assert gone_to(place) == 2


def test_the_highest_deletion_counts_whichever_goes_last(place: Place) -> None:
    place.topic().append(("a", None))
    force(place)
    place.append(("b", None), ("c", "1"))
    place.log.alter_topic("t", {"delete.retention.ms": "0"})
    force(force(place, NOW_MS + 1), NOW_MS + 2)
    assert gone_to(place) == 2
    place.log.alter_topic("t", {"delete.retention.ms": None})
    force(place, NOW_MS + DAY_MS)
    assert (gone_to(place), place.latest_offsets()) == (2, [2])


def test_an_erased_key_counts_as_a_deletion(place: Place) -> None:
    place.topic().append(("a", "1"), ("b", "1"))
    place.log.erase("t", [b"a"], now=True, now_ms=NOW_MS)
    assert place.latest_offsets() == [1]
    assert gone_to(place) == 3


def test_a_topic_that_is_created_again_has_lost_no_deletion(place: Place) -> None:
    place.topic(delete_retention_ms=0).append(("a", None), ("b", "1"))
    force(force(place), NOW_MS + 1)
    assert gone_to(place) == 1
    place.log.delete_topic("t")
    assert gone_to(place.topic()) == 0


def test_deleted_records_change_nothing(place: Place) -> None:
    place.topic(policy="compact,delete", delete_retention_ms=0)
    place.append(("a", None), ("b", "1"), ("c", "1"))
    force(force(place), NOW_MS + 1)
    place.log.delete_records("t", 0, 2)
    assert gone_to(place) == 1


@pytest.mark.parametrize("other", [DIRECTORY, OBJECTS])
def test_a_copy_lacks_the_deletions_that_its_source_lacks(
    place: Place, other: str, tmp_path: Path
) -> None:
    place.topic(delete_retention_ms=HOUR_MS).append(("a", "1"), ("b", "1"))
    with open_log(new_log(other, tmp_path / "copy")) as other_log:
        copy(place.engine, other_log, now_ms=NOW_MS)
        place.append(("a", None), ("c", "1"))
        force(force(place), NOW_MS + HOUR_MS)
        assert gone_to(place) == 3
        with pytest.raises(InvalidInputError, match="deletions up to 3 are gone"):
            copy(place.engine, other_log, now_ms=NOW_MS + 1)
    with open_log(new_log(other, tmp_path / "other")) as other_log:
        copy(place.engine, other_log, now_ms=NOW_MS)
        assert other_log.describe("t").partitions[0].deletions_gone_to == 3
        place.append(("d", "1"))
        copy(place.engine, other_log, now_ms=NOW_MS + 9 * DAY_MS)
        assert other_log.describe("t").partitions[0].deletions_gone_to == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DIRECTORY, OBJECTS])
def test_a_death_at_any_step_loses_no_deletion_without_a_trace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
    step, is_over, seen = 0, False, set[tuple[bool, int]]()
    while not is_over:
        place = new_place(kind, tmp_path / f"{step}")
        force(place.topic().append(("a", "1"), ("a", None), ("b", "1")))
        is_over = not dies_at(place, step, lambda place: place.turn(NOW_MS + DAY_MS))
        place.reopen()
        offsets = [row["offset"] for rows in place.log.read("t", 0) for row in rows.to_pylist()]
        seen.add((1 in offsets, gone_to(place)))
        place.close()
        step += 1
    assert (False, 0) not in seen
    assert {(True, 0), (False, 2)} <= seen


def test_a_state_of_an_earlier_release_may_lack_deletions_up_to_where_it_is_cleaned() -> None:
    def written(state: PartitionState, fields: int) -> PartitionState:
        change = Change()
        change.topic("t", "A" * 22, 1, {})
        change.partition("t", 0, state)
        change.partitions["t"]["0"] = change.partitions["t"]["0"][:fields]
        return State().apply(1, change.record(0)).topics["t"].partitions[0]

    known = PartitionState(100, 50, 10, first_dirty_offset=20, deletions_gone_to=7)
    assert written(known, 12).deletions_gone_to == 7
    assert written(known, 11).deletions_gone_to == 20
    adopted = PartitionState(100, 50, 10, first_dirty_offset=20, listed_from=60)
    assert written(adopted, 11).deletions_gone_to == 60
    assert written(PartitionState(100), 11).deletions_gone_to == 0


def test_a_log_that_was_released_and_adopted_again_may_lack_deletions(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.append("t", [("a", None), ("b", "1")])
        log.clean("t", force=True)
    release(tmp_path / "log", now_ms=NOW_MS)
    adopt(tmp_path / "log", config={"*": {"cleanup.policy": "compact"}}, now_ms=NOW_MS)
    with kafkalog.open(tmp_path / "log") as log:
        assert log.describe("t").partitions[0].deletions_gone_to == 2
        log.append("t", [("c", "1")])
        assert log.describe("t").partitions[0].deletions_gone_to == 2
