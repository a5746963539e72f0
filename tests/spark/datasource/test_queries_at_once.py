"""Spark runs several queries of one log at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.log_place import log_in
from tests.unit.datasource.logs import (
    append,
    append_to,
    create_many_partitions,
    numbered,
    places,
    read_batch,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]
EARLIEST = {"startingOffsets": "earliest"}


def test_spark_runs_several_queries_of_one_log_at_once(spark: Any, tmp_path: Path) -> None:
    """They read the same topic in steps of their own, end, and are started again later."""
    many = log_in(tmp_path)
    create_many_partitions(many)
    append(many, "orders", numbered(7))
    frames = {
        "limited": streaming(spark, many, subscribe="orders", maxOffsetsPerTrigger="5"),
        "all": streaming(spark, many, subscribePattern="^(t|orders)$").select(
            "topic", "partition", "offset"
        ),
    }
    seen: dict[str, list[list[tuple[str, int, int]]]] = {name: [] for name in frames}

    def start(name: str) -> Any:
        def see(frame: Any, _: int) -> None:
            seen[name].append([(r.topic, r.partition, r.offset) for r in frame.collect()])

        writer = frames[name].writeStream.foreachBatch(see)
        writer = writer.option("checkpointLocation", str(tmp_path / name))
        return writer.trigger(availableNow=True).start()

    def run() -> None:
        queries = [start(name) for name in frames]
        assert all(query.awaitTermination(240) for query in queries)

    run()
    append(many, "orders", numbered(4))
    append_to(many, "t", {500: 2, 501: 1})
    run()

    orders = places(read_batch(many, subscribe="orders"))
    assert len(orders) == 11
    assert seen["limited"] == [orders[:5], orders[5:7], orders[7:]]
    first, second = (sorted(found) for found in seen["all"])
    assert sorted(first + second) == sorted(orders + places(read_batch(many)))
    assert second == [*orders[7:], ("t", 500, 3), ("t", 500, 4), ("t", 501, 0)]


def streaming(spark: Any, root: Path, **options: str) -> Any:
    return spark.readStream.format("kafkalog").options(**EARLIEST, **options).load(str(root))
