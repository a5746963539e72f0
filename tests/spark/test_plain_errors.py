"""What a notebook shows of an error: its one sentence comes before all frames."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.sink import Append
from kafkalog.sink.upsert import SQLiteUpsert

pytestmark = [pytest.mark.spark, pytest.mark.slow]
OF_THE_QUERY = "=== Streaming Query ==="


class Case:
    """A log with a topic of two records, one whose start is gone, and one that is not JSON."""

    def __init__(self, spark: Any, place: Path) -> None:
        self.spark, self.place, self.path = spark, place, str(place / "log")
        with kafkalog.open(self.path) as log:
            log.create_topic("t")
            log.append("t", [("a", "1"), ("b", "2")])
            log.create_topic("cut", config={"cleanup.policy": "delete"})
            log.append("cut", [("a", "1")] * 10)
            log.delete_records("cut", 0, 5)
            log.create_topic("text")
            log.append("text", [("a", "nojson")])

    def batch(self, **options: str) -> Any:
        return self.spark.read.format("kafkalog").options(path=self.path, **options).load()

    def stream(self, topic: str, **options: str) -> Any:
        given = {"path": self.path, "subscribe": topic, "startingOffsets": "earliest", **options}
        rows = self.spark.readStream.format("kafkalog").options(**given).load()
        writer = rows.writeStream.option("checkpointLocation", str(self.place / "checkpoint"))
        return writer.trigger(availableNow=True)

    def copied(self, topic: str, **options: str) -> None:
        writer = self.stream(topic, **options).format("kafkalog")
        writer.options(path=self.path, topic="copy").start().awaitTermination()

    def applied(self, apply: Any) -> None:
        self.stream("text").foreachBatch(apply).start().awaitTermination()

    def table(self) -> SQLiteUpsert:
        return SQLiteUpsert(self.place / "rows.db", "rows", schema="count int")

    def in_function(self, rows: Any, batch_id: int) -> None:
        self.table()(rows, batch_id)

    def viewed(self) -> None:
        place = self.place / "view"
        view = kafkalog.KTableView(self.spark, self.path, "text", self.table(), checkpoint=place)
        view.start()
        try:
            view.wait_until(timeout_s=120)
        finally:
            view.stop()

    def written(self, **options: str) -> None:
        frame = self.spark.createDataFrame([(None, "x")], "key string, value string")
        writer = frame.write.format("kafkalog").options(path=self.path, topic="t", **options)
        writer.mode("append").save()


CASES: dict[str, tuple[Callable[[Case], Any], str, int]] = {
    "option of a batch": (
        lambda c: c.batch(subscribe="t", startingOfsets="x"),
        "unknown option",
        2,
    ),
    "option of a stream": (lambda c: c.copied("t", maxOffsetsPerTrigger="-4"), "maxOffsets", 2),
    "option of a write": (lambda c: c.written(nonsense="1"), "unknown option 'nonsense'", 2),
    "topic of a batch": (lambda c: c.batch(subscribe="none").count(), "topic 'none'", 2),
    "topic of a stream": (lambda c: c.copied("none"), "topic 'none'", 2),
    "loss in a batch": (
        lambda c: c.batch(subscribe="cut", startingOffsets='{"cut":{"0":3}}').count(),
        "KAFKA_DATA_LOSS",
        2,
    ),
    "loss in a stream": (
        lambda c: c.copied("cut", startingOffsets='{"cut":{"0":3}}'),
        "KAFKA_DATA_LOSS",
        3,
    ),
    "record of a write": (lambda c: c.written(), "null key", 2),
    "record of an upsert": (lambda c: c.applied(c.table()), "text-0 offset 0: the value is", 18),
    "record of an upsert in a function": (
        lambda c: c.applied(c.in_function),
        "text-0 offset 0: the value is",
        20,
    ),
    "topic of an append": (
        lambda c: c.applied(Append(c.path, "t", nonsense="1")),
        "unknown option 'nonsense'",
        20,
    ),
    "record of a view": (lambda c: c.viewed(), "text-0 offset 0: the value is", 20),
}
"""What fails, a part of the sentence, and the lines at most before Spark's words on the query."""


@pytest.mark.parametrize("name", CASES)
def test_an_error_begins_with_its_sentence(name: str, spark: Any, tmp_path: Path) -> None:
    fail, sentence, lines_max = CASES[name]
    with pytest.raises(Exception) as raised:
        fail(Case(spark, tmp_path))
    lines = str(raised.value).partition(OF_THE_QUERY)[0].splitlines()
    first = next(place for place, line in enumerate(lines) if "kafkalog.errors." in line)
    assert sentence in lines[first]
    assert first <= 1
    assert not any("Traceback" in line or 'File "' in line for line in lines[: first + 1])
    assert len(lines) <= lines_max
