"""The options of a write."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError
from kafkalog.sink.options import SinkOptions


def parse(**options: str) -> SinkOptions:
    return SinkOptions.parse({"path": "/log", **options})


def test_defaults() -> None:
    options = parse()
    assert options.root == Path("/log")
    assert (options.topic, options.target, options.new_topic.partitions) == (None, "*", 1)
    assert options.new_topic.config == {"cleanup.policy": "compact"}
    assert (options.codec, options.batch_size, options.reset_writer) == (None, 65536, False)


def test_letter_case_does_not_matter() -> None:
    options = SinkOptions.parse(
        {"PATH": "/log", "NumPartitions": "3", "TXNAPPID": "a", "txnversion": "7"}
    )
    assert (options.new_topic.partitions, options.txn_app_id, options.txn_version) == (3, "a", 7)


def test_the_topic_is_trimmed() -> None:
    assert parse(topic=" t ").topic == "t"


def test_topic_configs_are_kafkas_and_compact_unless_given() -> None:
    config = parse(**{"topic.segment.bytes": "1048576"}).new_topic.config
    assert config == {"cleanup.policy": "compact", "segment.bytes": "1048576"}
    config = parse(**{"topic.cleanup.policy": "delete"}).new_topic.config
    assert config == {"cleanup.policy": "delete"}


def test_what_was_given_for_new_topics_is_told_from_defaults() -> None:
    assert parse().given_for_topics == {}
    options = parse(numPartitions="1", **{"topic.segment.bytes": "1048576"})
    assert options.given_for_topics == {"numPartitions": "1", "topic.segment.bytes": "1048576"}


def test_a_view_that_takes_insert_names_one_topic_to_read_and_to_write() -> None:
    given = {
        "path": "/log",
        "subscribe": "t ",
        "view": "latest",
        "topic": "t",
        "numPartitions": "2",
    }
    assert SinkOptions.parse(given).new_topic.partitions == 2
    assert SourceOptions.parse(given).latest_view
    for other in ({"topic": "u"}, {"subscribe": "t,u"}):
        with pytest.raises(InvalidInputError, match="option of a read"):
            SinkOptions.parse({**given, **other})
        with pytest.raises(InvalidInputError, match="option of a write"):
            SourceOptions.parse({**given, **other})


@pytest.mark.parametrize("name", ["subscribe", "assign", "startingOffsets", "endingTimestamp"])
def test_an_option_of_a_read_is_named_as_one(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"option {name} is an option of a read"):
        parse(**{name.upper(): "x"})


def test_batch_size_wins_over_kafka_batch_size() -> None:
    assert parse(**{"kafka.batch.size": "100"}).batch_size == 100
    assert parse(**{"kafka.batch.size": "100", "batch.size": "200"}).batch_size == 200


def test_client_options_are_accepted_and_named_as_ignored() -> None:
    options = parse(**{"kafka.bootstrap.servers": "x:9092", "kafka.acks": "all"})
    assert options.ignored == ("kafka.acks", "kafka.bootstrap.servers")


def test_what_spark_adds_is_accepted() -> None:
    options = parse(checkpointLocation="/c", queryName="q", asyncProgressTrackingEnabled="false")
    assert options.checkpoint == "/c"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"txnApId": "x"}, "did you mean txnAppId"),
        ({"nonsense": "x"}, "known: path, topic, numPartitions"),
        ({"txnAppId": "x"}, "txnAppId is given without txnVersion"),
        ({"txnVersion": "1"}, "txnVersion is given without txnAppId"),
        ({"txnAppId": "x", "txnVersion": "-1"}, "txnVersion: expected a whole number from 0"),
        ({"txnAppId": " ", "txnVersion": "1"}, "txnAppId: expected a name"),
        ({"numPartitions": "0"}, "numPartitions: expected a whole number from 1"),
        ({"numPartitions": "two"}, "found 'two'"),
        ({"topic": "a/b"}, "topic name 'a/b' is not allowed"),
        ({"topic": " "}, "topic name '' is not allowed"),
        ({"topic.cleanup.polcy": "delete"}, "did you mean cleanup.policy"),
        ({"topic.segment.bytes": "1"}, "segment.bytes: expected a whole number in"),
        ({"kafka.compression.type": "brotli"}, "expected one of none, gzip, snappy, lz4, zstd"),
        ({"batch.size": "0"}, "batch.size: expected a whole number from 1"),
        ({"resetWriter": "yes"}, "resetWriter: expected true or false"),
        ({"kafka.key.serializer": "x"}, "Kafka option 'key.serializer' is not supported"),
        ({"path": "log"}, "path 'log' is relative"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text) as caught:
        parse(**options)
    assert "\n" not in str(caught.value)
