"""Keys that are erased from a log in an object store: no object has them afterwards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
from kafkalog.cleaner.schedule import manager
from kafkalog.erasure.erase import Erasure, erase
from kafkalog.erasure.occurrences import Occurrences, find_occurrences
from kafkalog.erasure.store_scan import StoreScan
from kafkalog.erasure.topic_files import FileKind
from kafkalog.errors import CommitInDoubtError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.records.record_batches import record_batches
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.cleaner.test_store_cleaner import named, records, stored
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, new_object_log

KEY = "user-4711"
LONGER = f"{KEY}-2"
"""Another key that begins with it."""
NOW = 1_700_000_000_000
HOUR = 3_600_000
PLAIN = {"compression.type": "uncompressed"}


@pytest.fixture
def log() -> ObjectLog:
    return new_object_log()


def fill(log: ObjectLog, config: Mapping[str, str] = PLAIN) -> None:
    """A topic with the key in cleaned, regrouped, dropped and fresh objects, among other keys."""
    log.create_topic("t", 2, {**PLAIN, **config})
    log.create_topic("others", 1, PLAIN)
    for turn in range(3):
        rows = [(f"user-{number}", f"turn {turn}") for number in range(4705, 4715)]
        log.append("t", [*rows, (LONGER, f"{turn}")], now_ms=NOW)
        log.append("others", [("other-key", "theirs")], now_ms=NOW)
        if turn == 0:
            manager.clean(log, force=True, now_ms=NOW)
        if turn == 1:
            upkeep.regroup_due(log, force=True, now_ms=NOW)


def erased(log: ObjectLog, *keys: str, now_ms: int = NOW, **options: Any) -> Erasure:
    wanted = ErasedKeys(keys or [KEY])
    return erase(
        log, "t", wanted, clock=lambda: now_ms, config=CleanerConfig(), **{"now": True, **options}
    )


def occurrences(log: ObjectLog, key: str = KEY, now_ms: int = NOW) -> Occurrences:
    return find_occurrences(log, "t", ErasedKeys([key]), clock=lambda: now_ms)


def objects_with(log: ObjectLog, key: str = KEY) -> list[str]:
    """Return the objects of the whole store that have a key's bytes, and no longer key's."""
    wanted = re.compile(re.escape(key.encode()) + rb"(?!-2)")
    listed = log.client._obstore.list(log.client._store).collect()
    found = []
    for entry in listed:
        data = bytes(log.client._obstore.get(log.client._store, entry["path"]).bytes())
        if wanted.search(data):
            found.append(entry["path"].removeprefix(f"{log.address.prefix}/"))
    return found


def others(log: ObjectLog) -> dict[tuple[str, bytes], bytes | None]:
    """Return the latest value of each key but the erased one."""
    return {
        (topic, key): value
        for (topic, _), rows in records(log).items()
        for _, key, value in rows
        if key != KEY.encode()
    }


# --- what goes and what stays --------------------------------------------------------------------


def test_no_object_of_the_store_has_the_key_afterwards(log: ObjectLog) -> None:
    fill(log)
    before = others(log)
    kinds = {one.file.kind for one in occurrences(log).files if one.found}
    assert kinds == {FileKind.LOG, FileKind.MIXED, FileKind.RETIRED}
    assert len(objects_with(log)) >= 4
    found = erased(log)
    assert found.is_erased and found.before.found >= 4
    assert objects_with(log) == []
    assert others(log) == before
    assert {KEY.encode(), LONGER.encode()} & {
        k for r in records(log).values() for _, k, _ in r
    } == {LONGER.encode()}
    assert named(log) == stored(log)


def test_objects_without_the_key_are_left_alone(log: ObjectLog) -> None:
    fill(log)
    other = {name for name, _ in log.store_state().extents(log.describe("others").topic_id, 0)}
    erased(log)
    fresh = {name for name in other if not layout.is_stored_segment(name)}
    state = log.store_state()
    kept = {name for name, _ in state.extents(log.describe("others").topic_id, 0)}
    assert other - fresh <= kept


# --- dropped objects -----------------------------------------------------------------------------


def test_dropped_objects_are_named_with_the_time_until_which_they_stay(log: ObjectLog) -> None:
    fill(log)
    found = erased(log, now=False)
    dropped = [one for one in found.after.residuals if "was replaced" in one.sentence]
    assert dropped and {one.until_ms for one in dropped} == {NOW + HOUR}
    assert all("file.delete.delay.ms (1 hour)" in one.sentence for one in dropped)
    assert {str(one.path) for one in dropped} <= {*log.store_state().dropped}
    assert upkeep.sweep(log, now_ms=NOW + HOUR)
    (left,) = occurrences(log).residuals
    assert "deletion" in left.sentence


def test_who_waits_for_dropped_objects_is_told_until_when(log: ObjectLog) -> None:
    fill(log, {"file.delete.delay.ms": "5000"})
    log.alter_topic("others", {"file.delete.delay.ms": "9000"})
    waited: list[int] = []
    found = erased(log, now=False, wait=waited.append)
    assert waited == [NOW + 9000]  # a mixed object stays for the longest delay of all topics
    assert not any("was replaced" in one.sentence for one in found.after.residuals)
    holders = {str(one.file.path) for one in found.before.files if one.found}
    assert holders and not holders & {*log.store_state().dropped}


def test_the_collector_of_another_process_deletes_what_was_dropped(log: ObjectLog) -> None:
    fill(log)
    erased(log, now=False)
    upkeep.sweep(ObjectLog(log.address), now_ms=NOW + HOUR)
    assert erased(log, now_ms=NOW + HOUR).is_erased
    assert objects_with(log) == []


# --- what else has the key -----------------------------------------------------------------------


def stage(log: ObjectLog, topic: str = "t") -> StagedMessage:
    """Do as a task that has written a record of the key, and has not committed it."""
    writer = StagedWriter(log, log.state(), now_ms=lambda: NOW)
    for rows in record_batches([(KEY, "staged")]):
        writer.append(topic, rows)
    return writer.finish()


def test_an_object_that_is_not_committed_is_named_and_its_commit_brings_the_key_back(
    log: ObjectLog,
) -> None:
    fill(log)
    message = stage(log)
    found = erased(log)
    (left,) = found.after.residuals
    assert "written by a task and not committed" in left.sentence and left.until_ms is not None
    log.commit([message], now_ms=NOW)
    assert len(occurrences(log).residuals) == 1
    assert erased(log).is_erased
    assert objects_with(log) == []


def test_orphans_of_the_topic_alone_are_read_by_their_footer(log: ObjectLog) -> None:
    log.create_topic("t", 1, PLAIN)
    log.create_topic("others", 1, PLAIN)
    message = stage(log, "others")
    assert occurrences(log).residuals == ()
    log.commit([message], now_ms=NOW)
    assert occurrences(log).residuals == ()


def test_a_foreign_object_is_searched_as_bytes(log: ObjectLog) -> None:
    fill(log)
    log.client.put_unique("data/7/notes.txt", b"about user-4711, who left")
    (left,) = erased(log).after.residuals
    assert str(left.path) == "data/7/notes.txt"
    assert "as bytes, at byte 6" in left.sentence


def test_an_object_that_is_damaged_is_not_proof(log: ObjectLog) -> None:
    log.create_topic("t", 1, PLAIN)
    log.append("t", [("a", "1")], now_ms=NOW)
    (name,) = log.store_state().objects
    found = log.client.get(name)
    assert found is not None
    data = bytearray(found.data)
    for place in (-1, layout.BATCH_OVERHEAD + 3):  # of the footer, then of a batch as well
        data[place] ^= 1
        log.client.put_unique(name, bytes(data))
        left = occurrences(log).residuals
        assert {str(one.path) for one in left} == {name}
        assert all("content is unknown" in one.sentence for one in left)
    assert not erased(log).is_erased


def test_an_object_that_is_missing_is_not_proof(log: ObjectLog) -> None:
    log.create_topic("t", 1, PLAIN)
    log.append("t", [("a", "1")], now_ms=NOW)
    (name,) = log.store_state().objects
    log.client.delete([name])
    (left,) = occurrences(log).residuals
    assert (str(left.path), "it is missing" in left.sentence) == (name, True)


def test_commits_and_indexes_are_searched_too(log: ObjectLog) -> None:
    fill(log)
    found = {one.kind: one for one in occurrences(log).by_kind}
    assert found[FileKind.JOURNAL].files == log.state().number
    assert found[FileKind.INDEX].files >= 2
    assert found[FileKind.MARK].bytes > 0
    total = sum(1 for _ in log.client._obstore.list(log.client._store).collect())
    left_out = {n for n in stored(log) if n.startswith("segments/")} - {
        str(one.file.path) for one in occurrences(log).files
    }
    assert occurrences(log).file_count + len(left_out) == total
    other = log.describe("others").topic_id
    assert left_out and all(layout.topic_of_stored(name) == other for name in left_out)


# --- others at work ------------------------------------------------------------------------------


def during_the_first_swap(log: ObjectLog, act: Callable[[ObjectLog], Any]) -> Erasure:
    """Let another process act before the first swap of an erasure."""
    other, swap, acts = ObjectLog(log.address), log.swap, [act]

    def late(*given: Any, **options: Any) -> bool:
        while acts:
            acts.pop()(other)
        return swap(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "swap", late)
        return erased(log)


@pytest.mark.parametrize("is_regrouped", [False, True])
def test_an_erasure_is_complete_if_another_cleaner_is_quicker(
    log: ObjectLog, is_regrouped: bool
) -> None:
    fill(log)
    if is_regrouped:
        upkeep.regroup_due(log, force=True, now_ms=NOW)
    before = others(log)
    found = during_the_first_swap(
        log, lambda other: manager.clean(other, "t", force=True, now_ms=NOW)
    )
    assert found.is_erased
    assert objects_with(log) == []
    assert others(log) == before


def test_a_sweep_of_what_an_erasure_has_cleaned_makes_it_clean_again(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(log)
    other, swap, swept = ObjectLog(log.address), log.swap, set[int]()

    def late(sources: Sequence[str], *given: Any, **options: Any) -> bool:
        if not swept and sources and layout.is_stored_segment(sources[0]):
            swept.add(other.store_state().number)
            other.change(lambda draft: draft.sweep(*swept), now_ms=NOW)
        return swap(sources, *given, **options)

    monkeypatch.setattr(log, "swap", late)
    assert erased(log).is_erased
    assert swept
    assert objects_with(log) == []


def test_a_collector_during_the_search_hides_no_record(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are swapped and deleted after they were listed, and before they are read."""
    fill(log)
    other, fetched, acts = ObjectLog(log.address), StoreScan._fetched, [True]

    def late(scan: StoreScan, wanted: Any) -> Any:
        while acts:
            acts.pop()
            manager.clean(other, "t", force=True, now_ms=NOW)
            upkeep.sweep(other, now_ms=NOW + HOUR)
        return fetched(scan, wanted)

    monkeypatch.setattr(StoreScan, "_fetched", late)
    found = occurrences(log)
    assert found.record_number == log.state().number
    assert {one.file.kind for one in found.files if one.found} == {FileKind.LOG}


# --- deaths --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [Spoil.KILLED_BEFORE, Spoil.KILLED_AFTER])
def test_an_erasure_that_is_killed_at_any_request_is_completed_by_the_next(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    number, is_spoiled = 0, True
    while is_spoiled:
        number += 1
        log = new_object_log()
        log.create_topic("t", 1, PLAIN)
        log.append("t", [("a", "1"), (KEY, "2"), ("b", "3")], now_ms=NOW)
        assert isinstance(log.client, SpoiledClient)
        log.client.is_spoiled = False
        log.client.spoil({number: spoil})
        with contextlib.suppress(Killed, StorageError, CommitInDoubtError):
            erased(log)
        is_spoiled = log.client.is_spoiled
        log.client.spoil({})
        other = ObjectLog(log.address)
        found = erased(other)
        assert found.is_erased, (number, found.after.residuals)
        assert objects_with(other) == []
        assert [row[1:] for row in records(other)["t", 0]] == [(b"a", b"1"), (b"b", b"3")]
    assert number > 40


# --- who does it ---------------------------------------------------------------------------------
