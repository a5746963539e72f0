"""Who may read a log, where its files may lie, and that nothing in it is ever run as a program."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import CorruptJournalError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.log import KafkaLog
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.storage_engine.directory import pins, staged_directory
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, host
from kafkalog.storage_engine.metadata import address
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import DeletedTopic, PartitionState, State, TopicState
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import Run, StagedMessage
from tests.acceptance.mounts import disk
from tests.acceptance.users import as_nobody, umask
from tests.builders.batch_builder import at_times
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, latest_records, records

SOURCES = Path(kafkalog.__file__).parent
FIVE = [(f"{number}", f"{number}") for number in range(5)]
CONFIG = {"segment_bytes": 2_000, "policy": "compact,delete"}


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and syncs are what takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


def fill(root: Path) -> KafkaLog:
    """Make a log with a file of nearly every kind, and leave it open."""
    log = LogBuilder(root, now_ms=clock.now_ms()).topic("t", 2, **CONFIG)
    keys = [f"k{i}" for i in range(10)]
    return log.rounds(8, keys, value=lambda number: f"{number}" * 50).log


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that others may look into, as pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="kafkalog-shared-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# --- permissions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_files_have_the_rights_that_the_umask_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    opened: set[int] = set()
    opening = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            opened.add(mode)
        return opening(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 1)
    root = tmp_path / "log"
    with umask(mask):
        log = fill(root)
        log.alter_topic("t", {"segment.bytes": str(1 << 20)})
        message = LogBuilder(log, now_ms=clock.now_ms()).stage(*FIVE, batch_id=1)
        assert {run.is_segment for run in message.runs} == {True}
        kept = [*root.rglob("*.staged"), *root.rglob("*.staged-*")]
        check_modes(root, mask)
        directory_log_of(log).commit([message])
        end = log.offsets("t")[0][1]
        log.append_raw("t", 0, at_times(end, [clock.now_ms()], 7).data)
        action = pins.Action("application", "action")
        assert pins.pin(root, action, directory_log_of(log).state, clock.now_ms()) is not None
        log.clean("t", force=True)
        log.create_topic("gone", 1)
        log.delete_topic("gone")
        log.close()
    assert kept
    suffixes = {path.suffix for path in root.rglob("*") if path.is_file()}
    assert suffixes >= {".log", ".index", ".timeindex", ".deleted", ".keys", ".lock", ".snapshot"}
    check_modes(root, mask)
    assert opened == {0o666}


def check_modes(root: Path, mask: int) -> None:
    for path in [root, *root.rglob("*")]:
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == expected, path


def test_another_user_reads_a_log_and_is_told_why_it_cannot_write(shared: Path) -> None:
    with umask(0o022):
        log = fill(shared / "log")
        expected, latest = records(log, "t"), latest_records(log, "t")
        assert log.clean("t")  # some segments have key indexes
        log.close()
    with as_nobody():
        log = kafkalog.open(shared / "log")
        assert latest_records(log, "t") == latest
        assert set(records(log, "t")) <= set(expected)
        found = log.lookup("t", "k1")
        assert found is not None and found.value == latest[b"k1"]
        assert {status.state for status in log.status()} <= {"clean", "not due", "dirty"}
        assert damage(shared / "log") == []
        refuse_to_write(log, "Permission denied")


def test_a_user_who_may_only_read_still_reads_the_log_after_a_new_boot(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is to be settled then, by who may write it: a reader can do without."""
    with umask(0o022):
        log = fill(shared / "log")
        expected = records(log, "t")
        log.close()
    monkeypatch.setattr(host, "boot_id", lambda: "another boot")
    with as_nobody():
        log = kafkalog.open(shared / "log")
        assert records(log, "t") == expected
        refuse_to_write(log, "Permission denied")


def test_a_disk_that_fails_while_a_log_is_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "log").close()
    monkeypatch.setattr(host, "boot_id", lambda: "another boot")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError, match=r"/commit: the disk refused \(Input/output error\)"):
        kafkalog.open(tmp_path / "log")


def test_a_disk_that_cannot_be_read_while_a_log_is_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "log").close()

    def fail(fd: int, size: int, position: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match=r"/commit: the disk refused \(Input/output error\)"):
        kafkalog.open(tmp_path / "log")


def refuse_to_write(log: KafkaLog, reason: str) -> None:
    """Whatever writes ends with one typed error, which names a file of the log and the reason."""
    now_ms = clock.now_ms()
    acts: list[Callable[[], object]] = [
        lambda: log.append("t", [("k", "v")]),
        lambda: log.create_topic("u"),
        lambda: log.alter_topic("t", {"retention.ms": "1"}),
        lambda: log.delete_records("t", 0, 1),
        lambda: log.delete_topic("t"),
        lambda: log.append_raw("t", 0, b"\0" * 100),
    ]
    for act in acts:
        with pytest.raises(StorageError, match=rf"{log.root}/[^ ]+: .*{reason}"):
            act()
    for retained in directory_log_of(log).apply_retention(now_ms=now_ms + 10**12):
        assert retained.error is not None and reason in retained.error


def test_who_may_not_read_a_log_is_told_so(shared: Path) -> None:
    with umask(0o077):
        fill(shared / "whole").close()
    with umask(0o022):
        fill(shared / "segment").close()
        fill(shared / "journal").close()
    (shared / "journal" / layout.COMMIT).chmod(0o600)
    for path in (shared / "segment").rglob("*.log"):
        path.chmod(0o600)
    with as_nobody():
        with pytest.raises(StorageError, match=r"/whole/.*Permission denied"):
            kafkalog.open(shared / "whole")
        with pytest.raises(StorageError, match=r"/commit: cannot be opened: Permission denied"):
            kafkalog.open(shared / "journal")
        with pytest.raises(StorageError, match=r"\.log: cannot be opened: Permission denied"):
            records(kafkalog.open(shared / "segment"), "t")


def test_a_place_that_may_not_be_looked_into_is_named_to_whoever_asks(shared: Path) -> None:
    with umask(0o077):
        fill(shared / "whole" / "log").close()
    path = shared / "whole" / "log"
    asked: list[Callable[[], object]] = [
        lambda: kafkalog.open(path),
        lambda: kafkalog.open(path, read_only=True),
        lambda: kafkalog.open(f"{path},{path}2"),
        lambda: kafkalog.open(shared / "whole" / "new"),
        lambda: address.log_directories({"path": str(path)}),
        lambda: shared_log(path),
        lambda: shared_readable(path, read_only=True),
    ]
    with as_nobody():
        for ask in asked:
            with pytest.raises(StorageError, match=r"/whole/.* cannot be looked at: Permission"):
                ask()


# --- a file system that is only read -------------------------------------------------------------


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_on_a_read_only_file_system_is_read_in_every_way(
    tmp_path: Path, read_only: bool
) -> None:
    with disk(tmp_path / "mounted", "size=16m") as mounted:
        root = mounted.path / "log"
        log = fill(root)
        log.clean("t")
        expected, latest = records(log, "t"), latest_records(log, "t")
        log.close()
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        mounted.remount("ro")
        log = kafkalog.open(root, read_only=read_only)
        assert records(log, "t") == expected
        assert latest_records(log, "t") == latest
        found = log.lookup("t", "k3")
        assert found is not None and found.value == latest[b"k3"]
        assert log.offset_for_time("t", 0)[0] is not None
        assert len(log.status()) == len(log.explain("t")) == 2
        assert damage(root) == []
        assert (
            pins.pin(root, pins.Action("a", "b"), directory_log_of(log).state, clock.now_ms())
            is None
        )
        with pytest.raises(KafkaLogError, match=r"may not be written|opened read-only"):
            log.clean("t", force=True)
        with pytest.raises(StorageError, match="may not be written"):
            kafkalog.open(root, cleaner=True)
        if read_only:
            with pytest.raises(InvalidInputError, match="opened read-only"):
                log.append("t", [("k", "v")])
        else:
            refuse_to_write(log, "Read-only file system")
        with pytest.raises(StorageError, match="Read-only file system"):
            kafkalog.open(mounted.path / "new")
        log.close()
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


# --- links and paths that lead elsewhere ---------------------------------------------------------


def test_a_log_has_one_lock_whatever_path_leads_to_it(tmp_path: Path) -> None:
    log = fill(tmp_path / "log")
    (tmp_path / "link").symlink_to(tmp_path / "log")
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "link", tmp_path / "other" / ".." / "log"):
        other = kafkalog.open(path)
        assert records(other, "t") == records(log, "t")
        with (
            directory_log_of(log).transaction(),
            directory_log_of(other)._commit_lock.exclusive(wait=False) as is_free,
        ):
            assert not is_free
        assert other.append("t", [("k", "v")]).rows == 1
        assert records(other, "t") == records(log, "t")


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory"])
def test_what_stands_where_a_partition_belongs_is_never_removed(tmp_path: Path, kind: str) -> None:
    log = kafkalog.open(tmp_path / "log")
    place, outside = tmp_path / "log" / "t-0", tmp_path / "outside"
    if kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(outside)
    if kind == "link":
        outside.mkdir()
    if place.is_dir():
        (place / "precious").write_text("mine")
    with pytest.raises(StorageError, match="t-0: the directory exists and is not a partition"):
        log.create_topic("t")
    assert not place.is_dir() or (place / "precious").read_text() == "mine"
    assert place.is_symlink() == ("link" in kind)
    assert log.topics() == []


def test_a_partition_that_was_moved_behind_a_link_works_and_only_the_link_is_deleted(
    tmp_path: Path,
) -> None:
    root = tmp_path / "log"
    log = fill(root)
    log.alter_topic("t", {"file.delete.delay.ms": "0"})
    shutil.move(root / "t-0", tmp_path / "moved")
    (root / "t-0").symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / "precious").write_text("mine")
    latest = latest_records(log, "t")
    assert [stats.error for stats in log.clean("t", force=True)] == [None, None]
    assert latest_records(log, "t") == latest
    log.delete_topic("t")
    assert not directory_log_of(log).state().deleting
    assert not [name for name in os.listdir(root) if name.startswith("t-")]
    assert (tmp_path / "moved" / "precious").read_text() == "mine"
    assert list((tmp_path / "moved").glob("*.log"))


def test_another_topics_directory_behind_a_link_is_not_written_to(tmp_path: Path) -> None:
    log = fill(tmp_path / "log")
    other = fill(tmp_path / "other")
    theirs = records(other, "t")
    for number in range(2):
        shutil.move(tmp_path / "log" / f"t-{number}", tmp_path / f"aside-{number}")
        (tmp_path / "log" / f"t-{number}").symlink_to(tmp_path / "other" / f"t-{number}")
    with pytest.raises(StorageError, match="the directory is of another topic"):
        log.append("t", [("k", "v")])
    log.delete_topic("t")
    assert records(other, "t") == theirs


OUTSIDE = [
    "../stolen/kl-x-0-0-0.staged",
    "{outside}/kl-x-0-0-0.staged",
    "t-0/../../stolen/kl-x-0-0-0.staged",
    "../kl-x-0-0-0.staged",
    "t-0/00000000000000000000.log",
    "commit",
    "..",
    "",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_message_that_names_another_file_than_a_staged_one_is_refused(
    tmp_path: Path, name: str
) -> None:
    log = fill(tmp_path / "log")
    before = records(log, "t")
    message = LogBuilder(log, now_ms=clock.now_ms()).stage(*FIVE, batch_id=1)
    (tmp_path / "stolen").mkdir()
    given = log.root / message.files[0].name
    place = tmp_path / "stolen" / "kl-x-0-0-0.staged"
    shutil.copy(given, place)
    shutil.copy(given, tmp_path / place.name)
    named = name.format(outside=tmp_path / "stolen")
    wrong = replace(message, files=(message.files[0]._replace(name=named),))
    as_segment = replace(wrong, runs=tuple(run._replace(is_segment=True) for run in wrong.runs))
    acts: list[Callable[[StagedMessage], object]] = [
        lambda given: directory_log_of(log).commit([given]),
        lambda given: directory_log_of(log).commit([replace(given, rows=0)]),
        lambda given: directory_log_of(log).abort([given]),
    ]
    for each in (wrong, as_segment):
        for act in acts:
            with pytest.raises(InvalidInputError, match="is not a staged file below the log"):
                act(each)
    assert place.exists() and (tmp_path / place.name).exists()
    assert records(log, "t") == before
    assert directory_log_of(log).commit([message]).rows == 5


@pytest.mark.parametrize("topic", ["../outside", "..", "/outside", "a/b"])
def test_a_message_of_a_topic_that_kafka_forbids_makes_no_directory(
    tmp_path: Path, topic: str
) -> None:
    log = fill(tmp_path / "log")
    message = LogBuilder(log, now_ms=clock.now_ms()).stage(*FIVE, batch_id=1)
    runs = tuple(Run(topic, 0, *run[2:]) for run in message.runs)
    create = NewTopic(1, {"cleanup.policy": "delete"})
    for ids in ({topic: ""}, {}):
        with pytest.raises(InvalidInputError):
            directory_log_of(log).commit(
                [replace(message, runs=runs, topic_ids=ids)], create=create
            )
    assert sorted(os.listdir(tmp_path)) == ["log"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/b", ".."])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_journal_whose_topics_lie_elsewhere_is_refused(
    tmp_path: Path, name: str, is_deleted: bool
) -> None:
    log = fill(tmp_path / "log")
    topic_id = log.describe("t").topic_id
    shutil.copytree(log.root / "t-0", tmp_path / "outside-0")
    state = State(1, 1, {name: TopicState(name, topic_id, {}, (PartitionState(),))})
    if is_deleted:
        state = State(1, 1, {}, deleting={topic_id: DeletedTopic(name, topic_id, 1, 0)})
    Journal.create(log.root / layout.COMMIT, state)
    with pytest.raises(CorruptJournalError, match="a topic's name"):
        kafkalog.open(log.root)
    assert (tmp_path / "outside-0").is_dir()
