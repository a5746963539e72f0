"""What a write makes of rows: their partitions, their batches, their compression; no JVM."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_contents import values
from tests.unit.sink.spark_write import Row, SparkWrite, staged_names
from tests.unit.storage_engine import naive

ATTRIBUTES, COUNT = struct.Struct(">h"), struct.Struct(">i")
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def counts(root: Path, topic: str = "t") -> list[int]:
    """Return the number of records of each partition."""
    return [
        end - start for start, end in DirectoryLog(root, read_only=True).offsets(topic).values()
    ]


def batches_of(root: Path, partition: int = 0) -> list[tuple[int, int, int]]:
    """Return (size, number of records, codec) of the batches in a partition's only segment."""
    data = (DirectoryLog(root).partition_directory("t", partition) / f"{0:020d}.log").read_bytes()
    end = DirectoryLog(root).state().topics["t"].partitions[partition].active_size
    found, position = [], 0
    while position < end:
        size = 12 + COUNT.unpack_from(data, position + 8)[0]
        (attributes,) = ATTRIBUTES.unpack_from(data, position + 21)
        found.append((size, COUNT.unpack_from(data, position + 57)[0], attributes & 7))
        position += size
    return found


def keyless(count: int) -> list[Row]:
    return [{"key": None, "value": b"%d" % n} for n in range(count)]


@pytest.fixture
def write(tmp_path: Path) -> SparkWrite:
    return SparkWrite(tmp_path / "log")


@pytest.fixture
def events(write: SparkWrite) -> SparkWrite:
    """A write to a topic of three partitions that takes rows without a key."""
    write.options |= {"numPartitions": "3", "topic.cleanup.policy": "delete"}
    return write


def test_keys_go_where_kafkas_default_partitioner_sends_them(write: SparkWrite) -> None:
    write.options["numPartitions"] = "7"
    keys = [b"k%d" % n * (n % 5) for n in range(200)]
    write.micro_batch([[{"key": key, "value": key} for key in keys]])
    engine = DirectoryLog(write.root, read_only=True)
    for partition in range(7):
        found = [
            key for rows in engine.read("t", partition) for key in rows.column("key").to_pylist()
        ]
        assert found == [key for key in keys if naive.partition(key, 7) == partition]


def test_null_keys_of_a_task_are_spread_evenly(events: SparkWrite) -> None:
    events.micro_batch([keyless(300)])
    assert counts(events.root) == [100, 100, 100]


def test_null_keys_of_many_small_tasks_are_spread_evenly(events: SparkWrite) -> None:
    events.micro_batch([keyless(1)] * 30)
    assert counts(events.root) == [10, 10, 10]
    events.micro_batch([keyless(4)] * 9, batch_id=1)
    assert counts(events.root) == [22, 22, 22]


def test_null_keys_of_many_small_micro_batches_are_spread_evenly(events: SparkWrite) -> None:
    for batch_id in range(30):
        events.micro_batch([keyless(1)], batch_id)
    assert counts(events.root) == [10, 10, 10]


def test_single_appends_without_a_key_are_spread_evenly(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 3, {"cleanup.policy": "delete"})
    for _ in range(9):
        engine.append("t", [(None, b"v")])
    assert counts(engine.root) == [3, 3, 3]


def test_keys_and_null_keys_and_given_partitions_mix(events: SparkWrite) -> None:
    events.names = ("key", "value", "partition")
    rows: list[Row] = [{"key": b"k", "value": b"keyed", "partition": None}] * 5
    rows += [{"key": b"k", "value": b"given", "partition": 1}] * 5
    rows += [{"key": None, "value": b"free", "partition": None}] * 30
    events.micro_batch([rows])
    engine = DirectoryLog(events.root, read_only=True)
    found = [
        Counter(v for rows in engine.read("t", number) for v in rows.column("value").to_pylist())
        for number in range(3)
    ]
    keyed = naive.partition(b"k", 3)
    assert [part[b"keyed"] for part in found] == [5 * (number == keyed) for number in range(3)]
    assert [part[b"given"] for part in found] == [0, 5, 0]
    assert [part[b"free"] for part in found] == [10, 10, 10]


def test_a_null_key_fails_a_write_to_a_compacted_topic(write: SparkWrite) -> None:
    with pytest.raises(InvalidInputError, match=r"1 of 3 rows have a null key.*policy=delete"):
        write.attempt([{"key": b"k", "value": b"v"}] * 2 + keyless(1))
    assert staged_names(write.root) == []


@pytest.mark.parametrize("given", [1, 7, 5000])
def test_batches_are_filled_whatever_sparks_batches_are(write: SparkWrite, given: int) -> None:
    write.batch_rows = given
    rows = [{"key": b"%04d" % n, "value": b"v" * 100} for n in range(2000)]
    write.micro_batch([rows])
    *full, last = batches_of(write.root)
    assert sum(count for _, count, _ in [*full, last]) == 2000
    assert all(65536 - 150 < size <= 65536 + 61 for size, _, _ in full)
    assert len(full) == 3


def test_the_option_batch_size_fills_smaller_ones(write: SparkWrite) -> None:
    write.options["batch.size"] = "2000"
    write.micro_batch([[{"key": b"k", "value": b"v" * 100} for _ in range(100)]])
    *full, _ = batches_of(write.root)
    assert all(1800 < size <= 2061 for size, _, _ in full)


def test_no_batch_is_larger_than_max_message_bytes(write: SparkWrite) -> None:
    write.options["topic.max.message.bytes"] = "3000"
    write.micro_batch([[{"key": b"k", "value": b"v" * 100} for _ in range(100)]])
    assert max(size for size, _, _ in batches_of(write.root)) <= 3000
    assert len(values(write.root)) == 100


def test_a_record_above_max_message_bytes_fails_its_task(write: SparkWrite) -> None:
    write.options["topic.max.message.bytes"] = "3000"
    rows = [{"key": b"k", "value": b"v" * size} for size in (10, 2990)]
    with pytest.raises(InvalidInputError, match=r"topic 't': row 1: .* at most 3000 bytes"):
        write.attempt(rows)
    assert staged_names(write.root) == []


@pytest.mark.parametrize("codec", CODECS)
def test_the_topics_compression_type_is_used_whatever_the_option_says(
    write: SparkWrite, codec: str
) -> None:
    named = "uncompressed" if codec == "none" else codec
    write.options |= {"topic.compression.type": named, "kafka.compression.type": "gzip"}
    write.micro_batch([[{"key": b"k", "value": b"v" * 100}] * 10])
    assert [found for _, _, found in batches_of(write.root)] == [CODECS.index(codec)]


@pytest.mark.parametrize("codec", CODECS)
def test_the_option_decides_where_the_topic_leaves_it_to_the_producer(
    write: SparkWrite, codec: str
) -> None:
    write.options["kafka.compression.type"] = codec
    write.micro_batch([[{"key": b"k", "value": b"v" * 100}] * 10])
    assert [found for _, _, found in batches_of(write.root)] == [CODECS.index(codec)]
    assert values(write.root) == [b"v" * 100] * 10
