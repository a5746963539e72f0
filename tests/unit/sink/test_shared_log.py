"""All writes of a process share one log."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.sink import shared_log as shared_logs
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.ownership import adopt, release

NOW_MS = 1_700_000_000_000


def test_an_engine_is_shared_and_sees_what_others_commit(tmp_path: Path) -> None:
    engine = shared_log(tmp_path / "log")
    assert shared_log(tmp_path / "log") is engine
    DirectoryLog(tmp_path / "log").create_topic("t")
    assert list(engine.state().topics) == ["t"]


def test_a_task_creates_no_log(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no log here"):
        shared_readable(tmp_path / "log", read_only=True)
    assert not (tmp_path / "log").exists()


def test_a_log_that_was_removed_and_made_anew_is_another_one(tmp_path: Path) -> None:
    shared_log(tmp_path / "log").create_topic("old")
    shutil.rmtree(tmp_path / "log")
    assert list(shared_log(tmp_path / "log").state().topics) == []
    DirectoryLog(tmp_path / "log").create_topic("new")
    assert list(shared_readable(tmp_path / "log", read_only=True).state().topics) == ["new"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_copy_that_is_put_back_and_goes_on_otherwise_is_read_anew(
    tmp_path: Path, read_only: bool
) -> None:
    """The records of the two histories are of the same sizes, and the journal's generation too."""
    root, copy = tmp_path / "log", tmp_path / "copy"
    DirectoryLog(root).create_topic("t")
    shutil.copytree(root, copy)
    DirectoryLog(root).create_topic("gone")
    assert sorted(shared_readable(root, read_only=read_only).state().topics) == ["gone", "t"]
    root.rename(tmp_path / "aside")
    copy.rename(root)
    for name in ("here", "also"):
        DirectoryLog(root).create_topic(name)
    assert sorted(shared_readable(root, read_only=read_only).state().topics) == [
        "also",
        "here",
        "t",
    ]


def test_a_topic_that_was_deleted_and_made_anew_is_another_one(tmp_path: Path) -> None:
    engine = shared_log(tmp_path)
    first = engine.create_topic("t").topic_id
    other = DirectoryLog(tmp_path)
    other.delete_topic("t")
    other.create_topic("t")
    for read_only in (False, True):
        assert shared_readable(tmp_path, read_only=read_only).state().topic("t").topic_id != first


def test_a_log_that_goes_to_a_broker_and_comes_back_is_never_taken_for_the_other(
    tmp_path: Path,
) -> None:
    root = tmp_path / "log"
    shared_log(root).create_topic("t", config={"cleanup.policy": "delete"})
    shared_readable(root, read_only=True)
    properties = tmp_path / "meta.properties"
    properties.write_text("version=1\nnode.id=1\ndirectory.id=KNYotSM8TtH2azTN1QdKRg\n")
    release.release(root, meta_properties=properties, now_ms=NOW_MS)
    for read_only in (False, True):
        assert shared_readable(root, read_only=read_only).is_brokers
    with pytest.raises(InvalidInputError, match="only read"):
        shared_log(root).append("t", [("k", "v")])
    adopt.adopt(root, now_ms=NOW_MS, config={"*": {}})
    for read_only in (False, True):
        assert not shared_readable(root, read_only=read_only).is_brokers
    shared_log(root).append("t", [("k", "v")])


def test_a_reader_is_shared_also_while_a_topic_is_being_deleted(tmp_path: Path) -> None:
    shared_log(tmp_path).create_topic("t")
    DirectoryLog(tmp_path).delete_topic("t")
    assert shared_readable(tmp_path, read_only=True) is shared_readable(tmp_path, read_only=True)
    assert shared_log(tmp_path) is not shared_log(tmp_path)


def test_engines_are_not_kept_without_end(tmp_path: Path) -> None:
    for number in range(20):
        shared_log(tmp_path / str(number))
    assert len(shared_logs._opened) <= shared_logs._OPENED_MAX


def test_a_forked_process_goes_on_with_an_engine_of_its_parent(tmp_path: Path) -> None:
    engine = shared_log(tmp_path)
    engine.create_topic("t", config={"cleanup.policy": "delete"})
    engine.append("t", [("k", "v")])
    with engine.transaction():  # the parent holds the commit lock, and lets go of it alone
        child = os.fork()
        if child == 0:
            try:
                shared_log(tmp_path).append("t", [("k", "w")])
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared_log(tmp_path).offsets("t") == {0: (0, 2)}
