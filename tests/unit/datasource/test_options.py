import pickle
from pathlib import Path

import pytest

from kafkalog.datasource.offsets import StartOrEnd, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.start_or_end_time import StartOrEndTime
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState

T0 = TopicPartition("t", 0)
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
    assert options.starting_time is None
    assert options.ending_time is None
    assert options.non_matching == "error"
    assert options.min_offsets_per_trigger is None
    assert options.max_trigger_delay_ms == 15 * 60 * 1000
    assert options.max_records_per_partition is None
    assert options.partitioner == "any"
    assert options.stream_fault is None


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
        ({"withObsolete": "true"}, r"option withObsolete: it needs view=latest"),
        ({"view": "latest", "minPartitions": "2"}, r"minPartitions cannot be set with view=latest"),
        ({"view": "latest", "startingOffsets": "latest"}, r"startingOffsets.* cannot be set"),
        ({"view": "latest", "startingTimestamp": "1"}, r"startingTimestamp cannot be set"),
        ({"view": "latest", "maxRecordsPerPartition": "1"}, r"maxRecordsPerPartition cannot be"),
        ({"maxRecordsPerPartition": "0"}, r"maxRecordsPerPartition must be positive"),
        ({"maxRecordsPerPartition": "x"}, r"maxRecordsPerPartition must be an integer"),
        ({"minPartitions": "2147483648"}, r"minPartitions must be an integer of at most"),
        ({"minOffsetsPerTrigger": "1e3"}, r"minOffsetsPerTrigger must be an integer"),
        (
            {"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "15"},
            r"value of minOffsetPerTrigger\(20\) is higher than the maxOffsetsPerTrigger\(15\)",
        ),
        ({"startingTimestamp": "now"}, r"startingTimestamp: Expected a single long value, got"),
        ({"endingTimestamp": "1.5"}, r"endingTimestamp: Expected a single long value, got '1.5'"),
        ({"startingTimestamp": "9223372036854775808"}, r"Expected a single long value"),
        ({"startingTimestamp": "-4"}, r"startingTimestamp: expected epoch milliseconds, or -1"),
        ({"startingOffsetsByTimestamp": "5"}, r"startingOffsetsByTimestamp: Expected e\.g\."),
        ({"startingOffsetsByTimestamp": '{"t":"latest"}'}, r"Expected e\.g\. \{\"topicA\": \{"),
        ({"endingOffsetsByTimestamp": '{"t":{"0":"5"}}'}, r"endingOffsetsByTimestamp: Expected"),
        ({"endingOffsetsByTimestamp": '{"t":{"x":5}}'}, r"endingOffsetsByTimestamp: Expected"),
        ({"startingOffsetsByTimestampStrategy": "earliest"}, r"Strategy must be error or latest"),
        ({"partitioner": "random"}, r"partitioner must be any or murmur2"),
        ({"_mockSystemTime": ""}, r"unknown option '_mocksystemtime'"),
        (
            {"startngTimestamp": "1"},
            r"unknown option 'startngtimestamp', did you mean startingTime",
        ),
        (
            {"startingOffsets": '{"t":{"0":1}}', "endingOffsets": '{"t":{"1":2}}'},
            r"MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET",
        ),
        (
            {"startingOffsets": '{"t":{"0":3}}', "endingOffsets": '{"t":{"0":2}}'},
            r"UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"t":{"0":1}}',
                "endingOffsetsByTimestamp": '{"t":{"1":2}}',
            },
            r"MISMATCHED_TOPIC_PARTITIONS_BETWEEN_START_OFFSET_AND_END_OFFSET.*ByTimestamp: t-0;",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"t":{"0":3}}',
                "endingOffsetsByTimestamp": '{"t":{"0":2}}',
            },
            r"UNRESOLVED_START_OFFSET_GREATER.*start timestamp 3 is greater than the end times",
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
        ({"subscribePattern": "("}, r"subscribePattern '\(': not a regular expression of Python"),
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


def test_client_options_are_accepted_and_named_as_without_effect() -> None:
    extra = {"kafka.bootstrap.servers": "h:1", "groupidprefix": "g", "fetchOffset.numRetries": "3"}

    assert SourceOptions.parse(GOOD | extra).ignored == (
        "fetchOffset.numRetries",
        "groupIdPrefix",
        "kafka.bootstrap.servers",
    )


@pytest.mark.parametrize(
    "name", ["kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"]
)
@pytest.mark.parametrize("value", ["ten", "1.5", "9223372036854775808"])
def test_an_option_without_effect_must_still_be_a_number(name: str, value: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must be an integer"):
        SourceOptions.parse(GOOD | {name.upper(): value})


def test_times_win_over_offsets_and_one_for_all_over_one_for_each() -> None:
    offsets = {"startingOffsets": "earliest", "endingOffsets": "latest"}
    times = {
        "startingOffsetsByTimestamp": '{"t":{"0":5}}',
        "endingOffsetsByTimestamp": '{"t":{"0":7}}',
    }
    everywhere = {"startingTimestamp": " 6 ", "endingTimestamp": "8"}

    by_offset = SourceOptions.parse(GOOD | offsets)
    by_time = SourceOptions.parse(GOOD | offsets | times)
    by_all = SourceOptions.parse(GOOD | offsets | times | everywhere)

    assert by_offset.starting_offsets == StartOrEnd(everywhere=-2)
    assert by_offset.ending_offsets == StartOrEnd(everywhere=-1)
    assert (by_time.starting_offsets, by_time.ending_offsets) == (None, None)
    assert by_time.starting_time == StartOrEndTime(partitions={T0: 5})
    assert by_time.ending_time == StartOrEndTime(partitions={T0: 7})
    assert by_all.starting_time == StartOrEndTime(everywhere=6)
    assert by_all.ending_time == StartOrEndTime(everywhere=8)


def test_a_weaker_start_that_is_given_too_is_not_looked_at() -> None:
    extra = {"startingTimestamp": "6", "startingOffsets": "nonsense"}

    assert SourceOptions.parse(GOOD | extra).starting_offsets is None


def test_start_and_end_are_judged_apart() -> None:
    extra = {"startingTimestamp": "6", "endingOffsets": '{"t":{"0":3}}'}

    options = SourceOptions.parse(GOOD | extra)

    assert options.starting_time == StartOrEndTime(everywhere=6)
    assert options.ending_offsets == StartOrEnd(partitions={T0: 3})


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("15m", 900_000),
        ("10", 10),
        ("10ms", 10),
        ("1500us", 1),
        ("-1500us", -1),
        ("-3s", -3_000),
        (" 7S ", 7_000),
        ("1min", 60_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("9223372036854775807d", 2**63 - 1),
    ],
)
def test_a_span_of_time_is_what_spark_takes_it_for(text: str, ms: int) -> None:
    assert SourceOptions.parse(GOOD | {"maxTriggerDelay": text}).max_trigger_delay_ms == ms


@pytest.mark.parametrize("text", ["", "2 h", "1x", "+5s", "1.5s", "9223372036854775808"])
def test_what_spark_takes_for_no_span_of_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="maxTriggerDelay: Time must be specified as sec"):
        SourceOptions.parse(GOOD | {"maxTriggerDelay": text})


def test_options_of_streams_are_named_for_a_batch_to_warn_of() -> None:
    extra = {"maxoffsetspertrigger": "9", "minOffsetsPerTrigger": "3", "MAXTRIGGERDELAY": "1s"}

    assert SourceOptions.parse(GOOD).warn_of_batch == ()
    assert SourceOptions.parse(GOOD | extra).warn_of_batch == (
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
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

    with pytest.raises(InvalidInputError, match=r"a log is a directory, this is a file"):
        SourceOptions.parse(GOOD | {"path": str(file)})
