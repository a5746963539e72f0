"""Whose a directory is: what is adopted, what is refused, and where no log is created."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import batch
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import values
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine.test_adopt import (
    ROW_MS,
    broker_partition,
    broker_root,
    give_back,
    take,
)

TOPIC_ID = "fHq_kc1HQBmiynnrtAlnIQ"


def everything(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def our_log(root: Path) -> Path:
    return LogBuilder(root).topic("empty").topic("t").append(("k", "v")).close()


def refused(root: Path, match: str, **options: object) -> None:
    before = everything(root)
    with pytest.raises(InvalidInputError, match=match):
        take(root, **options)
    assert everything(root) == before


# --- adopt ---------------------------------------------------------------------------------------


def test_a_directory_that_is_only_called_like_a_partition_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "dbus-1").mkdir()
    (tmp_path / "dbus-1" / "notes.log").write_text("no segment")
    refused(tmp_path, r"no meta\.properties.*0000\.log")


def test_of_a_copy_without_properties_only_directories_with_segments_are_taken(
    tmp_path: Path,
) -> None:
    broker_partition(tmp_path, "t-0", TOPIC_ID)
    (tmp_path / "dbus-1").mkdir()
    assert take(tmp_path).topics == ("t",)
    assert list((tmp_path / "dbus-1").iterdir()) == []
    assert len(values(tmp_path, partition=0)) == 80


def test_a_controllers_directory_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "meta.properties").write_text("node.id=1\n")
    metadata = tmp_path / "__cluster_metadata-0"
    metadata.mkdir()
    write_segment(metadata, 0, [batch(0, 1)])
    refused(tmp_path, "nothing to adopt.*controller")


@pytest.mark.parametrize("kind", ["missing", "empty", "wrong", "empty log"])
def test_what_is_not_metadata_is_refused(tmp_path: Path, kind: str) -> None:
    metadata = tmp_path / "metadata"
    if kind != "missing":
        metadata.mkdir()
    if kind == "wrong":
        broker_partition(metadata, "t-0", TOPIC_ID)
    if kind == "empty log":
        (metadata / "__cluster_metadata-0").mkdir()
    refused(broker_root(tmp_path), "no metadata log here", metadata=metadata)


@pytest.mark.parametrize(
    "given", [{"config": {"*": {"cleanup.policy": "compact"}}}, {"metadata": Path("/missing")}]
)
def test_a_second_adopt_says_that_it_set_nothing(tmp_path: Path, given: dict[str, object]) -> None:
    root = broker_root(tmp_path)
    take(root, config={"t": {"cleanup.policy": "delete"}})
    (notice,) = take(root, **given).notices
    assert "was not set; use `kafkalog topics alter`" in notice


# --- a journal that is gone ----------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_whose_journal_is_lost_says_so_and_can_be_adopted(
    tmp_path: Path, read_only: bool
) -> None:
    root = our_log(tmp_path / "log")
    (root / "commit").unlink()
    with pytest.raises(InvalidInputError, match=r"`commit` is missing.*copy.*kafkalog adopt"):
        DirectoryLog(root, read_only=read_only)
    with pytest.raises(InvalidInputError, match=r"`commit` is missing.*copy.*kafkalog adopt"):
        give_back(root)
    assert take(root).partitions == 2
    assert values(root, partition=0) == [b"v"]
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    give_back(root)
    take(root)
    (root / "commit").unlink()
    with pytest.raises(InvalidInputError, match=r"`commit` is missing.*finish a release"):
        DirectoryLog(root, read_only=read_only)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_log_that_was_released_says_so_and_can_be_adopted(
    tmp_path: Path, read_only: bool
) -> None:
    root = our_log(tmp_path / "log")
    give_back(root)
    with pytest.raises(InvalidInputError, match=r"was released.*kafkalog adopt"):
        DirectoryLog(root, read_only=read_only)
    assert take(root).partitions == 2
    assert values(root, partition=0) == [b"v"]


# --- a new log -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t-0", "new"])
@pytest.mark.parametrize("sign", ["commit", "meta.properties"])
def test_no_log_is_created_inside_of_another(tmp_path: Path, sign: str, name: str) -> None:
    root = our_log(tmp_path / "log")
    if sign == "meta.properties":
        (root / "commit").rename(root / sign)
    before = everything(root)
    with pytest.raises(InvalidInputError, match=f"inside of a log directory.*give {root}"):
        DirectoryLog(root / name)
    assert everything(root) == before


def test_no_log_is_created_among_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"not empty \(it has 'notes\.txt'\)"):
        DirectoryLog(tmp_path)
    assert list(everything(tmp_path)) == ["notes.txt"]


def test_a_new_disk_takes_a_log_and_a_log_any_files(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".hidden").touch()
    our_log(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert DirectoryLog(tmp_path).topics() == ["empty", "t"]


# --- a log that is closed ------------------------------------------------------------------------


def test_a_closed_log_is_read_and_not_written(tmp_path: Path) -> None:
    engine = DirectoryLog(our_log(tmp_path / "log"))
    engine.close()
    engine.close()
    for write in (
        lambda: engine.append("t", [(b"k", b"v")]),
        lambda: engine.create_topic("u"),
        lambda: engine.alter_topic("t", {"cleanup.policy": "delete"}),
        lambda: engine.delete_topic("t"),
        engine.apply_retention,
        lambda: engine.append_raw("t", 0, b""),
    ):
        with pytest.raises(InvalidInputError, match="the log is closed"):
            write()
    assert sum(rows.num_rows for rows in engine.read("t", 0)) == 1
    shutil.rmtree(tmp_path / "log")
    engine.close()
