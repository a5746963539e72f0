"""Options that are wrong, and the words of the connector's error that kafkalog's has too.

The class of an error, where it has one, is no part of the connector's text: only ours shows it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.conformance.spark_twin_topics import NOW_MS, ORDERS, PAYMENTS, TRIMMED


class Case(NamedTuple):
    words: tuple[str, ...]
    options: dict[str, str]
    is_stream: bool = False


def _orders(*words: str, is_stream: bool = False, **options: str) -> Case:
    return Case(words, {"subscribe": ORDERS, **options}, is_stream=is_stream)


_LATER = str(NOW_MS * 2)
CASES = {
    "no topics": Case(
        ("One of the following options must be specified for Kafka source",),
        {"startingOffsets": "earliest"},
    ),
    "topics in two ways": _orders(
        "Only one of the following options can be specified for Kafka source", assign="{}"
    ),
    "assign is no JSON object": Case(("No topicpartitions to assign",), {"assign": "orders"}),
    "assign is bad JSON": Case(
        ('Expected e.g. {"topicA":[0,1],"topicB":[0,1]}',), {"assign": '{"orders":"0"}'}
    ),
    "subscribe is empty": Case(("No topics to subscribe to",), {"subscribe": " , "}),
    "pattern is blank": Case(("Pattern to subscribe is empty",), {"subscribePattern": " "}),
    "offsets are bad JSON": _orders(
        'Expected e.g. {"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}', startingOffsets='{"orders":'
    ),
    "timestamp is no number": _orders("Expected a single long value", startingTimestamp="noon"),
    "batch starts at the latest": _orders(
        "starting offset can't be latest for batch queries on Kafka", startingOffsets="latest"
    ),
    "batch starts at a -1": _orders(
        "can't be latest for batch queries on Kafka",
        startingOffsets='{"orders":{"0":0,"1":-1,"2":0}}',
    ),
    "batch ends at the earliest": _orders(
        "ending offset can't be earliest for batch queries on Kafka", endingOffsets="earliest"
    ),
    "batch ends at a -2": _orders(
        "can't be earliest for batch queries on Kafka",
        endingOffsets='{"orders":{"0":0,"1":-2,"2":0}}',
    ),
    "minPartitions is zero": _orders("minPartitions must be positive", minPartitions="0"),
    "maxRecordsPerPartition is zero": _orders(
        "maxrecordsperpartition must be positive", maxRecordsPerPartition="0"
    ),
    "start and end name different partitions": _orders(
        "The specified start offset and end offset should have the same topic-partitions",
        startingOffsets='{"orders":{"0":0,"1":0}}',
        endingOffsets='{"orders":{"0":5,"2":5}}',
    ),
    "start behind end": _orders(
        "The specified start offset 9 is greater than the end offset 5",
        "for topic orders partition 0",
        startingOffsets='{"orders":{"0":9,"1":0,"2":0}}',
        endingOffsets='{"orders":{"0":5,"1":5,"2":5}}',
    ),
    "start behind an earliest end": _orders(
        "The resolved start offset 15 is greater than the resolved end offset 1",
        startingTimestamp=str(NOW_MS + 30_000),
        endingTimestamp=str(NOW_MS + 2000),
    ),
    "offsets of other partitions": _orders(
        "Partitions specified for Kafka start offsets don't match what are assigned",
        startingOffsets='{"orders":{"0":0}}',
    ),
    "timestamps of other partitions": _orders(
        "Partitions specified for Kafka timestamp based start offsets",
        startingOffsetsByTimestamp='{"orders":{"0":0}}',
    ),
    "no record so late": _orders(
        "No offset matched from request of topic-partition", "orders-0", startingTimestamp=_LATER
    ),
    "stream with ending offsets": _orders(
        "ending offset not valid in streaming queries", is_stream=True, endingOffsets="latest"
    ),
    "stream with ending timestamps": _orders(
        "ending timestamp not valid in streaming queries",
        is_stream=True,
        endingOffsetsByTimestamp='{"orders":{"0":0,"1":0,"2":0}}',
    ),
    "stream with more at least than at most": _orders(
        "The value of minOffsetPerTrigger(20) is higher than the maxOffsetsPerTrigger(15)",
        is_stream=True,
        minOffsetsPerTrigger="20",
        maxOffsetsPerTrigger="15",
    ),
    "stream from offsets of other partitions": _orders(
        "you must specify all TopicPartitions",
        "Use -1 for latest, -2 for earliest, if you don't care",
        is_stream=True,
        startingOffsets='{"orders":{"0":0}}',
    ),
    "stream from a time with no record so late": Case(
        ("No offset matched from request of topic-partition",),
        {"subscribe": f"{PAYMENTS},{TRIMMED}", "startingTimestamp": _LATER},
        is_stream=True,
    ),
    "forbidden client option": _orders(
        "auto.offset.reset", "is not supported", **{"kafka.auto.offset.reset": "earliest"}
    ),
    "isolation level": _orders("isolation", **{"kafka.isolation.level": "read_everything"}),
}
