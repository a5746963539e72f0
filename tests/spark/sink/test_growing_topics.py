"""Topics get more partitions under a running stream and sink."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka.partitioner import murmur2

import kafkalog

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS = 30
DELETED = {"cleanup.policy": "delete"}


def test_topics_that_grow_from_2_to_6_partitions_lose_and_double_nothing(
    spark: Any, tmp_path: Path
) -> None:
    root = tmp_path / "log"
    with kafkalog.open(root) as log:
        for topic in ("from", "to"):
            log.create_topic(topic, 2, DELETED)
        query = (
            spark.readStream.format("kafkalog")
            .options(subscribe="from", startingOffsets="earliest")
            .load(str(root))
            .select("key", "value")
            .writeStream.format("kafkalog")
            .options(topic="to", path=str(root), checkpointLocation=str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            wanted = []
            for round_, count in enumerate((2, 6)):
                if count == 6:
                    log.alter_topic("from", partitions=count)
                    log.alter_topic("to", partitions=count)
                rows = [(f"{round_}-{number}", "v") for number in range(KEYS)]
                log.append("from", rows)
                query.processAllAvailable()
                for key, _ in rows:
                    number = (murmur2(key.encode()) & 0x7FFFFFFF) % count
                    wanted.append((number, key.encode()))
        finally:
            query.stop()
        for topic in ("from", "to"):
            found = [
                (number, key)
                for number in log.offsets(topic)
                for batch in log.read(topic, number)
                for key in batch["key"].to_pylist()
            ]
            assert Counter(found) == Counter(wanted), topic
            assert max(number for number, _ in found) == 5
