"""Records of Kafka's own topics, decoded for a dump; kafka-dump-log printed the reference.

Every message of every version is compared with Kafka's own encoder in `conformance/test_messages`.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cli import run
from kafkalog.storage_engine.format.message import UnknownVersionError, read_message, read_metadata
from tests import ROOT
from tests.builders.batch_builder import BatchBuilder
from tests.builders.commits import key, value
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine.test_groups import ARCHIVE

MESSAGES = ROOT / "kafkalog/storage_engine/format/messages.json"
DECODERS = ("offsets", "transaction-log", "share-group-state", "cluster-metadata")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


def dumped(*arguments: str | Path) -> tuple[int, list[str]]:
    """Return the exit status and the lines of both outputs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(["dump", *map(str, arguments)])
    return status, [line for line in (out.getvalue() + err.getvalue()).splitlines() if line]


def log_of(root: Path, *records: tuple[bytes | None, bytes | None]) -> Path:
    builder = BatchBuilder()
    for record in records:
        builder.add(*record)
    write_segment(root, 0, [builder.build()], indexes=False)
    return root / name(0, ".log")


def decoded(path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    status, lines = dumped(path, "--json", *options)
    return status, [row for row in map(json.loads, lines) if row["type"] == "record"]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_decoder_prints_the_lines_of_kafka_dump_log(disk: Path, decoder: str) -> None:
    said = json.loads((disk / "said.json").read_text())
    option = f"--{decoder}-decoder"
    paths = [disk / path for path in said["files"][option]]
    status, lines = dumped(*paths, option)
    # A gap names the file by its whole path, which was another one.
    shown = [line for line in lines if not line.startswith(("Dumping ", "Non-consecutive "))]
    wanted = [line for line in said["lines"][option] if not line.startswith("Non-consecutive ")]
    assert sorted(shown) == wanted
    assert status == 0


TIERED = (
    ("010000076f726465727300000000000000000000000000000001000000030004104104104104104104104104104105"
     "000000000000000005000000000000000900000001000000000000004600000000000000500300000002000000000000"
     "000700000000000000000000000005000000012c040102030001000101",
     "RemoteLogSegmentMetadata{remoteLogSegmentId=RemoteLogSegmentId{topicIdPartition="
     "AAAAAAAAAAAAAAAAAAAAAQ:orders-3, id=BBBBBBBBBBBBBBBBBBBBBQ}, startOffset=5, endOffset=9, "
     "brokerId=1, maxTimestampMs=70, eventTimestampMs=80, segmentLeaderEpochs={0=5, 2=7}, "
     "segmentSizeInBytes=300, customMetadata=Optional[CustomMetadata{3 bytes}], "
     "state=COPY_SEGMENT_STARTED, txnIdxEmpty=true}"),
    ("010100076f726465727300000000000000000000000000000001000000030004104104104104104104104104104105"
     "00000000010000000000000051000100",
     "RemoteLogSegmentMetadataUpdate{remoteLogSegmentId=RemoteLogSegmentId{topicIdPartition="
     "AAAAAAAAAAAAAAAAAAAAAQ:orders-3, id=BBBBBBBBBBBBBBBBBBBBBQ}, customMetadata=Optional.empty, "
     "state=COPY_SEGMENT_FINISHED, eventTimestampMs=81, brokerId=1}"),
    ("010200076f72646572730000000000000000000000000000000100000003000000000100000000000000520200",
     "RemotePartitionDeleteMetadata{topicPartition=AAAAAAAAAAAAAAAAAAAAAQ:orders-3, "
     "state=DELETE_PARTITION_FINISHED, eventTimestampMs=82, brokerId=1}"),
)  # fmt: skip
"""What Kafka's RemoteLogMetadataSerde wrote, and the payload that kafka-dump-log printed of it."""


def test_records_of_tiered_storage_are_the_lines_of_kafka_dump_log(tmp_path: Path) -> None:
    values = [bytes.fromhex(data) for data, _ in TIERED]
    values.append(values[-1][:-3])
    path = log_of(tmp_path, *((None, each) for each in values), (b"k", None))
    status, lines = dumped(path, "--remote-log-metadata-decoder")
    shown = [line.partition(" payload: ")[2] for line in lines if line.startswith("|")]
    assert shown[:3] == [line for _, line in TIERED]
    assert shown[3].startswith("Error at offset 3, skipping. eventTimestampMs: expected 8 bytes")
    assert shown[4] == "Error at offset 4, skipping. expected a value, found null"
    assert status == 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_json_has_the_fields_as_objects(disk: Path, decoder: str) -> None:
    said = json.loads((disk / "said.json").read_text())
    option = f"--{decoder}-decoder"
    for path in said["files"][option]:
        for row in decoded(disk / path, option)[1]:
            given = row.get("key", row.get("payload", row.get("control", row.get("endTxnMarker"))))
            assert isinstance(given, dict | str)


def test_control_records_of_a_quorum_are_decoded_without_an_option(disk: Path) -> None:
    (log,) = (disk / "metadata/__cluster_metadata-0").glob("*.log")
    rows = [row for row in decoded(log, "--deep-iteration")[1] if "control" in row]
    assert rows[0]["control"]["LeaderChange"]["leaderId"] == 1


def test_a_record_of_an_unknown_type_is_named_and_is_not_damage(tmp_path: Path) -> None:
    path = log_of(tmp_path, (struct.pack(">h", 99), b"x"))
    status, lines = dumped(path, "--offsets-decoder")
    assert lines[-1].endswith("key: Unknown record type 99 at offset 0, skipping.")
    assert status == 0


def test_a_tombstone_is_shown_as_a_deletion(tmp_path: Path) -> None:
    path = log_of(tmp_path, (key(), None))
    assert dumped(path, "--offsets-decoder")[1][-1].endswith(" payload: <DELETE>")
    ((row),) = decoded(path, "--offsets-decoder")[1]
    assert row["payload"] is None


@pytest.mark.parametrize(
    "record, words",
    [
        ((None, b"x"), "expected a key, found null"),
        ((key(), value(1)[:-1]), "commitTimestamp: expected 8 bytes at byte 17, found 7"),
        ((key()[:-1], b""), "partition: expected 4 bytes at byte 8, found 3"),
    ],
)
def test_a_record_that_does_not_decode_is_damage_and_its_field_is_named(
    tmp_path: Path, record: tuple[bytes | None, bytes], words: str
) -> None:
    path = log_of(tmp_path, record, (key(), value(2)))
    status, lines = dumped(path, "--offsets-decoder")
    assert status == 1
    assert lines[-2].endswith(f"key: Error at offset 0, skipping. {words}")
    assert '"offset":2' in lines[-1]


def test_one_file_has_the_records_of_one_topic(tmp_path: Path) -> None:
    status, lines = dumped(tmp_path, "--offsets-decoder", "--transaction-log-decoder")
    assert status == 2
    assert "--offsets-decoder and --transaction-log-decoder: give one of them" in lines[0]


def test_unknown_tagged_fields_are_passed_over() -> None:
    data = struct.pack(">qibqb", 3, 5, 1, 1000, 1) + bytes([9, 3]) + b"new"
    fields, end = read_message("OffsetCommitValue", 4, data)
    assert fields == {"offset": 3, "leaderEpoch": 5, "metadata": "", "commitTimestamp": 1000}
    assert end == len(data)


def test_no_more_elements_are_read_than_there_are_bytes() -> None:
    with pytest.raises(ValueError, match="topics: expected 2147483647 elements, found 4 bytes"):
        read_message("ConsumerProtocolSubscription", 0, struct.pack(">ii", 2**31 - 1, 0))


def test_a_version_from_the_future_is_refused_by_its_number() -> None:
    with pytest.raises(UnknownVersionError, match="TopicRecord of version 0 to 0, found version 3"):
        read_message("TopicRecord", 3, b"")


def test_any_bytes_are_a_message_or_an_error_that_names_what_was_expected() -> None:
    draw = random.Random(5)
    table = json.loads(MESSAGES.read_text())["messages"]
    faults = 0
    for message, known in table.items():
        for _ in range(60):
            first, _, last = known["versions"].partition("-")
            version = draw.randint(int(first), int(last or first))
            data = bytes(draw.choice((0, 1, 2, 3, 127, 255)) for _ in range(draw.randrange(60)))
            try:
                read_message(message, version, data)
            except ValueError as fault:
                faults += 1
                assert "expected " in str(fault) and ", found " in str(fault)
    assert faults > 1000


def test_bytes_after_a_metadata_record_are_damage() -> None:
    topic = bytes([1, 2, 0, 3]) + b"ab" + bytes(16) + b"\0"
    assert read_metadata(topic)[1] == "TopicRecord"
    with pytest.raises(ValueError, match="the end of TopicRecord at byte 23, found 24 bytes"):
        read_metadata(topic + b"x")
