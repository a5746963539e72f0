"""`kafkalog status --checkpoint`: checkpoints as Spark writes them."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from kafkalog.datasource.checkpoint import read_checkpoint
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import at_times, joined
from tests.unit.cli.conftest import Command
from tests.unit.datasource.logs import append_to
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import BrokerRoot

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1502872590006,"conf":{"a":"b"}}'


def batch(checkpoint: Path, number: int, *sources: str, committed: bool = True) -> None:
    """Write a batch as Spark's OffsetSeqLog does."""
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text('{"id":"6a1c2ae8-0000"}')
    lines = "\n".join(["v1", METADATA, *sources])
    (checkpoint / "offsets" / str(number)).write_text(lines)
    (checkpoint / "offsets" / f".{number}.crc").write_bytes(b"crc")
    if committed:
        (checkpoint / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')


@pytest.fixture
def log(tmp_path: Path) -> Path:
    root = tmp_path / "log"
    append_to(root, "t", {0: 10, 1: 4})
    append_to(root, "u", {0: 3})
    return root


def test_the_lag_is_told_by_source_and_partition(
    kafkalog: Command, log: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    batch(checkpoint, 9, '{"t": {"0": 1}}', '{"u": {"0": 0}}')
    batch(checkpoint, 10, '{"t": {"0": 7, "1": 4}}', '{"u": {"0": 3}}')

    result = kafkalog("status", log, "--checkpoint", checkpoint, "--json")

    query, *rows = result.json
    assert result.status == 0
    assert (query["queryId"], query["committedBatch"], query["plannedBatch"]) == (
        *("6a1c2ae8-0000", 10, 10),
    )
    assert [(r["source"], r["topic"], r["partition"], r["lag"], r["state"]) for r in rows] == [
        ("0", "t", 0, 3, "behind"),
        ("0", "t", 1, 0, "up to date"),
        ("1", "u", 0, 0, "up to date"),
    ]
    table = kafkalog("status", log, "--checkpoint", checkpoint).lines
    assert table[0] == "query 6a1c2ae8-0000  last batch: 10"
    assert table[2].split()[:3] == ["source", "topic", "partition"]
    assert table[3].split() == ["0", "t", "0", "7", "10", "10", "3", "behind"]
    assert len(kafkalog("status", log, "u", "--checkpoint", checkpoint, "--json").json) == 2


def test_the_lag_on_a_log_in_an_object_store_is_told_too(kafkalog: Command, tmp_path: Path) -> None:
    url, checkpoint = f"memory://{secrets.token_hex(4)}", tmp_path / "checkpoint"
    append_to(url, "t", {0: 10})
    batch(checkpoint, 3, '{"t": {"0": 7}}')

    query, row = kafkalog("status", url, "--checkpoint", checkpoint, "--json").json

    assert query["committedBatch"] == 3
    assert (row["nextOffset"], row["lag"], row["state"]) == (7, 3, "behind")


def test_a_batch_that_runs_is_not_counted_as_read(
    kafkalog: Command, log: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    batch(checkpoint, 0, '{"t":{"0":5,"1":4}}', "-")
    batch(checkpoint, 1, '{"t":{"0":10,"1":4}}', '{"u":{"0":3}}', committed=False)

    rows = kafkalog("status", log, "--checkpoint", f"file://{checkpoint}", "--json").json[1:]

    assert [
        (r["topic"], r["nextOffset"], r["plannedOffset"], r["lag"], r["state"]) for r in rows
    ] == [
        ("t", 5, 10, 5, "behind"),
        ("t", 4, 4, 0, "up to date"),
        ("u", None, 3, 3, "unread"),
    ]
    assert kafkalog("status", log, "--checkpoint", checkpoint).lines[0].endswith("begun: 1")


def test_what_a_query_will_not_find_is_told(kafkalog: Command, log: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    batch(checkpoint, 0, '{"gone":{"0":1},"t":{"0":12,"7":1},"u":{"0":1}}')
    with DirectoryLog(log) as engine:
        engine.alter_topic("u", {"cleanup.policy": "delete"})
        engine.delete_records("u", 0, 2)

    rows = kafkalog("status", log, "--checkpoint", checkpoint, "--json").json[1:]

    assert [(r["topic"], r["partition"], r["state"]) for r in rows] == [
        ("gone", 0, "gone"),
        ("t", 0, "beyond the end"),
        ("t", 7, "gone"),
        ("u", 0, "records lost below 2"),
        ("t", 1, "unread"),
    ]


def test_an_open_transaction_is_not_lag_of_a_committed_reader(
    kafkalog: Command, log: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    batch(checkpoint, 0, '{"u":{"0":3}}')
    with DirectoryLog(log) as engine:
        engine.append_raw("u", 0, joined([at_times(3, (1, 2), 5, transactional=True)]))

    (row,) = kafkalog("status", log, "--checkpoint", checkpoint, "--json").json[1:]

    assert (row["lag"], row["uncommittedLag"], row["state"]) == (0, 2, "up to date")


def test_sources_of_other_kinds_are_left_out(kafkalog: Command, log: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    batch(checkpoint, 0, "17", '{"logOffset":3}', '{"t":{"0":1,"1":1}}', "-")

    rows = kafkalog("status", log, "--checkpoint", checkpoint, "--json").json[1:]

    assert [(row["source"], row["partition"]) for row in rows] == [("2", 0), ("2", 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"v1\n{}\n\xff\xfe", r"^\S*offsets/0: .* in UTF-8, found another byte at position 6$"),
        (b'v1\n{}\n{"t":' + b"[" * 200_000, r"^\S*offsets/0: .* nested too deeply$"),
    ],
    ids=["bytes", "nesting"],
)
def test_offsets_that_are_not_text_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    batch(tmp_path, 0)
    (tmp_path / "offsets" / "0").write_bytes(content)

    with pytest.raises(InvalidInputError, match=message):
        read_checkpoint(str(tmp_path))


def test_a_query_may_be_ahead_of_what_a_live_broker_tells(
    kafkalog: Command, tmp_path: Path
) -> None:
    root = BrokerRoot(tmp_path / "broker")
    root.partition("t-0", (0,), 30)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 10})
    batch(tmp_path, 0, '{"t":{"0":25}}')

    with root.alive():
        (row,) = kafkalog("status", root.path, "--checkpoint", tmp_path, "--json").json[1:]

    assert row["state"] == "ahead of the checkpointed end"


def test_offsets_with_names_of_sources_are_read(tmp_path: Path) -> None:
    batch(tmp_path, 4)
    text = f'v2\n{METADATA}\norders:{{"t":{{"0":3}}}}\nother:-'
    (tmp_path / "offsets" / "4").write_text(text)

    found = read_checkpoint(str(tmp_path))

    assert found.committed == {"orders": {TopicPartition("t", 0): 3}}
    assert found.planned == found.committed


def test_a_query_that_has_just_begun_has_read_nothing(
    kafkalog: Command, log: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint" / "offsets").mkdir(parents=True)

    (query,) = kafkalog("status", log, "--checkpoint", tmp_path / "checkpoint", "--json").json

    assert (query["queryId"], query["committedBatch"]) == (None, None)


@pytest.mark.parametrize("text", ["v3\n{}\n{}", "", "\x00v1\n"])
def test_a_checkpoint_of_another_version_is_refused(
    kafkalog: Command, log: Path, tmp_path: Path, text: str
) -> None:
    batch(tmp_path / "c", 0)
    (tmp_path / "c" / "offsets" / "0").write_text(text)
    result = kafkalog("status", log, "--checkpoint", tmp_path / "c")

    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "expected the version v1 or v2" in result.err


def test_a_directory_other_than_a_checkpoint_is_refused(kafkalog: Command, log: Path) -> None:
    result = kafkalog("status", log, "--checkpoint", log)

    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "no checkpoint of a streaming query here" in result.err
    with pytest.raises(InvalidInputError):
        read_checkpoint(str(log / "nothing"))
