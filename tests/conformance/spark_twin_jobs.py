"""The jobs that are run with `format("kafka")` and with `format("kafkalog")`.

A job gets a reader and returns a DataFrame; what differs between the two formats is in the reader
alone. Its rows are compared, of a stream batch by batch, and the offsets in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.conformance.spark_twin_topics import (
    LATE,
    MINUTE_MS,
    NOW_MS,
    ORDERS,
    PAYMENTS,
    SHAPES,
    TRANSFERS,
    TRIMMED,
    USERS,
)

TASK = "task"
"""A column with the number of a task: its rows belong together, whatever the number."""


class Reader(NamedTuple):
    """A way to the topics: a format and its address."""

    spark: Any
    format: str
    address: dict[str, str]

    def batch(self, subscribe: str = "", **options: Any) -> Any:
        return self._with(self.spark.read, subscribe, options).load()

    def stream(self, subscribe: str = "", **options: Any) -> Any:
        given = {"startingOffsets": "earliest", **options}
        return self._with(self.spark.readStream, subscribe, given).load()

    def _with(self, reader: Any, subscribe: str, options: dict[str, Any]) -> Any:
        # The one default in which the two differ.
        given = {"kafka.isolation.level": "read_committed", **self.address, **options}
        if subscribe:
            given["subscribe"] = subscribe
        return reader.format(self.format).options(**given)


class Job(NamedTuple):
    plan: Callable[[Reader], Any]
    is_stream: bool
    rounds: tuple[int, ...]
    """In which rounds it is run; a stream goes on with its checkpoint."""

    @property
    def name(self) -> str:
        return self.plan.__name__


JOBS: dict[str, Job] = {}
_Plan = Callable[[Reader], Any]


def batch(plan: _Plan) -> _Plan:
    """A batch job, of the second round."""
    JOBS[plan.__name__] = Job(plan, is_stream=False, rounds=(2,))
    return plan


def stream(plan: _Plan) -> _Plan:
    """A streaming job, which runs in the second round until all that is there has been read."""
    JOBS[plan.__name__] = Job(plan, is_stream=True, rounds=(2,))
    return plan


def restarted(plan: _Plan) -> _Plan:
    """A streaming job that reads what there is in each of the rounds."""
    JOBS[plan.__name__] = Job(plan, is_stream=True, rounds=(1, 2))
    return plan


def _parsed(frame: Any, schema: str) -> Any:
    return frame.selectExpr(
        "CAST(key AS STRING) AS user", f"from_json(CAST(value AS STRING), '{schema}') AS v", "*"
    ).selectExpr("user", "v.*", "timestamp", "topic", "partition", "offset")


def _orders(frame: Any) -> Any:
    return _parsed(frame, "order INT, amount INT")


def _payments(frame: Any) -> Any:
    return _parsed(frame, "order INT, paid INT")


def _json(nested: object) -> str:
    return json.dumps(nested)


# --- batch ---------------------------------------------------------------------------------------


@batch
def several_topics_from_earliest_to_latest(reader: Reader) -> Any:
    return reader.batch(f"{ORDERS},{PAYMENTS},{USERS}")


@batch
def topics_by_a_pattern(reader: Reader) -> Any:
    # A part of a name is enough.
    return reader.batch(subscribePattern="rder|^pay")


@batch
def partitions_by_assign(reader: Reader) -> Any:
    return reader.batch(assign=_json({ORDERS: [0, 2, 7], PAYMENTS: [1]}))


@batch
def headers_and_nulls(reader: Reader) -> Any:
    return reader.batch(SHAPES, includeHeaders="true")


@batch
def between_offsets(reader: Reader) -> Any:
    return reader.batch(
        ORDERS,
        startingOffsets=_json({ORDERS: {"0": 10, "1": -2, "2": 3}}),
        endingOffsets=_json({ORDERS: {"0": 75, "1": 20, "2": -1}}),
    )


@batch
def between_times_of_each_partition(reader: Reader) -> Any:
    first, last = NOW_MS + 10_000, NOW_MS + 20 * MINUTE_MS + 20_000
    return reader.batch(
        ORDERS,
        startingOffsetsByTimestamp=_json({ORDERS: {"0": first, "1": first + 9000, "2": NOW_MS}}),
        endingOffsetsByTimestamp=_json({ORDERS: {"0": last, "1": last, "2": last}}),
    )


@batch
def between_times_of_all(reader: Reader) -> Any:
    return reader.batch(
        ORDERS,
        startingTimestamp=str(NOW_MS + 5000),
        endingTimestamp=str(NOW_MS + 20 * MINUTE_MS + 5000),
    )


@batch
def the_earliest_of_deleted_records(reader: Reader) -> Any:
    return reader.batch(TRIMMED)


@batch
def a_compacted_topic(reader: Reader) -> Any:
    return reader.batch(USERS)


@batch
def committed_records(reader: Reader) -> Any:
    return reader.batch(TRANSFERS)


@batch
def uncommitted_records(reader: Reader) -> Any:
    return reader.batch(TRANSFERS, **{"kafka.isolation.level": "read_uncommitted"})


@batch
def tasks_of_min_partitions(reader: Reader) -> Any:
    frame = reader.batch(ORDERS, minPartitions="7", endingOffsets=_ends())
    return frame.selectExpr(f"spark_partition_id() AS {TASK}", "partition", "offset")


@batch
def tasks_of_max_records_per_partition(reader: Reader) -> Any:
    frame = reader.batch(
        ORDERS, maxRecordsPerPartition="23", minPartitions="9", endingOffsets=_ends()
    )
    return frame.selectExpr(f"spark_partition_id() AS {TASK}", "partition", "offset")


def _ends() -> str:
    return _json({ORDERS: {"0": 97, "1": 21, "2": 18}})


@batch
def a_join_in_sql(reader: Reader) -> Any:
    _orders(reader.batch(ORDERS)).createOrReplaceTempView("placed")
    reader.batch(USERS).createOrReplaceTempView("named")
    return reader.spark.sql(
        "SELECT p.user, n.offset, count(*) AS orders, sum(p.amount) AS amount "
        "FROM placed p JOIN named n ON p.user = CAST(n.key AS STRING) GROUP BY p.user, n.offset"
    )


@batch
def windows_of_a_table(reader: Reader) -> Any:
    from pyspark.sql.functions import window

    return _orders(reader.batch(ORDERS)).groupBy(window("timestamp", "1 minute"), "user").count()


@batch
def a_table_with_itself(reader: Reader) -> Any:
    frame = reader.batch(ORDERS)
    return frame.union(frame).groupBy("partition", "offset").count()


# --- streams -------------------------------------------------------------------------------------


@restarted
def all_that_comes(reader: Reader) -> Any:
    return reader.stream(f"{ORDERS},{SHAPES},{USERS}", includeHeaders="true")


@restarted
def topics_that_appear(reader: Reader) -> Any:
    return reader.stream(subscribePattern="^orders")


@restarted
def from_now_on(reader: Reader) -> Any:
    return reader.stream(ORDERS, startingOffsets="latest")


@restarted
def committed_while_one_is_open(reader: Reader) -> Any:
    return reader.stream(TRANSFERS)


@restarted
def a_stream_and_a_table(reader: Reader) -> Any:
    named = reader.batch(USERS).selectExpr(
        "CAST(key AS STRING) AS user", "CAST(value AS STRING) AS name"
    )
    return _orders(reader.stream(ORDERS)).join(named, "user")


@restarted
def windows_behind_a_watermark(reader: Reader) -> Any:
    from pyspark.sql.functions import window

    orders = _orders(reader.stream(ORDERS)).withWatermark("timestamp", "30 seconds")
    return orders.groupBy(window("timestamp", "1 minute"), "user").count()


@stream
def limited_offsets(reader: Reader) -> Any:
    return reader.stream(ORDERS, maxOffsetsPerTrigger="40")


@stream
def tasks_of_limited_offsets(reader: Reader) -> Any:
    frame = reader.stream(ORDERS, maxOffsetsPerTrigger="70", minPartitions="5")
    return frame.selectExpr(f"spark_partition_id() AS {TASK}", "partition", "offset")


@stream
def uncommitted_limited_offsets(reader: Reader) -> Any:
    isolation = {"kafka.isolation.level": "read_uncommitted"}
    return reader.stream(TRANSFERS, maxOffsetsPerTrigger="40", **isolation)


@stream
def from_times(reader: Reader) -> Any:
    times = {"0": NOW_MS + 10_000, "1": NOW_MS + 30_000, "2": NOW_MS + MINUTE_MS}
    return reader.stream(ORDERS, startingOffsetsByTimestamp=_json({ORDERS: times}))


@stream
def from_a_time_that_some_do_not_reach(reader: Reader) -> Any:
    return reader.stream(
        ORDERS,
        startingTimestamp=str(NOW_MS + 20 * MINUTE_MS),
        startingOffsetsByTimestampStrategy="latest",
    )


@stream
def offsets_and_partitions_by_assign(reader: Reader) -> Any:
    return reader.stream(
        assign=_json({ORDERS: [0, 1], TRIMMED: [0]}),
        startingOffsets=_json({ORDERS: {"0": 50, "1": -1}, TRIMMED: {"0": -2}}),
    )


@stream
def dropped_duplicates(reader: Reader) -> Any:
    orders = _orders(reader.stream(ORDERS, maxOffsetsPerTrigger="90"))
    # Which one of two is kept is nobody's promise.
    return orders.withWatermark("timestamp", "1 hour").dropDuplicates(["order"]).select("order")


@stream
def two_streams_joined(reader: Reader) -> Any:
    orders = _orders(reader.stream(ORDERS, maxOffsetsPerTrigger="60"))
    payments = _payments(reader.stream(PAYMENTS, maxOffsetsPerTrigger="50"))
    return orders.select("order", "amount").join(payments.select("order", "paid"), "order")


@stream
def two_streams_in_one(reader: Reader) -> Any:
    orders = reader.stream(ORDERS, maxOffsetsPerTrigger="50")
    return orders.union(reader.stream(TRIMMED, maxOffsetsPerTrigger="20"))


assert LATE.startswith(ORDERS)
