"""What a process committed last it need not open, list and read again, unless others were there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.directory import kept_appenders
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from kafkalog.storage_engine.metadata import checkpoints
from tests.builders.log_contents import index_entries

NOW_MS = 1_700_000_000_000


class Noted(FileSystem):
    """Notes the names that are opened and the directories that are listed."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.listed: list[str] = []

    def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
        self.opened.append(Path(path).name)
        return super().open(path, flags, mode)

    def listdir(self, directory: Place) -> list[str]:
        self.listed.append(str(directory))
        return super().listdir(directory)


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", config={"index.interval.bytes": "0"})
    append(engine, 0)
    return engine


def append(engine: DirectoryLog, number: int, *, now_ms: int = NOW_MS) -> None:
    engine.append("t", [(f"k{number}", f"v{number}")], now_ms=now_ms + number)


def values(engine: DirectoryLog) -> list[bytes]:
    return [value for rows in engine.read("t", 0) for value in rows["value"].to_pylist()]


def log(engine: DirectoryLog) -> Path:
    return engine.root / "t-0" / layout.segment_file(0, layout.LOG)


def test_the_next_commit_opens_the_log_and_nothing_else_of_its_partition(
    engine: DirectoryLog,
) -> None:
    first = Noted()
    other = DirectoryLog(engine.root)
    with file_system.replaced(first):
        append(other, 1)
    assert layout.LEADER_EPOCH_CHECKPOINT in first.opened
    assert str(engine.root / "t-0") in first.listed
    again = Noted()
    with file_system.replaced(again):
        append(other, 2)
    assert layout.LEADER_EPOCH_CHECKPOINT not in again.opened
    assert str(engine.root / "t-0") not in again.listed
    assert values(engine) == [b"v0", b"v1", b"v2"]


def test_an_index_that_gets_no_entry_is_not_opened(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    append(engine, 0)
    system = Noted()
    with file_system.replaced(system):
        append(engine, 1)
    assert layout.segment_file(0, layout.LOG) in system.opened
    assert layout.segment_file(0, layout.INDEX) not in system.opened


def test_many_commits_have_the_index_entries_of_as_many_processes(
    engine: DirectoryLog, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for number in range(1, 6):
        append(engine, number)
    other = DirectoryLog(tmp_path_factory.mktemp("other"))
    other.create_topic("t", config={"index.interval.bytes": "0"})
    for number in range(6):
        append(DirectoryLog(other.root), number)
    assert index_entries(engine) == index_entries(other) != []


def test_commits_of_two_processes_follow_each_other(engine: DirectoryLog) -> None:
    other = DirectoryLog(engine.root)
    for number in range(1, 9):
        append(other if number % 3 else engine, number)
    assert values(engine) == [b"v%d" % number for number in range(9)]


def test_what_a_dead_process_left_in_a_known_partition_is_noticed(engine: DirectoryLog) -> None:
    with DirectoryLog(engine.root).transaction() as transaction:
        transaction.appender("t", 0, NOW_MS).roll()
    append(engine, 1)
    assert engine.describe("t").partitions[0].active_base == 1  # in the emptied file
    assert values(engine) == [b"v0", b"v1"]


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"torn")


def replace_by_copy(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        (layout.LOG, lengthen),
        (layout.LOG, replace_by_copy),
        *(
            (suffix, change)
            for suffix in (layout.INDEX, layout.TIME_INDEX)
            for change in (lengthen, Path.unlink)
        ),
    ],
)
def test_a_file_that_somebody_changed_is_looked_at_again(
    engine: DirectoryLog, suffix: str, change: Callable[[Path], None]
) -> None:
    append(engine, 1)
    change(log(engine).with_suffix(suffix))
    system = Noted()
    with file_system.replaced(system):
        append(engine, 2)
    assert layout.LEADER_EPOCH_CHECKPOINT in system.opened
    assert values(engine) == [b"v0", b"v1", b"v2"]


def test_a_known_partition_that_a_broker_has_loaded_is_not_written_to(engine: DirectoryLog) -> None:
    append(engine, 1)
    (engine.root / "t-0" / layout.CANARY).unlink()
    with pytest.raises(LockedByBrokerError, match="a Kafka broker has loaded this partition"):
        append(engine, 2)


def test_a_known_partition_that_is_now_of_another_topic_is_not_written_to(
    engine: DirectoryLog,
) -> None:
    append(engine, 1)
    metadata = engine.root / "t-0" / layout.PARTITION_METADATA
    metadata.write_bytes(checkpoints.partition_metadata("AAAAAAAAAAAAAAAAAAAAAA"))
    with pytest.raises(StorageError, match="is of another topic"):
        append(engine, 2)


def test_a_new_config_holds_for_a_known_partition(engine: DirectoryLog) -> None:
    engine.alter_topic("t", {"segment.bytes": "100"})
    append(engine, 1)
    assert len(list(log(engine).parent.glob("*.log"))) == 2


def test_only_so_many_partitions_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_appenders, "_KEPT_MAX", 2)
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", partitions=5)
    for _ in range(2):
        engine.append("t", [(f"k{number}", "v") for number in range(40)], now_ms=NOW_MS)
    assert engine._kept is not None and len(engine._kept._appenders) == 2
    assert sum(end for _, end in engine.offsets("t").values()) == 80
