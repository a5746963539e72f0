"""Topics out of KRaft's metadata, against bytes that an independent encoder has built."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from kafkalog.errors import CorruptBatchError, CorruptLogError, KafkaLogError, StorageError
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic, read_topics
from tests.builders.batch_builder import Record, batch_data

ID, OTHER_ID = bytes(range(16)), bytes(range(100, 116))


def unsigned(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def text(value: str | None) -> bytes:
    return b"\0" if value is None else unsigned(len(value.encode()) + 1) + value.encode()


def frame(api_key: int, fields: bytes, version: int = 0, frame_version: int = 1) -> bytes:
    return unsigned(frame_version) + unsigned(api_key) + unsigned(version) + fields


def topic(name: str, topic_id: bytes = ID) -> bytes:
    return frame(2, text(name) + topic_id + b"\0")


def partition(number: int, topic_id: bytes = ID) -> bytes:
    nodes = unsigned(2) + struct.pack(">i", 1)
    lists = nodes + nodes + unsigned(1) + unsigned(1)
    rest = struct.pack(">iii", 1, 0, 0) + unsigned(2) + bytes(16) + b"\0"
    return frame(3, struct.pack(">i", number) + topic_id + lists + rest, version=1)


def config(name: str, key: str, value: str | None, resource_type: int = 2) -> bytes:
    return frame(4, bytes([resource_type]) + text(name) + text(key) + text(value) + b"\0")


def removed(topic_id: bytes) -> bytes:
    return frame(9, topic_id + b"\0")


def batch(base_offset: int, values: Sequence[bytes], attributes: int = 0) -> bytes:
    records = [Record(base_offset + n, 5, None, value) for n, value in enumerate(values)]
    return batch_data(records, base_offset=base_offset, attributes=attributes, leader_epoch=1)


def written(tmp_path: Path, data: bytes, name: str = f"{0:020d}.log") -> Path:
    directory = tmp_path / "__cluster_metadata-0"
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    return tmp_path


def names(root: Path) -> dict[str, int]:
    return {name: topic.partitions for name, topic in read_topics(root).items()}


def test_a_topic_has_its_name_its_id_its_partitions_and_its_configs(tmp_path: Path) -> None:
    records = [
        topic("dotted.name-7"),
        partition(1),
        partition(0),
        config("dotted.name-7", "cleanup.policy", "compact"),
        config("dotted.name-7", "segment.ms", "1"),
        config("dotted.name-7", "segment.ms", None),
        config("1", "cleanup.policy", "delete", resource_type=4),
    ]
    topic_id = base64.urlsafe_b64encode(ID).decode().rstrip("=")
    expected = BrokerTopic("dotted.name-7", topic_id, 2, {"cleanup.policy": "compact"})
    root = written(tmp_path, batch(0, records))
    assert read_topics(root) == {"dotted.name-7": expected}
    assert read_topics(root / "__cluster_metadata-0") == read_topics(root)


def test_a_removed_topic_is_gone_with_its_configs(tmp_path: Path) -> None:
    records = [topic("t"), partition(0), config("t", "retention.ms", "1"), removed(ID)]
    again = [topic("t", OTHER_ID), partition(0, OTHER_ID), partition(1, OTHER_ID)]
    root = written(tmp_path, batch(0, records) + batch(4, again))
    assert names(root) == {"t": 2}
    assert read_topics(root)["t"].config == {}


def test_a_snapshot_stands_for_what_is_below_it(tmp_path: Path) -> None:
    """What the log still has from below the snapshot's end is not replayed again."""
    written(tmp_path, batch(0, [topic("old"), partition(0), removed(ID)]))
    snapshot = [topic("kept", OTHER_ID), partition(0, OTHER_ID)]
    old = batch(0, [topic("older")])
    written(tmp_path, old, f"{1:020d}-0000000001.checkpoint")
    written(tmp_path, old, f"{4:020d}-0000000001.checkpoint.deleted")
    header, footer = batch(0, [b"\0\0\0"], 0x20), batch(3, [b"\0\0\0"], 0x20)
    written(tmp_path, header + batch(1, snapshot) + footer, f"{3:020d}-0000000002.checkpoint")
    root = written(tmp_path, batch(3, [topic("new")]), f"{3:020d}.log")
    assert names(root) == {"kept": 1, "new": 0}


def test_a_transaction_counts_once_it_has_ended(tmp_path: Path) -> None:
    begin, end, abort = (frame(key, b"\0") for key in (23, 24, 25))
    records = [begin, topic("kept"), partition(0), end, begin, topic("lost", OTHER_ID), abort]
    assert names(written(tmp_path, batch(0, records))) == {"kept": 1}
    assert names(written(tmp_path, batch(0, records[:3]))) == {}


def test_a_torn_last_batch_does_not_count(tmp_path: Path) -> None:
    first, second = batch(0, [topic("t")]), batch(1, [partition(0)])
    for size in range(len(second)):
        assert names(written(tmp_path, first + second[:size])) == {"t": 0}
    assert names(written(tmp_path, first + second + bytes(4096))) == {"t": 1}


def test_a_segment_that_ends_in_the_middle_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, batch(0, [topic("t")])[:-1])
    written(tmp_path, batch(1, [partition(0)]), f"{1:020d}.log")
    with pytest.raises(CorruptBatchError, match="expected a record batch"):
        read_topics(tmp_path)


def test_a_batch_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    large = [config("t", f"c{number}", "x" * 30_000) for number in range(80)]
    data = batch(0, [topic("t")]) + batch(1, large) + batch(81, [partition(0)])
    topics = read_topics(written(tmp_path, data))
    assert len(topics["t"].config) == 80
    assert topics["t"].partitions == 1


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    data = bytearray(batch(0, [topic("t"), partition(0)]))
    data[70] ^= 1
    with pytest.raises(CorruptBatchError, match="checksum"):
        read_topics(written(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\1",
        topic("t")[:10],
        frame(2, text(None) + ID),
        frame(2, unsigned(1000) + b"short"),
        frame(2, b"\xff" * 11),
        frame(2, unsigned(3) + b"\xff\xff" + ID),
        frame(9, ID[:15]),
    ],
)
def test_a_record_that_does_not_decode_is_an_error(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(CorruptLogError):
        read_topics(written(tmp_path, batch(0, [value])))


def test_metadata_of_another_format_is_refused(tmp_path: Path) -> None:
    data = batch(0, [frame(2, text("t") + ID, frame_version=2)])
    with pytest.raises(StorageError, match="frame version 2"):
        read_topics(written(tmp_path, data))


def test_records_about_other_things_are_passed_over(tmp_path: Path) -> None:
    records = [frame(12, b"anything"), frame(30000, b""), topic("t")]
    assert names(written(tmp_path, batch(0, records))) == {"t": 0}


def test_a_directory_without_metadata_has_no_topics(tmp_path: Path) -> None:
    assert read_topics(tmp_path) == {}
    assert read_topics(tmp_path / "missing") == {}
    (tmp_path / "__cluster_metadata-0").mkdir()
    assert read_topics(tmp_path) == {}


def test_any_damage_is_a_typed_error_or_fewer_topics(tmp_path: Path) -> None:
    data = batch(0, [topic("t"), config("t", "a", "b")]) + batch(2, [partition(0)])
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        root = written(tmp_path, bytes(damaged))
        try:
            assert set(names(root)) <= {"t"}
        except KafkaLogError:
            continue
