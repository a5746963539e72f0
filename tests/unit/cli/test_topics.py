"""`topics`, `status`, `clean`: a log seen and kept from outside."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command


@pytest.fixture
def root(kafkalog: Command, tmp_path: Path) -> Path:
    root = tmp_path / "log"
    created = kafkalog("topics", "create", root, "t", "--partitions", 2, "--json")
    assert created.json[0]["config"] == {"cleanup.policy": "compact"}
    return root


def append(kafkalog: Command, root: Path, count: int = 20) -> None:
    records = "".join(f'{{"key":"{n % 3}","value":"{n}"}}\n' for n in range(count))
    assert kafkalog("append", root, "t", stdin=records.encode()).status == 0


def test_topics_are_listed_described_altered_and_deleted(kafkalog: Command, root: Path) -> None:
    config = ("--config", "segment.bytes=2000", "--config", "cleanup.policy=compact,delete")
    assert kafkalog("topics", "create", root, "u", *config).status == 0
    listed = kafkalog("topics", "list", root, "--json").json
    assert [(topic["topic"], len(topic["partitions"])) for topic in listed] == [("t", 2), ("u", 1)]
    assert listed[1]["config"] == {"segment.bytes": "2000", "cleanup.policy": "compact,delete"}
    altered = kafkalog("topics", "alter", root, "u", "--config", "segment.bytes=9000", "--json")
    assert altered.json[0]["config"]["segment.bytes"] == "9000"
    (described,) = kafkalog("topics", "describe", root, "u", "--json").json
    assert described == altered.json[0]
    assert described["partitions"][0]["highWatermark"] == 0
    deleted = kafkalog("topics", "delete", root, "u", "--json")
    assert deleted.json == altered.json
    assert len(kafkalog("topics", "list", root).lines) == 2
    assert kafkalog("topics", "describe", root, "u").status == 2


def test_the_list_has_sizes_and_counts(kafkalog: Command, root: Path) -> None:
    append(kafkalog, root, 20)
    (topic,) = kafkalog("topics", "list", root, "--json").json
    logs = sum(path.stat().st_size for path in root.rglob("*.log"))
    assert (topic["offsets"], topic["bytes"]) == (20, logs)
    assert kafkalog("topics", "list", root).lines[1].split()[:4] == ["t", "2", "20", str(logs)]


def test_a_topic_that_exists_can_be_left_as_it_is(kafkalog: Command, root: Path) -> None:
    again = ("topics", "create", root, "t", "--if-not-exists", "--partitions", 5, "--json")
    (topic,) = kafkalog(*again).json
    assert len(topic["partitions"]) == 2
    assert kafkalog("topics", "create", root, "t").status == 2


def test_configs_are_deleted_and_partitions_added(kafkalog: Command, root: Path) -> None:
    settings = ("--config", "cleanup.policy=delete", "--config", "retention.ms=1d")
    created = kafkalog("topics", "create", root, "d", *settings)
    assert "retention.ms=1d" in created.lines[0]
    both = ("--delete-config", "retention.ms", "--partitions", 3, "--json")
    altered = kafkalog("topics", "alter", root, "d", *both)
    assert altered.err == (
        "d: keys go to 3 partitions from now on, and old records stay where 1 partition had them\n"
    )
    assert altered.json[0]["config"] == {"cleanup.policy": "delete"}
    assert len(altered.json[0]["partitions"]) == 3
    refused = kafkalog("topics", "alter", root, "t", "--partitions", 3)
    assert (refused.status, "--keys-may-move" in refused.err) == (2, True)
    assert kafkalog("topics", "alter", root, "t", "--partitions", 3, "--keys-may-move").status == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "t"),
        ("create", "a/b"),
        ("create", "v", "--config", "segment.byte=1"),
        ("create", "v", "--config", "segment.bytes"),
        ("create", "v", "--partitions", "0"),
        ("alter", "t"),
        ("alter", "t", "--partitions", "1"),
        ("alter", "t", "--delete-config", "retention.ms"),
        ("alter", "t", "--delete-config", "segment.bytes", "--config", "segment.bytes=99"),
        ("create", "v", "--config", "retention.ms=1y"),
        ("alter", "t", "--config", "segment.bytes=x"),
        ("alter", "none", "--config", "segment.bytes=2000"),
        ("delete", "none"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    kafkalog: Command, root: Path, arguments: tuple[str, ...]
) -> None:
    verb, name, *rest = arguments
    result = kafkalog("topics", verb, root, name, *rest)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("kafkalog: ")
    assert result.err.count("\n") == 1


def test_only_create_makes_a_log(kafkalog: Command, tmp_path: Path) -> None:
    for verb in ("list", "status", "clean", "verify", "append", "read"):
        arguments = ("topics", verb, tmp_path / "x") if verb == "list" else (verb, tmp_path / "x")
        result = kafkalog(*arguments, *(("t",) if verb in ("append", "read") else ()))
        assert (result.status, result.err.count("\n")) == (2, 1), verb
    assert not (tmp_path / "x").exists()


def test_status_tells_log_writers_and_partitions(kafkalog: Command, root: Path) -> None:
    from kafkalog.storage_engine.metadata.writer import Writer

    append(kafkalog, root)
    with DirectoryLog(root) as engine:
        staged = LogBuilder(engine).stage(("k", "v"), in_memory=True)
        engine.commit([staged], writer=Writer("query", "t", 4), now_ms=4_000_000_000_000)
    kinds: dict[str, list[dict[str, object]]] = {}
    for row in kafkalog("status", root, "--json").json:
        kinds.setdefault(str(row["type"]), []).append(row)
    (log_row,) = kinds["log"]
    assert (log_row["owner"], log_row["running"], log_row["locks"]) == ("kafkalog", False, True)
    (writer,) = kinds["writer"]
    assert writer == {
        "type": "writer",
        "writer": "query",
        "topic": "t",
        "batchId": 4,
        "rows": 1,
        "timeMs": 4_000_000_000_000,
    }
    assert sum(int(str(row["highWatermark"])) for row in kinds["partition"]) == 21
    assert {row["state"] for row in kinds["partition"]} == {"not due"}
    text = kafkalog("status", root).lines
    assert text[0] == f"{root}  owner: kafkalog  locks: work  cleaner: none"
    assert text[-2].split()[:2] == ["t", "0"]
    assert kafkalog("status", root, "none").status == 2


def test_a_partition_that_cannot_be_read_is_a_row_with_its_reason(
    kafkalog: Command, root: Path
) -> None:
    append(kafkalog, root)
    shutil.rmtree(root / "t-0")
    (root / "t-0").write_text("a file")
    result = kafkalog("status", root, "--json")
    rows = [row for row in result.json if row["type"] == "partition"]
    assert result.status == 0
    assert [row["state"] for row in rows] == ["uncleanable", "not due"]
    assert "t-0" in rows[0]["reason"]


def test_clean_cleans_what_is_due_or_all_of_it(kafkalog: Command, root: Path) -> None:
    assert kafkalog("clean", root).err == "nothing to clean\n"
    append(kafkalog, root)
    assert kafkalog("clean", root).err == "nothing to clean\n"
    cleaned = kafkalog("clean", root, "t", "--force", "--json").json
    assert sum(stats["recordsKept"] for stats in cleaned) == 3
    assert len(kafkalog("read", root, "t").lines) == 3
    append(kafkalog, root)
    assert kafkalog("clean", root, "--force").lines[0].split()[:2] == ["topic", "partition"]


def test_a_partition_that_cannot_be_cleaned_makes_status_1(kafkalog: Command, root: Path) -> None:
    kafkalog("topics", "alter", root, "t", "--config", "segment.bytes=200")
    for _ in range(5):
        append(kafkalog, root)
    path = min(path for path in (root / "t-0").glob("*.log") if path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    result = kafkalog("clean", root, "--force")
    assert result.status == 1
    assert result.err == "kafkalog: t-0 was not cleaned, for the reasons above\n"
    assert result.lines[0].split()[-1] == "error"
    assert path.name in result.lines[1]
    rows = kafkalog("status", root, "--json").json
    states = {row["partition"]: row for row in rows if row["type"] == "partition"}
    assert states[0]["state"] == "uncleanable"
    assert path.name in states[0]["reason"]


@pytest.mark.parametrize("option", [[], ["--force"]])
def test_a_lost_partition_is_not_cleaned_and_is_reported_once(
    kafkalog: Command, root: Path, option: list[str]
) -> None:
    append(kafkalog, root)
    shutil.rmtree(root / "t-0")
    result = kafkalog("clean", root, *option, "--json")
    assert (result.status, result.err.count("\n")) == (1, 1)
    assert "No such file" in next(row["error"] for row in result.json if row["partition"] == 0)


def test_only_what_nobody_expects_is_logged_with_a_traceback(
    kafkalog: Command,
    root: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import kafkalog as library
    from kafkalog.cleaner.schedule import partition_cleaner

    def fail(fault: Exception) -> logging.LogRecord:
        def refuse(*_: object, **__: object) -> None:
            raise fault

        caplog.clear()
        append(kafkalog, root)
        monkeypatch.setattr(partition_cleaner, "clean_round", refuse)
        with library.open(root) as log:
            assert log.clean("t", force=True)[0].error is not None
        return caplog.records[0]

    for fault in (OSError(errno.ENOSPC, "No space", "/x"), StorageError("x")):
        record = fail(fault)
        assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    record = fail(ZeroDivisionError("x"))
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_rows_of_json_have_names_in_camel_case(kafkalog: Command, root: Path) -> None:
    append(kafkalog, root)
    rows = [
        *kafkalog("clean", root, "--force", "--json").json,
        *kafkalog("status", root, "--json").json,
        *kafkalog("topics", "list", root, "--json").json,
    ]
    names = {name for row in rows for name in row}
    assert [name for name in names if "_" in name or name == "time"] == []


def test_a_file_system_without_locks_is_reported(kafkalog: Command, root: Path) -> None:
    append(kafkalog, root)

    class Lockless(FileSystem):
        def flock(self, fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with file_system.replaced(Lockless()):
        result = kafkalog("status", root, "--json")
    assert result.status == 0
    reason = "this file system has no locks (No locks available)"
    assert result.json[0]["locks"] is False
    assert result.json[0]["locksReason"] == f"{root}: {reason}"
    partitions = [row for row in result.json if row["type"] == "partition"]
    assert {row["state"] for row in partitions} == {"not due"}
    (cleaner,) = (row for row in result.json if row["type"] == "cleaner")
    assert cleaner["running"] is False
