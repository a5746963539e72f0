"""A topic gets more partitions, in a directory and in an object store, by Kafka's rules."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from aiokafka.partitioner import murmur2

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.builders.log_contents import damage
from tests.unit.datasource.streaming_query import StreamingQuery
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.test_adopt import TOPIC_ID, broker_partition, take

DELETED: Final = {"cleanup.policy": "delete"}
NOW_MS: Final = 1_700_000_000_000
KEYS: Final = [f"key-{number}" for number in range(40)]


@pytest.fixture(params=["directory", "object store"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KafkaLog]:
    is_store = request.param == "object store"
    place = f"memory://{uuid.uuid4().hex}/log" if is_store else str(tmp_path / "log")
    with kafkalog.open(place) as opened:
        yield opened


def places(log: KafkaLog, topic: str = "t") -> list[tuple[int, int, bytes]]:
    return [
        (number, offset, key)
        for number in log.offsets(topic)
        for rows in log.read(topic, number)
        for offset, key in zip(*(rows[n].to_pylist() for n in ("offset", "key")), strict=True)
    ]


def by_kafka(keys: list[str], count: int) -> list[tuple[int, bytes]]:
    return [((murmur2(key.encode()) & 0x7FFFFFFF) % count, key.encode()) for key in keys]


def test_old_records_stay_and_new_ones_go_where_kafka_sends_them(log: KafkaLog) -> None:
    log.create_topic("t", 2, DELETED)
    log.append("t", [(key, "old") for key in KEYS])
    before = places(log)
    grown = log.alter_topic("t", partitions=6)
    assert (len(grown.partitions), dict(grown.config)) == (6, DELETED)
    assert (places(log), sorted(log.offsets("t"))) == (before, [0, 1, 2, 3, 4, 5])
    with log.producer("t") as producer:
        for key in KEYS[:20]:
            producer.send(key, "new")
    log.append("t", [(key, "new") for key in KEYS[20:]])
    after = places(log)
    assert [row for row in after if row in before] == before
    assert sorted((row[0], row[2]) for row in before) == sorted(by_kafka(KEYS, 2))
    new = sorted((row[0], row[2]) for row in set(after) - set(before))
    assert new == sorted(by_kafka(KEYS, 6))


@pytest.mark.parametrize("count", [0, 1, 2, layout.PARTITIONS_MAX + 1])
def test_the_number_of_partitions_only_grows(log: KafkaLog, count: int) -> None:
    log.create_topic("t", 2, DELETED)
    with pytest.raises(InvalidInputError, match=f"can only grow .*found {count}"):
        log.alter_topic("t", partitions=count)
    assert len(log.describe("t").partitions) == 2


def test_a_compacted_topic_grows_only_if_its_keys_may_move(log: KafkaLog) -> None:
    log.create_topic("t", 2)
    with pytest.raises(InvalidInputError, match=r"its keys go elsewhere.*keys_may_move=True"):
        log.alter_topic("t", partitions=3)
    grown = log.alter_topic("t", {"segment.bytes": "1000"}, 3, keys_may_move=True)
    assert (len(grown.partitions), grown.config["segment.bytes"]) == (3, "1000")
    assert log.describe("t") == grown


def test_a_deleted_config_has_its_default_again(log: KafkaLog) -> None:
    log.create_topic("t", config={"retention.ms": "5", "segment.bytes": "100"})
    assert "retention.ms" not in log.alter_topic("t", {"retention.ms": None}).config
    with pytest.raises(InvalidInputError, match=r"'retention\.ms' is not set .*segment\.bytes"):
        log.alter_topic("t", {"retention.ms": None})
    with pytest.raises(InvalidInputError, match="Set the policy that you mean"):
        log.alter_topic("t", {"cleanup.policy": None})


def test_a_growth_that_died_anywhere_can_be_repeated(tmp_path: Path) -> None:
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        with DirectoryLog(root) as engine:
            engine.create_topic("t", 2, DELETED)
            engine.append("t", [(key, "old") for key in KEYS])

        def grow(root: Path = root) -> None:
            with DirectoryLog(root) as engine:
                engine.alter_topic("t", partitions=4)

        running = each_act(grow, number, Died())
        with DirectoryLog(root) as engine:
            if len(engine.describe("t").partitions) == 2:
                engine.alter_topic("t", partitions=4)
            engine.append("t", [(key, "new") for key in KEYS])
            assert sum(end for _, end in engine.offsets("t").values()) == 2 * len(KEYS)
        assert damage(root) == []
    assert number > 10


def test_a_stream_reads_every_record_of_a_topic_that_grows(log: KafkaLog) -> None:
    log.create_topic("t", 2, DELETED)
    query = StreamingQuery(log._log.root, {"subscribe": "t", "startingOffsets": "earliest"})
    read = []
    for rounds, count in enumerate((2, 6, 7)):
        if rounds:
            log.alter_topic("t", partitions=count)
        for part in range(2):
            log.append("t", [(f"{key}-{rounds}-{part}", "v") for key in KEYS])
            read += query.drain()
    assert sorted((row["partition"], row["offset"], row["key"]) for row in read) == places(log)
    assert len(read) == 6 * len(KEYS)
    assert max(row["partition"] for row in read) == 6


def test_what_a_sink_staged_before_the_growth_is_committed_after_it(log: KafkaLog) -> None:
    log.create_topic("t", 2, DELETED)
    engine = log._log
    staged = StagedWriter(None, engine.state(), now_ms=lambda: NOW_MS)
    staged.append("t", pa.record_batch({"key": KEYS, "value": KEYS}))
    message = staged.finish()
    log.alter_topic("t", partitions=6)
    engine.commit([message])
    assert [(row[0], row[2]) for row in places(log)] == sorted(
        by_kafka(KEYS, 2), key=lambda r: r[0]
    )


def test_partitions_that_another_broker_has_let_a_topic_not_grow(tmp_path: Path) -> None:
    broker_partition(tmp_path, "t-1", TOPIC_ID)
    take(tmp_path, config={"t": DELETED})
    with DirectoryLog(tmp_path) as engine, pytest.raises(InvalidInputError, match="in another log"):
        engine.alter_topic("t", partitions=4)
