"""Opening, topics, configs: bad input is named, nothing is lost."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.metadata import checkpoints, directory_signs
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.place import open_log
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.storage_engine.faults import Died


def test_a_path_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(InvalidInputError, match="a log is a directory, this is a file"):
        DirectoryLog(path)


@pytest.mark.parametrize("path", ["file:///log", ["/log", "gs://bucket"], "hdfs://host/log"])
def test_a_url_is_not_a_directory(
    path: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="a log directory has no URL"):
        open_log(path)
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="the log's directory cannot be created"):
        DirectoryLog(tmp_path / "file" / "log")


@pytest.mark.parametrize("partitions", [0, -1, 2**31 - 1])
def test_a_number_of_partitions_out_of_range_is_an_error(
    place: Path | str, partitions: int
) -> None:
    with pytest.raises(InvalidInputError, match=f"partitions, found {partitions}"):
        open_log(place).create_topic("t", partitions)


def test_a_directory_without_a_log_is_not_opened_read_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no log here"):
        DirectoryLog(tmp_path, read_only=True)


@pytest.mark.parametrize("options", [{"read_only": True}, {"create": False}])
def test_who_may_create_no_log_creates_none_where_one_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    DirectoryLog(tmp_path / "log").close()
    check = directory_signs.check_is_log

    def checked(root: Path) -> None:
        check(root)
        shutil.rmtree(root)

    monkeypatch.setattr(directory_signs, "check_is_log", checked)
    with contextlib.suppress(KafkaLogError, OSError):
        DirectoryLog(tmp_path / "log", **options).close()
    assert not (tmp_path / "log").exists()


def test_who_opens_a_partition_is_told_the_log(tmp_path: Path) -> None:
    DirectoryLog(tmp_path / "log").create_topic("t")
    with pytest.raises(InvalidInputError, match=f"partition t-0 of the log in {tmp_path / 'log'}"):
        DirectoryLog(tmp_path / "log" / "t-0", read_only=True)


def test_a_directory_of_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    with pytest.raises(InvalidInputError, match="the directory is not empty"):
        DirectoryLog(tmp_path)


def test_a_brokers_directory_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / layout.META_PROPERTIES).write_text("version=1\n")
    engine = DirectoryLog(tmp_path)
    with pytest.raises(InvalidInputError, match="a Kafka broker's log directory is only read"):
        engine.create_topic("t")
    assert [path.name for path in tmp_path.iterdir()] == [layout.META_PROPERTIES]


def test_a_topic_is_there_for_every_process(place: Path | str) -> None:
    topic = open_log(place).create_topic("t", 3, {"segment.bytes": "1000"})
    assert len(topic.topic_id) == 22
    assert open_log(place).describe("t") == topic
    assert topic.config == {"cleanup.policy": "compact", "segment.bytes": "1000"}


def test_a_partition_directory_carries_kafkas_metadata(tmp_path: Path) -> None:
    topic = DirectoryLog(tmp_path).create_topic("t")
    directory = tmp_path / "t-0"
    assert checkpoints.read_topic_id(directory) == topic.topic_id
    assert (directory / layout.CANARY).exists()
    text = (directory / layout.PARTITION_METADATA).read_text()
    assert text == f"version: 0\ntopic_id: {topic.topic_id}"


def test_the_first_append_notes_the_leader_epoch(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    engine.append("t", [("k", "v")])
    assert (tmp_path / "t-0" / layout.LEADER_EPOCH_CHECKPOINT).read_text() == "0\n1\n0 0\n"


def test_close_writes_kafkas_root_checkpoints(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t")
        engine.append("t", [("k", "v")] * 4)
    assert (tmp_path / layout.REPLICATION_CHECKPOINT).read_text() == "0\n1\nt 0 4\n"
    assert (tmp_path / layout.CLEANER_CHECKPOINT).read_text() == "0\n0\n"


def test_an_existing_topic_is_not_created_again(place: Path | str) -> None:
    engine = open_log(place)
    topic = engine.create_topic("t")
    with pytest.raises(InvalidInputError, match=r"'t' exists already\. .* --if-not-exists"):
        engine.create_topic("t")
    assert engine.create_topic("t", 9, exist_ok=True) == topic


def test_a_directory_left_by_a_creation_that_died_is_replaced(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    with pytest.raises(RuntimeError), engine.transaction() as transaction:
        transaction.create_topic("t", NewTopic(2, {}))
        raise RuntimeError
    assert (tmp_path / "t-1").exists()
    assert engine.topics() == []
    engine.create_topic("t", 2)
    engine.append("t", [("k", "v")])


def test_a_creation_that_died_with_records_written_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewTopic(2, {"cleanup.policy": "compact"})
    rows = pa.RecordBatch.from_pydict(
        {"key": pa.array([b"k"], pa.binary()), "value": pa.array([b"v"], pa.binary())}
    )

    def commit() -> None:
        engine = DirectoryLog(tmp_path)
        writer = StagedWriter(engine, engine.state(), now_ms=lambda: 1, new_topic=new)
        writer.append("t", rows)
        engine.commit([writer.finish()], writer=Writer("query", "t", 0), create=new)

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(Journal, "append", raise_died)
        commit()
    assert any(path.stat().st_size for path in tmp_path.glob("t-*/*.log"))
    commit()
    assert sum(end for _, end in DirectoryLog(tmp_path).offsets("t").values()) == 1
    assert not list(tmp_path.glob(f"t-*/{layout.UNRECORDED}"))


def raise_died(*args: object, **kwargs: object) -> None:
    raise Died


def test_every_directory_on_the_way_to_a_new_log_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has made it: it may have died before. As far as its disk goes."""
    (tmp_path / "a").mkdir()
    synced: set[Path] = set()
    monkeypatch.setattr(files, "sync_directory", lambda path: synced.add(path.resolve()))
    root = tmp_path / "a" / "b"
    DirectoryLog(root)
    mount = next(path for path in root.parents if path.is_mount())
    assert synced == {root, *(path for path in root.parents if path.is_relative_to(mount))}


def test_a_directory_with_records_is_never_replaced(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / layout.segment_file(0, layout.LOG)).write_bytes(b"records of a broker")
    with pytest.raises(StorageError, match="is not a partition of this log"):
        engine.create_topic("t")


def test_a_creation_that_died_and_whose_removal_died_too_is_done_again(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    (tmp_path / "t-0").mkdir()
    for name in (layout.UNRECORDED, "leader-epoch-checkpoint.tmp"):
        (tmp_path / "t-0" / name).touch()
    assert engine.create_topic("t")


@pytest.mark.parametrize(
    "act",
    [
        lambda log: log.create_topic("x", "2"),
        lambda log: log.create_topic("x", 1.5),
        lambda log: log.alter_topic("t", partitions="2"),
        lambda log: log.alter_topic("t", partitions=2.5),
        lambda log: [*log.read("t", "0")],
        lambda log: [*log.read("t", True)],
        lambda log: [*log.read("t", 0, "0")],
        lambda log: [*log.read("t", 0, 0, 1.0)],
        lambda log: log.offset_for_time("t", datetime.now(UTC)),
        lambda log: log.delete_records("t", "0", 0),
        lambda log: log.delete_records("t", 0, 1.0),
    ],
)
def test_what_is_not_a_whole_number_is_refused(
    place: Path | str, act: Callable[[Log], object]
) -> None:
    log = open_log(place)
    log.create_topic("t", config={"cleanup.policy": "delete"})
    log.append("t", [("a", "1")])
    assert log.delete_records("t", np.int64(0), np.int64(1)) == 1
    assert len(log.create_topic("u", np.int64(2)).partitions) == 2
    assert len(log.alter_topic("u", partitions=np.int64(3), keys_may_move=True).partitions) == 3
    with pytest.raises(InvalidInputError, match=": expected a whole number, found"):
        act(log)
    assert log.topics() == ["t", "u"]


def test_one_name_alone_is_not_a_list_of_columns(place: Path | str) -> None:
    log = open_log(place)
    log.create_topic("t")
    with pytest.raises(InvalidInputError, match="expected several names, found the text 'key'"):
        [*log.read("t", 0, columns="key")]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 250, "ä", None])
def test_a_name_that_kafka_forbids_is_an_error(place: Path | str, name: Any) -> None:
    with pytest.raises(InvalidInputError, match="is not allowed"):
        open_log(place).create_topic(name)


def test_kafkas_own_topics_are_not_created(place: Path | str) -> None:
    with pytest.raises(InvalidInputError, match="belongs to Kafka itself"):
        open_log(place).create_topic("__consumer_offsets")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"segment.byte": "1000"},
            "unknown topic config 'segment.byte'; did you mean segment.bytes",
        ),
        ({"min.insync.replicas": "1"}, "min.insync.replicas has no effect here: .* no replicas"),
        ({"remote.storage.enable": "true"}, "has no effect here: there is no tiered storage"),
        ({"max.decompressed.message.bytes": "9"}, "no batch is decompressed past 256 MiB"),
        ({"message.downconversion.enable": "true"}, "has no effect here: batches are always read"),
        ({"retention.ms": "-2"}, r"retention.ms: expected a whole number in \[-1, "),
        ({"retention.bytes": str(2**63)}, r"retention.bytes: expected a whole number in \[-9223"),
        ({"message.timestamp.before.max.ms": "-1"}, r"before.max.ms: expected .* in \[0, "),
        ({"message.timestamp.after.max.ms": "-1"}, r"after.max.ms: expected .* in \[0, "),
        ({"preallocate": "maybe"}, "preallocate: expected true or false, found 'maybe'"),
        ({"segment.index.bytes": "3"}, r"segment.index.bytes: expected .* in \[4, 2147483647\]"),
        ({"internal.segment.bytes": "13"}, r"internal.segment.bytes: expected .* in \[14, "),
        ({"cleanup.policy": "delete,delete"}, "cleanup.policy: expected compact, delete"),
        ({"segment.bytes": "13"}, r"segment.bytes: expected a whole number in \[14, 2147483647\]"),
        ({"segment.bytes": "many"}, "segment.bytes: expected a whole number"),
        ({"cleanup.policy": "squash"}, "cleanup.policy: expected compact, delete"),
        ({"min.cleanable.dirty.ratio": "1.5"}, r"expected a number in \[0, 1\], found '1.5'"),
        ({"compression.type": "brotli"}, "expected one of uncompressed, gzip"),
        (
            {"min.compaction.lag.ms": "9", "max.compaction.lag.ms": "8"},
            "must not exceed max.compaction.lag.ms",
        ),
    ],
)
def test_a_bad_config_names_the_config_and_its_range(
    place: Path | str, config: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_log(place).create_topic("t", 1, config)
    assert open_log(place).topics() == []


def test_a_config_that_is_a_number_is_kept_as_text(place: Path | str) -> None:
    engine = open_log(place)
    given: dict[str, Any] = {"segment.bytes": 1000, "preallocate": False}
    engine.create_topic("t", 1, given)
    ratio: dict[str, Any] = {"min.cleanable.dirty.ratio": 0.25}
    engine.alter_topic("t", ratio)
    kept = open_log(place).describe("t").config
    assert kept == {
        "cleanup.policy": "compact",
        "segment.bytes": "1000",
        "preallocate": "false",
        "min.cleanable.dirty.ratio": "0.25",
    }


def test_a_number_that_an_early_release_kept_as_a_config_is_read_as_text() -> None:
    change = {"topics": {"t": {"id": "A" * 22, "partitions": 1, "config": {"segment.ms": 5}}}}
    assert State().apply(1, change).topic("t").config == {"segment.ms": "5"}


def test_configs_that_are_not_given_are_kafkas() -> None:
    config = TopicConfig.parse({})
    assert config.cleanup_policy == {"delete"}
    assert (config.retention_ms, config.retention_bytes) == (604_800_000, -1)
    assert config.message_timestamp_before_max_ms == 2**63 - 1
    assert config.message_timestamp_after_max_ms == 3_600_000
    assert config.preallocate is False


def test_internal_segment_bytes_overrides_segment_bytes() -> None:
    config = TopicConfig.parse({"internal.segment.bytes": "100", "segment.bytes": "5000"})
    assert config.segment_bytes == 100


def test_an_empty_policy_means_no_cleanup_at_all(place: Path | str) -> None:
    engine = open_log(place)
    engine.create_topic("t", 1, {"cleanup.policy": "", "preallocate": "false"})
    config = TopicConfig.parse(engine.describe("t").config)
    assert not config.is_compacted and not config.is_deleted


def test_a_config_is_altered_for_every_process(place: Path | str) -> None:
    engine = open_log(place)
    engine.create_topic("t", 1, {"segment.bytes": "1000"})
    engine.append("t", [("k", "v")])
    engine.alter_topic("t", {"segment.bytes": "2000", "segment.ms": "5"})
    described = open_log(place).describe("t")
    assert described.config["segment.bytes"] == "2000"
    assert described.partitions[0].high_watermark == 1


def test_an_unknown_topic_is_named_with_those_there_are(place: Path | str) -> None:
    engine = open_log(place)
    engine.create_topic("a")
    with pytest.raises(UnknownTopicError, match="the topics of this log are: a"):
        engine.offsets("b")


def test_a_read_only_log_is_not_written(place: Path | str) -> None:
    open_log(place).create_topic("t")
    with pytest.raises(InvalidInputError, match="opened read-only"):
        open_log(place, read_only=True).append("t", [("k", "v")])


def test_a_record_above_max_message_bytes_is_an_error(place: Path | str) -> None:
    engine = open_log(place)
    engine.create_topic("t", 1, {"max.message.bytes": "1000"})
    with pytest.raises(InvalidInputError, match=r"max\.message\.bytes"):
        engine.append("t", [("k", "v" * 2000)])
    assert engine.offsets("t") == {0: (0, 0)}


HEAVY = """
import sys
import kafkalog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
engine = DirectoryLog(sys.argv[1])
engine.create_topic("t", 1, exist_ok=True)
engine.offsets("t")
engine.commit([])
print(sorted({"pyarrow", "pyspark", "numpy"} & set(sys.modules)))
"""


def test_opening_planning_and_committing_import_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HEAVY, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_tasks_of_a_process_read_an_unchanged_journal_once(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        states = []
        for _ in range(2):
            with ReadableDirectory(tmp_path, read_only=True, create=False, is_task=True) as store:
                states.append(store.state())
        assert states[0] is states[1]
        engine.append("t", [("k", "v")])
        with ReadableDirectory(tmp_path, read_only=True, create=False, is_task=True) as store:
            assert store.describe("t").partitions[0].high_watermark == 1
