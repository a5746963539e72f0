import pickle
from pathlib import Path

import pytest

from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.state import PartitionState, State, TopicState

GOOD = {"path": "/log", "subscribe": "t"}
STATE = State(
    topics={
        name: TopicState(name, "id", {}, (PartitionState(),) * count)
        for name, count in {"orders": 2, "payments": 1, "__consumer_offsets": 1}.items()
    }
)


def test_defaults_are_those_of_the_kafka_source() -> None:
    options = SourceOptions.parse(GOOD)

    assert options.directories == ("/log",)
    assert options.subscription.topics == ("t",)
    assert options.starting_offsets is None
    assert options.ending_offsets is None
    assert options.fail_on_data_loss
    assert not options.include_headers
    assert not options.latest_view
    assert options.isolation_level == "read_committed"
    assert options.max_offsets_per_trigger is None
    assert options.min_partitions is None


def test_keys_are_matched_in_any_letter_case() -> None:
    options = SourceOptions.parse(
        {
            "PATH": "/log",
            "SubScribePattern": " t.* ",
            "FAILONDATALOSS": "False",
            "includeheaders": "TRUE",
            "maxOFFSETSperTrigger": "9223372036854775807",
            "KAFKA.ISOLATION.LEVEL": "read_uncommitted",
        }
    )

    assert options.subscription.pattern == "t.*"
    assert (options.fail_on_data_loss, options.include_headers) == (False, True)
    assert options.max_offsets_per_trigger == 2**63 - 1
    assert options.isolation_level == "read_uncommitted"


@pytest.mark.parametrize("name", ["topic", "txnAppId", "checkpointLocation", "topic.segment.bytes"])
def test_an_option_of_a_write_is_named_as_one(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"option {name} is an option of a write"):
        SourceOptions.parse(GOOD | {name: "x"})


def test_parsed_options_are_plain_data() -> None:
    options = SourceOptions.parse(GOOD | {"startingOffsets": '{"t":{"0":1}}'})

    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"subscirbe": "t"}, r"unknown option 'subscirbe', did you mean subscribe.*minPartitions"),
        ({"assign": '{"t":[0]}'}, r"Only one of the following options can be specified"),
        ({"subscribe": " , "}, r"No topics to subscribe to"),
        ({"subscribe": "a b"}, r"topic name 'a b' is not allowed"),
        ({"startingOffsets": "oldest"}, r"Expected e\.g\."),
        ({"minPartitions": "a"}, r"minPartitions must be an integer"),
        ({"minPartitions": "1.0"}, r"minPartitions must be an integer"),
        ({"minPartitions": "0"}, r"minPartitions must be positive"),
        ({"minPartitions": "-1"}, r"minPartitions must be positive"),
        ({"maxOffsetsPerTrigger": "0"}, r"maxOffsetsPerTrigger must be positive"),
        ({"maxOffsetsPerTrigger": "9223372036854775808"}, r"maxOffsetsPerTrigger must be an int"),
        ({"failOnDataLoss": "no"}, r"failOnDataLoss must be true or false"),
        ({"kafka.isolation.level": "dirty"}, r"must be read_committed or read_uncommitted"),
        ({"view": "newest"}, r"view must be changelog or latest"),
        ({"kafka.auto.offset.reset": "x"}, r"Kafka option 'auto\.offset\.reset' is not supported"),
        ({"kafka.Key.Deserializer": "x"}, r"Kafka option 'key\.deserializer' is not supported"),
        ({"view": "latest", "minPartitions": "2"}, r"minPartitions cannot be set with view=latest"),
        ({"view": "latest", "startingOffsets": "latest"}, r"startingOffsets cannot be set"),
        (
            {"startingOffsets": '{"t":{"0":1}}', "endingOffsets": '{"t":{"1":2}}'},
            r"MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET",
        ),
        (
            {"startingOffsets": '{"t":{"0":3}}', "endingOffsets": '{"t":{"0":2}}'},
            r"UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET",
        ),
    ],
)
def test_a_bad_option_is_refused(extra: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SourceOptions.parse(GOOD | extra)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({}, r"One of the following options must be specified for Kafka source"),
        ({"subscribePattern": "  "}, r"Pattern to subscribe is empty"),
        ({"subscribePattern": "("}, r"no regular expression"),
        ({"assign": "t"}, r"No topicpartitions to assign"),
        ({"assign": "{}"}, r"No topicpartitions to assign"),
        ({"assign": '{"t":0}'}, r"Expected e\.g\. \{\"topicA\":\[0,1\]"),
        ({"assign": '{"t":[-1]}'}, r"Expected e\.g\."),
        ({"assign": '{"t":[0]'}, r"Expected e\.g\."),
    ],
)
def test_a_bad_strategy_is_refused(strategy: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SourceOptions.parse({"path": "/log"} | strategy)


@pytest.mark.parametrize(
    "name",
    [
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
        "endingTimestamp",
        "endingOffsetsByTimestamp",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "maxRecordsPerPartition",
    ],
)
def test_an_option_of_the_kafka_source_that_is_not_built_yet_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"option {name} is not supported in this version"):
        SourceOptions.parse(GOOD | {name.lower(): "1"})


def test_client_options_are_accepted_and_named_as_without_effect() -> None:
    extra = {"kafka.bootstrap.servers": "h:1", "groupIdPrefix": "g", "fetchOffset.numRetries": "3"}

    assert SourceOptions.parse(GOOD | extra).ignored == (
        "fetchoffset.numretries",
        "groupidprefix",
        "kafka.bootstrap.servers",
    )


def test_names_that_spark_adds_for_a_table_are_let_through() -> None:
    assert SourceOptions.parse(GOOD | {"provider": "kafkalog", "owner": "me", "comment": "x"})


def partitions(strategy: dict[str, str]) -> list[str]:
    options = SourceOptions.parse({"path": "/log"} | strategy)
    return [str(partition) for partition in options.subscription.partitions(STATE)]


def test_subscribed_topics_bring_all_their_partitions() -> None:
    assert partitions({"subscribe": "payments, orders ,,payments"}) == [
        "orders-0",
        "orders-1",
        "payments-0",
    ]


def test_a_pattern_matches_a_part_of_the_name_and_no_internal_topic() -> None:
    assert partitions({"subscribePattern": "a|ff"}) == ["payments-0"]
    assert partitions({"subscribePattern": "offsets"}) == []


def test_assigned_partitions_that_do_not_exist_are_left_out() -> None:
    assert partitions({"assign": '{"orders":[1,7],"payments":[0]}'}) == ["orders-1", "payments-0"]
    assert partitions({"assign": '{"payments":[3]}'}) == []


@pytest.mark.parametrize("strategy", [{"subscribe": "bills"}, {"assign": '{"bills":[0]}'}])
def test_a_missing_topic_is_an_error_that_lists_those_there_are(strategy: dict[str, str]) -> None:
    with pytest.raises(UnknownTopicError, match=r"bills.*orders.*payments"):
        partitions(strategy)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(InvalidInputError, match=r"is a file, expected a log directory"):
        SourceOptions.parse(GOOD | {"path": str(file)})
