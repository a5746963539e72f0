"""A deleted topic is gone at once, its directories a little later, whoever dies in between."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError, StorageError, UnknownTopicError
from kafkalog.inspection.verify import verify
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.topic_deletion import finish_deletions
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import DeletedTopic, State
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.reading import directory_snapshot
from tests.builders.batch_builder import ABORT, COMMIT, batch, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import values
from tests.unit.storage_engine.faults import Died, each_act

NOW_MS = 1_700_000_000_000
DELAY_MS = 60_000
DELETED = re.compile(r"^t-\d\.[0-9a-f]{32}-delete$")


def filled(root: Path, partitions: int = 2) -> DirectoryLog:
    log = LogBuilder(root).topic("t", partitions)
    log.append(*((f"k{n}", "old") for n in range(20)))
    return log.topic("other").append(("k", "v")).engine


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_what_wrote_to_a_deleted_topic_may_write_the_same_to_a_new_one(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    staged = [LogBuilder(engine).stage(("k", "new"))]
    engine.commit(staged, writer=Writer("app", "t", 7), now_ms=NOW_MS)
    engine.commit([], writer=Writer("app", "other", 7), now_ms=NOW_MS)
    engine.delete_topic("t", now_ms=NOW_MS)
    engine.create_topic("t", 2, now_ms=NOW_MS)
    again = LogBuilder(engine).commit(("k", "new"), writer=Writer("app", "t", 7))
    assert not again.skipped
    assert set(values(engine)) == {b"new"}


def test_a_creation_that_died_does_not_stop_the_removal_of_others(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.delete_topic("t", now_ms=NOW_MS)
    (tmp_path / "t-0").mkdir()  # created again, and died before it said for which topic
    engine.delete_topic("other", now_ms=NOW_MS)
    finish_deletions(engine, now_ms=NOW_MS + DELAY_MS)
    assert directories(tmp_path) == ["t-0"]
    engine.create_topic("t", 2, now_ms=NOW_MS)
    engine.append("t", [("k", "new")], now_ms=NOW_MS)
    assert set(values(engine)) == {b"new"}


@pytest.mark.parametrize("content", [b"\0" * 42, b"", b"version: 0\ntopic_id: damaged"])
def test_a_directory_that_lost_its_id_keeps_the_deletion_until_it_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """And keeps nobody else's: also not that of the same topic's other directories."""
    engine = filled(tmp_path)
    metadata = tmp_path / "t-0" / layout.PARTITION_METADATA
    written = metadata.read_bytes()
    metadata.write_bytes(content)
    engine.delete_topic("t", now_ms=NOW_MS)
    engine.delete_topic("other", now_ms=NOW_MS)
    assert finish_deletions(engine, now_ms=NOW_MS + DELAY_MS) == 1
    assert [name.split(".")[0] for name in directories(tmp_path)] == ["t-0", "t-1"]
    assert [deleted.name for deleted in engine.state().deleting.values()] == ["t"]
    assert "topic 't' is not gone until this is repaired" in caplog.text and "t-0/" in caplog.text
    with pytest.raises(StorageError, match="t-0"):
        engine.create_topic("t", 2, now_ms=NOW_MS)
    metadata.write_bytes(written)
    assert finish_deletions(engine, now_ms=NOW_MS + DELAY_MS) == 1
    assert (directories(tmp_path), engine.state().deleting) == ([], {})


def test_a_new_topics_directory_that_lost_its_id_is_not_a_deleted_ones(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.delete_topic("t", now_ms=NOW_MS)
    engine.create_topic("t", 2, now_ms=NOW_MS)
    engine.append("t", [(f"k{n}", "new") for n in range(20)], now_ms=NOW_MS)
    (tmp_path / "t-0" / layout.PARTITION_METADATA).write_bytes(bytes(42))
    assert finish_deletions(engine, now_ms=NOW_MS + DELAY_MS) == 1
    assert directories(tmp_path) == ["other-0", "t-0", "t-1"]
    assert set(values(engine)) == {b"new"}


def test_a_deleted_topic_is_gone_for_every_process(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    other = DirectoryLog(tmp_path)
    engine.delete_topic("t", now_ms=NOW_MS)
    assert other.topics() == ["other"]
    with pytest.raises(UnknownTopicError):
        list(other.read("t", 0))
    with pytest.raises(UnknownTopicError):
        engine.append("t", [("k", "v")])
    with pytest.raises(UnknownTopicError):
        engine.delete_topic("t")
    assert set(values(other, "other")) == {b"v"}


def test_its_directories_get_kafkas_name_and_are_removed_after_the_delay(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.delete_topic("t", now_ms=NOW_MS)
    names = directories(tmp_path)
    assert len(names) == 3 and all(DELETED.match(name) for name in names if name != "other-0")
    assert {name.split(".")[0] for name in names} == {"other-0", "t-0", "t-1"}
    from kafkalog.cleaner.schedule.manager import sweep

    sweep(engine, now_ms=NOW_MS + DELAY_MS - 1)
    assert directories(tmp_path) == names
    sweep(engine, now_ms=NOW_MS + DELAY_MS)
    assert directories(tmp_path) == ["other-0"]
    assert engine.state().deleting == {}
    assert DirectoryLog(tmp_path).state().deleting == {}


def test_without_a_delay_they_are_removed_at_once(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.alter_topic("t", {"file.delete.delay.ms": "0"})
    engine.delete_topic("t", now_ms=NOW_MS)
    assert directories(tmp_path) == ["other-0"]


def test_the_next_writer_that_opens_the_log_removes_them(tmp_path: Path) -> None:
    filled(tmp_path).delete_topic("t", now_ms=NOW_MS)
    DirectoryLog(tmp_path, read_only=True)
    assert len(directories(tmp_path)) == 3
    DirectoryLog(tmp_path)
    assert directories(tmp_path) == ["other-0"]


@pytest.mark.parametrize("length", [1, 200, 249])
def test_the_name_of_a_deleted_directory_is_cut_to_255_characters(
    tmp_path: Path, length: int
) -> None:
    engine = DirectoryLog(tmp_path)
    name = "x" * length
    topic = engine.create_topic(name, 11)
    engine.delete_topic(name, now_ms=10**14)
    found = directories(tmp_path)
    assert len(found) == 11 and max(map(len, found)) == min(length + 43, 255)
    assert layout.deleted_directory(name, 10, topic.topic_id) in found


def test_a_topic_of_the_same_name_can_be_created_at_once(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    before = engine.describe("t").topic_id
    engine.delete_topic("t", now_ms=NOW_MS)
    assert engine.create_topic("t", 3, now_ms=NOW_MS).topic_id != before
    engine.append("t", [("k", "new")], now_ms=NOW_MS)
    assert set(values(engine)) == {b"new"}
    engine.delete_topic("t", now_ms=NOW_MS)
    engine.create_topic("t", 1, now_ms=NOW_MS)
    DirectoryLog(tmp_path)  # removes what is left of both
    assert directories(tmp_path) == ["other-0", "t-0"]
    assert engine.offsets("t") == {0: (0, 0)}


def test_a_reader_that_is_open_reads_on(tmp_path: Path) -> None:
    engine = filled(tmp_path, partitions=1)
    with engine.snapshot("t", 0) as snapshot:
        engine.delete_topic("t", now_ms=NOW_MS)
        DirectoryLog(tmp_path)
        assert sum(len(chunk.table) for chunk in snapshot.chunks(0, 20)) >= 1


def test_a_reader_never_goes_on_in_a_new_topic_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_snapshot, "WINDOW", 2)
    engine = DirectoryLog(tmp_path)
    for value in ("old", "new"):
        engine.create_topic("t", 1, {"segment.bytes": "100"})
        for n in range(6):
            engine.append("t", [(f"k{n}", value * 10)], now_ms=NOW_MS)
        if value == "old":
            reader = engine.read("t", 0)
            found = [next(reader)]
            engine.delete_topic("t", now_ms=10**14)
    with pytest.raises((UnknownTopicError, StorageError)):
        found.extend(reader)
    assert {v for batch in found for v in batch["value"].to_pylist()} == {b"old" * 10}


@pytest.mark.parametrize("is_created_again", [False, True])
def test_a_reader_never_takes_the_transactions_of_a_new_topic_of_the_same_name(
    tmp_path: Path, is_created_again: bool
) -> None:
    engine = LogBuilder(tmp_path).topic("t").engine
    engine.append_raw("t", 0, joined([batch(0, 2, of=8), marker(2, COMMIT, 8)]), now_ms=NOW_MS)
    with engine.snapshot("t", 0) as snapshot:
        engine.delete_topic("t", now_ms=NOW_MS)
        if is_created_again:
            engine.create_topic("t", now_ms=NOW_MS)
            theirs = joined([batch(0, 2, of=8), marker(2, ABORT, 8)])
            engine.append_raw("t", 0, theirs, now_ms=NOW_MS)
        with pytest.raises(UnknownTopicError, match="topic 't'"):
            list(snapshot.read(0, 3, schema=changelog_schema()))


def test_what_was_staged_for_a_deleted_topic_is_refused(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    message = LogBuilder(engine).stage(("k", "new"))
    engine.delete_topic("t", now_ms=NOW_MS)
    with pytest.raises(StorageError, match="was deleted or created again"):
        engine.commit([message], now_ms=NOW_MS)
    engine.create_topic("t", 2, now_ms=NOW_MS)
    with pytest.raises(StorageError, match="was deleted or created again"):
        engine.commit([message], now_ms=NOW_MS)
    assert set(values(engine)) == set()


def test_a_deletion_is_synced_also_where_commits_are_not(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"flush.messages": "1000"})
    engine.append("t", [("k", "v")], now_ms=NOW_MS)
    assert engine.state().unsynced
    engine.delete_topic("t", now_ms=NOW_MS)
    assert not engine.state().unsynced


def test_a_log_opened_read_only_loses_no_topic(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(InvalidInputError, match="opened read-only"):
        DirectoryLog(tmp_path, read_only=True).delete_topic("t")


# --- the journal ---------------------------------------------------------------------------------


def test_a_snapshot_remembers_what_is_being_deleted() -> None:
    state = State().apply(1, {"topics": {"t": {"id": "A" * 22, "partitions": 2, "config": {}}}})
    state = state.apply(2, {"deleting": {"A" * 22: ["t", 2, 77]}})
    assert state.topics == {}
    again = State().apply(2, state.snapshot())
    assert again.deleting == {"A" * 22: DeletedTopic("t", "A" * 22, 2, 77)}
    assert again.apply(3, {"deleting": {"A" * 22: None}}).deleting == {}


def test_a_record_without_deletions_reads_as_before() -> None:
    state = State().apply(1, {"time_ms": 5, "deleting": {"A" * 22: ["t", 2, 77]}})
    assert set(state.apply(2, {"time_ms": 6, "unsynced": True}).deleting) == {"A" * 22}
    assert set(state.apply(2, {"time_ms": 6}).deleting) == {"A" * 22}


def test_a_deletion_is_of_one_id_and_not_of_a_name() -> None:
    state = State().apply(1, {"topics": {"t": {"id": "B" * 22, "partitions": 1, "config": {}}}})
    assert "t" in state.apply(2, {"deleting": {"A" * 22: ["t", 1, 77]}}).topics


def test_a_rewritten_journal_remembers_what_is_being_deleted(tmp_path: Path) -> None:
    engine = filled(tmp_path)
    engine.delete_topic("t", now_ms=10**14)
    journal = Journal(tmp_path / layout.COMMIT)
    journal.recover()
    journal.rewrite()
    assert [d.name for d in DirectoryLog(tmp_path).state().deleting.values()] == ["t"]


# --- cleaners ------------------------------------------------------------------------------------


def test_a_deletion_waits_for_the_cleaner_lock_and_the_topic_is_gone_meanwhile(
    tmp_path: Path,
) -> None:
    engine = filled(tmp_path)
    with locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK).exclusive():
        thread = threading.Thread(target=engine.delete_topic, args=("t",))
        thread.start()
        while "t" in DirectoryLog(tmp_path, read_only=True).topics():
            pass
        assert (tmp_path / "t-0").exists()
        creator = threading.Thread(target=DirectoryLog(tmp_path).create_topic, args=("t",))
        creator.start()
        creator.join(0.2)
        assert creator.is_alive()
    thread.join(120)
    creator.join(120)
    assert engine.topics() == ["other", "t"]
    assert engine.offsets("t") == {0: (0, 0)}


def test_all_files_go_before_anything_is_written_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk what is to be written fails, and they are what makes space."""
    engine = filled(tmp_path)

    def refuse(root: Path, state: State) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_root_checkpoints", refuse)
        for name in ("t", "other"):
            engine.delete_topic(name, now_ms=NOW_MS)
        with pytest.raises(StorageError, match="No space left"):
            finish_deletions(engine, now_ms=NOW_MS + DELAY_MS)
        assert directories(tmp_path) == []
    assert finish_deletions(engine, now_ms=NOW_MS + DELAY_MS) == 2
    assert engine.state().deleting == {}


# --- dying and failing at every step -------------------------------------------------------------


def delete(root: Path, now_ms: int = NOW_MS) -> Callable[[], None]:
    engine = DirectoryLog(root)
    return lambda: engine.delete_topic("t", now_ms=now_ms)


@pytest.mark.slow
@pytest.mark.parametrize("delay_ms", ["0", "60000"])
@pytest.mark.parametrize("next_", ["create", "commit", "open", "sweep"])
def test_a_process_that_dies_at_any_act_of_a_deletion_leaves_the_topic_or_none(
    tmp_path: Path, delay_ms: str, next_: str
) -> None:
    start = filled(tmp_path / "start")
    start.alter_topic("t", {"file.delete.delay.ms": delay_ms})
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        if not each_act(delete(root), n, Died(), after=True):
            break
        reader = DirectoryLog(root, read_only=True)
        is_there = "t" in reader.topics()
        if is_there:
            assert set(values(reader)) == {b"old"}, n
        engine = DirectoryLog(root)
        # Whoever opens for writing finds a record that was written and not published.
        is_there = "t" in engine.topics()
        if next_ == "create":
            assert engine.create_topic("t", 2, exist_ok=True), n
            assert set(values(engine)) == ({b"old"} if is_there else set()), n
        elif next_ == "commit" and not is_there:
            new = NewTopic(2, {"cleanup.policy": "compact"})
            staged = LogBuilder(engine).stage(("k", "new"), new_topic=new)
            engine.commit([staged], writer=Writer("q", "t", 0), create=new)
            assert set(values(engine)) == {b"new"}, n
        elif next_ == "sweep":
            from kafkalog.cleaner.schedule.manager import sweep

            sweep(engine, now_ms=NOW_MS + DELAY_MS)
        if "t" in engine.topics():
            engine.append("t", [("k", "v")], now_ms=NOW_MS)
            engine.delete_topic("t", now_ms=NOW_MS)
        DirectoryLog(root)
        assert directories(root) == ["other-0"], n
        assert engine.state().deleting == {}, n
        assert set(values(engine, "other")) == {b"v"}, n
        shutil.rmtree(root)
    assert n > 5


def test_any_act_of_a_deletion_that_fails_once_leaves_the_topic_or_none(tmp_path: Path) -> None:
    filled(tmp_path / "start")
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        if not each_act(delete(root), n, OSError(5, "failed")):
            break
        engine = DirectoryLog(root)
        assert set(values(engine)) == {b"old"} if "t" in engine.topics() else True, n
        engine.create_topic("t", 2, exist_ok=True)
        engine.append("t", [("k", "new")], now_ms=NOW_MS)
        assert set(values(engine)) in ({b"new"}, {b"old", b"new"}), n
        shutil.rmtree(root)
    assert n > 5


def test_a_creation_that_died_during_a_deletion_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(tmp_path)
    engine.delete_topic("t", now_ms=10**14)

    def die(*args: object, **kwargs: object) -> None:
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(Journal, "append", die)
        engine.create_topic("t", 2)
    DirectoryLog(tmp_path).create_topic("t", 2)
    assert sum(DELETED.match(name) is not None for name in os.listdir(tmp_path)) == 2


def test_checkpoints_say_nothing_of_a_new_topic_that_was_true_of_a_deleted_one(
    tmp_path: Path,
) -> None:
    """They are written at `close`: what they say of `t` is beyond the end of its successor."""

    def damage() -> list[str]:
        return [str(found) for found in verify(tmp_path) if found.is_damage]

    filled(tmp_path).close()
    with DirectoryLog(tmp_path) as engine:
        engine.delete_topic("t", now_ms=NOW_MS)
        engine.create_topic("t", 2, {"file.delete.delay.ms": str(DELAY_MS)}, now_ms=NOW_MS)
        assert damage() == []
        finish_deletions(engine, now_ms=NOW_MS + 10**9)
        assert engine.state().deleting == {}
        assert damage() == []
    assert damage() == []
