"""`adopt` and `release` as commands, and what the others make of a broker's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.batch_builder import batch
from tests.builders.rescued import rescued
from tests.builders.segment_files import write_segment
from tests.unit.cli.conftest import Command

TOPIC_ID = "A" * 21 + "Q"
OTHER_ID = "B" * 21 + "Q"


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """The directory of a broker that was shut down in good order."""
    root = tmp_path / "broker"
    directory = root / "t-0"
    directory.mkdir(parents=True)
    write_segment(directory, 0, [batch(0, 4), batch(4, 4)])
    (directory / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    (root / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=1\n")
    for name in ("recovery-point", "replication"):
        (root / f"{name}-offset-checkpoint").write_text("0\n1\nt 0 8\n")
    (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    return root


def test_a_brokers_directory_is_read_and_never_written(kafkalog: Command, broker: Path) -> None:
    before = {path: path.read_bytes() for path in broker.rglob("*") if path.is_file()}
    assert len(kafkalog("read", broker, "t").lines) == 8
    assert kafkalog("verify", broker).status == 0
    log, partition = kafkalog("status", broker, "--json").json
    assert (log["owner"], log["running"], log["locks"]) == ("broker", False, True)
    assert (partition["highWatermark"], partition["reason"]) == (8, None)
    for verb in (("append", broker, "t"), ("clean", broker, "--force")):
        result = kafkalog(*verb, stdin=b'{"key":"k","value":"v"}\n')
        assert result.status == 2, verb
        assert f"kafkalog adopt {broker}" in result.err
    assert {path: path.read_bytes() for path in broker.rglob("*") if path.is_file()} == before


def test_a_directory_goes_to_us_and_back(kafkalog: Command, broker: Path, tmp_path: Path) -> None:
    adopted = kafkalog("adopt", broker, "--config", "t:cleanup.policy=delete")
    assert (adopted.status, adopted.lines) == (0, [f"{broker} is adopted: 1 topic, 1 partition"])
    assert kafkalog("adopt", broker, "--json").json[0]["adoptedAlready"]
    (topic,) = kafkalog("topics", "list", broker, "--json").json
    assert (topic["id"], topic["config"]) == (
        TOPIC_ID,
        {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "delete.retention.ms": str(2**63 - 1),
        },
    )
    assert kafkalog("append", broker, "t", stdin=b'{"value":"v"}\n').status == 0
    assert kafkalog("status", broker, "--json").json[0]["ownerDetail"] == "adopted from a broker"
    assert kafkalog("verify", broker, "--deep").status == 0
    ids = tmp_path / "ids"
    ids.write_text(f"Topic: t\tTopicId: {OTHER_ID}\tPartitionCount: 1\n\tTopic: t\tPartition: 0\n")
    released = kafkalog("release", broker, "--topic-ids", ids, "--json")
    assert released.status == 0, released.err
    assert released.json[0]["hasBroker"]
    assert (broker / "t-0" / "partition.metadata").read_text().endswith(OTHER_ID)
    assert kafkalog("verify", broker, "--deep").status == 0
    assert len(kafkalog("read", broker, "t").lines) == 9
    assert kafkalog("release", broker).lines == [f"{broker} is a broker's already"]


@pytest.mark.parametrize("text", ["t", "t:x", ":a=b", "t:=b", "none:cleanup.policy=delete"])
def test_a_wrong_config_is_refused_and_nothing_is_adopted(
    kafkalog: Command, broker: Path, text: str
) -> None:
    result = kafkalog("adopt", broker, "--config", text)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert not (broker / "commit").exists()


@pytest.mark.parametrize("lines", ["", "# none\n", f"t {'A' * 21}Q\nt {'A' * 21}g\n"])
def test_a_file_without_ids_or_with_two_for_a_topic_is_refused(
    kafkalog: Command, broker: Path, tmp_path: Path, lines: str
) -> None:
    kafkalog("adopt", broker)
    ids = tmp_path / "ids.txt"
    ids.write_text(lines)
    result = kafkalog("release", broker, "--topic-ids", ids)
    assert result.status == 2
    assert str(ids) in result.err
    assert (broker / "commit").exists()


def test_topic_ids_are_lines_or_what_kafkas_tool_prints(
    kafkalog: Command, broker: Path, tmp_path: Path
) -> None:
    kafkalog("adopt", broker)
    ids = tmp_path / "ids"
    ids.write_text("t\n")
    result = kafkalog("release", broker, "--topic-ids", ids)
    assert (result.status, "line 1" in result.err) == (2, True)
    ids.write_text(f"# of the new cluster\n\nt {OTHER_ID}\n")
    assert kafkalog("release", broker, "--topic-ids", ids).status == 0
    assert (broker / "t-0" / "partition.metadata").read_text().endswith(OTHER_ID)


def test_rescued_partitions_are_read_with_one_notice_and_adopted(
    kafkalog: Command, tmp_path: Path
) -> None:
    written = rescued(tmp_path)
    result = kafkalog("read", tmp_path, "orders", "--json")
    assert [(row["partition"], row["offset"]) for row in result.json] == [w[:2] for w in written]
    assert result.err.count("kafkalog adopt") == len(result.err.splitlines()) == 1
    log, *partitions = kafkalog("status", tmp_path, "--json").json
    assert (log["owner"], log["ownerDetail"]) == ("nobody", "a copy of a broker's partitions")
    assert {row["highWatermark"] for row in partitions} == {40}
    assert kafkalog("verify", tmp_path, "--deep").status == 0
    refused = kafkalog("append", tmp_path, "orders", stdin=b'{"key":"k","value":"v"}\n')
    assert refused.status == 2
    assert f"is only read; to write to it run: kafkalog adopt {tmp_path}" in refused.err
    assert kafkalog("adopt", tmp_path, "--config", "*:cleanup.policy=compact").status == 0
    again = kafkalog("append", tmp_path, "orders", stdin=b'{"key":"k","value":"v"}\n')
    assert (again.status, again.err) == (0, "")
