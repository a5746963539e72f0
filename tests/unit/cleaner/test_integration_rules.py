"""What the integration tests of Kafka's cleaner say of its threads at work, rule by rule.

Each test names in its docstring the one of Kafka's that it stands for.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_contents import first_dirty
from tests.unit.cleaner.naive import dump, latest_values, records_of
from tests.unit.cleaner.test_manager_rules import (
    HOUR,
    checkpoint,
    create,
    engine_with,
)
from tests.unit.rules.acts import eventually


def test_only_what_is_older_than_the_lag_is_cleaned_and_nothing_is_lost(tmp_path: Path) -> None:
    """LogCleanerLagIntegrationTest.cleanerTest"""
    engine = engine_with(tmp_path, segment_bytes="300", min_compaction_lag_ms=str(HOUR))
    now = [1000]
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=5), clock=lambda: now[0])

    def append(name: str) -> None:
        for i in range(30):
            engine.append("t", [(f"{i % 10}", f"{name} {i}")], now_ms=now[0])

    append("old")
    before = records_of(dump(engine))
    thread.start()
    eventually(lambda: thread.last_look_ms == now[0])
    thread.stop()
    assert records_of(dump(engine)) == before  # all of it is too young
    now[0] += HOUR
    boundary = engine.describe("t").partitions[0].active_base
    append("new")
    before = records_of(dump(engine))
    thread.start()
    eventually(lambda: first_dirty(engine) >= boundary)
    thread.stop()
    assert thread.failures == 0
    after = records_of(dump(engine))
    assert latest_values(after) == latest_values(before)
    young = [record for record in before if record.timestamp >= now[0]]
    assert [record for record in after if record.timestamp >= now[0]] == young
    assert len(after) < len(before)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_a_log_cleaned_again_and_again_says_the_same_and_is_smaller(
    tmp_path: Path, codec: str
) -> None:
    """LogCleanerParameterizedIntegrationTest.cleanerTest"""
    engine = DirectoryLog(tmp_path)
    sizes = {"small": "300", "large": "1500"}
    for topic, size in sizes.items():
        create(
            engine,
            topic,
            compression_type=codec,
            segment_bytes=size,
            min_cleanable_dirty_ratio="0",
        )
    source = random.Random(codec)
    thread = CleanerThread(engine, CleanerConfig(threads=2, backoff_ms=20), clock=lambda: 1000)
    expected: dict[str, dict[bytes | None, bytes | None]] = {topic: {} for topic in sizes}
    thread.start()
    for topic in sizes:
        for _ in range(2):
            for _ in range(25):
                pairs = [
                    (f"{source.randrange(20)}", f"{source.random()}" * source.randrange(1, 9))
                    for _ in range(source.randrange(1, 5))
                ]
                engine.append(topic, pairs, now_ms=1000)
                expected[topic] |= {key.encode(): value.encode() for key, value in pairs}
            end = engine.describe(topic).partitions[0].active_base
            eventually(lambda: checkpoint(engine).get((topic, 0), 0) >= end)  # noqa: B023
            assert end > 0
    thread.stop()
    assert (thread.failures, thread.deaths) == (0, 0)
    for topic in sizes:
        after = records_of(dump(engine, topic))
        found = {key: value for key, (_, value) in latest_values(after).items()}
        assert found == expected[topic]
        assert len(after) < engine.describe(topic).partitions[0].high_watermark
    engine.delete_topic("small", now_ms=1000)
    assert set(checkpoint(engine)) == {("large", 0)}
