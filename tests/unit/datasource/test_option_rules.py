"""What Spark's own tests say of the Kafka source's options, offsets in JSON, and assignment.

KafkaSourceProviderSuite, JsonUtilsSuite, KafkaOffsetReaderSuite, ConsumerStrategySuite, and the
lists of bad options of KafkaSourceSuiteBase and KafkaRelationSuite.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition

from kafkalog.datasource.offsets import StartOrEnd, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.state import PartitionState, State, TopicState
from tests.unit.datasource.logs import append_to, source


def log(root: Path) -> str:
    DirectoryLog(root).close()
    return str(root)


def load(root: Path, options: dict[str, str]) -> KafkaLogDataSource:
    """What `spark.read.load()` and `spark.readStream.load()` do."""
    data_source = KafkaLogDataSource(options={"path": str(root), **options})
    data_source.schema()
    return data_source


def batch(root: Path, options: dict[str, str]) -> list[InputPartition]:
    """Load and plan a batch."""
    data_source = load(root, options)
    return list(data_source.reader(data_source.schema()).partitions())


def stream(root: Path, options: dict[str, str]) -> KafkaLogStreamReader:
    """Load a stream and ask it for its first batch, as Spark does."""
    data_source = load(root, options)
    reader = data_source.streamReader(data_source.schema())
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    return reader


def test_a_read_parses_its_options_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DirectoryLog(tmp_path).create_topic("t")
    parse, parsed = SourceOptions.parse, []
    monkeypatch.setattr(SourceOptions, "parse", lambda given: parsed.append(given) or parse(given))
    batch(tmp_path, {"subscribe": "t"})
    assert len(parsed) == 1


# --- bad options ---------------------------------------------------------------------------------

STRATEGIES = [
    ({}, ["options must be specified", "subscribe", "subscribePattern"]),
    ({"subscribe": "t", "subscribePattern": "t.*"}, ["only one", "options can be specified"]),
    ({"subscribe": "t", "assign": '{"a":[0]}'}, ["only one", "options can be specified"]),
    ({"assign": ""}, ["no topicpartitions to assign"]),
    ({"subscribe": ""}, ["no topics to subscribe"]),
    ({"subscribePattern": ""}, ["pattern to subscribe is empty"]),
]


@pytest.mark.parametrize(("options", "fragments"), STRATEGIES)
def test_a_read_that_does_not_say_what_to_read_is_refused_at_load(
    tmp_path: Path, options: dict[str, str], fragments: list[str]
) -> None:
    log(tmp_path)

    with pytest.raises(InvalidInputError) as error:
        load(tmp_path, options)

    assert [f for f in fragments if f.lower() not in str(error.value).lower()] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        (
            {"endingOffsetsByTimestamp": '{"t": {"0": 1000}}'},
            "ending timestamp not valid in streaming queries",
        ),
        (
            {"endingOffsetsByTimestamp": '{"t": {"0": 1000}}', "endingTimestamp": "5"},
            "ending timestamp not valid in streaming queries",
        ),
    ],
)
def test_an_end_is_refused_in_a_stream_and_fine_in_a_batch(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    append_to(tmp_path, "t", {0: 1})

    with pytest.raises(InvalidInputError, match=message):
        stream(tmp_path, {"subscribe": "t", **options})

    batch(tmp_path, {"subscribe": "t", **options})


def test_an_end_for_all_partitions_by_time_passes_in_a_stream_as_it_does_in_spark(
    tmp_path: Path,
) -> None:
    append_to(tmp_path, "t", {0: 1})

    assert stream(tmp_path, {"subscribe": "t", "endingTimestamp": "5"}).initialOffset()


def test_a_minimum_above_the_maximum_is_refused_at_load(tmp_path: Path) -> None:
    log(tmp_path)
    limits = {"minOffsetsPerTrigger": "20", "maxOffsetsPerTrigger": "15"}

    with pytest.raises(
        InvalidInputError,
        match=r"value of minOffsetPerTrigger\(20\) is higher than the maxOffsetsPerTrigger\(15\)",
    ):
        load(tmp_path, {"subscribe": "t", **limits})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "latest"}, "starting offset can't be latest for batch queries on K"),
        (
            {"startingOffsets": '{"t":{"0":-1}}'},
            "startingOffsets for t-0 can't be latest for batch queries on Kafka",
        ),
        (
            {"startingOffsets": '{"t":"latest"}'},
            "startingOffsets for t can't be latest for batch queries on Kafka",
        ),
        ({"endingOffsets": "earliest"}, "ending offset can't be earliest for batch queries on Ka"),
        (
            {"endingOffsets": '{"t":{"0":-2}}'},
            "ending offset for t-0 can't be earliest for batch queries on Kafka",
        ),
    ],
)
def test_an_end_that_is_a_start_is_refused_in_a_batch(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    append_to(tmp_path, "t", {0: 1})

    with pytest.raises(InvalidInputError, match=message):
        batch(tmp_path, {"subscribe": "t", **options})


def test_a_start_that_a_time_replaces_is_not_refused_in_a_batch(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1})

    assert batch(
        tmp_path, {"subscribe": "t", "startingOffsets": "latest", "startingTimestamp": "1"}
    )


@pytest.mark.parametrize(
    "name",
    [
        "auto.offset.reset",
        "enable.auto.commit",
        "interceptor.classes",
        "key.deserializer",
        "value.deserializer",
    ],
)
@pytest.mark.parametrize("value", ["someValue", "none", "earliest", "latest"])
def test_client_options_that_would_change_the_read_are_refused_at_load(
    tmp_path: Path, name: str, value: str
) -> None:
    log(tmp_path)
    with pytest.raises(InvalidInputError, match=f"Kafka option '{name}' is not supported"):
        load(tmp_path, {"subscribe": "t", f"kafka.{name.upper()}": value})


def test_a_path_without_a_log_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^option path: .*no log here"):
        load(tmp_path, {"subscribe": "t"})


def test_a_topic_that_does_not_exist_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1})

    for plan in (batch, stream):
        with pytest.raises(InvalidInputError, match=r"topic 'bills' does not exist.*: t$"):
            plan(tmp_path, {"subscribe": "bills"})


# --- letter case ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [str.upper, str.lower])
def test_names_of_options_are_matched_in_any_letter_case(change: Callable[[str], str]) -> None:
    parsed = SourceOptions.parse(
        {
            change(name): value
            for name, value in {
                "path": "/log",
                "subscribe": "t",
                "kafkaConsumer.pollTimeoutMs": "1111",
                "maxOffsetsPerTrigger": "1111",
                "minOffsetsPerTrigger": "1111",
                "maxTriggerDelay": "1111",
                "fetchOffset.numRetries": "1111",
                "fetchOffset.retryIntervalMs": "1111",
            }.items()
        }
    )

    assert parsed.max_offsets_per_trigger == parsed.min_offsets_per_trigger == 1111
    assert parsed.max_trigger_delay_ms == 1111
    assert parsed.ignored == (
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "kafkaConsumer.pollTimeoutMs",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("startingOffsets", "earLiEst", StartOrEnd(everywhere=-2)),
        ("endingOffsets", "laTest", StartOrEnd(everywhere=-1)),
        (
            "startingOffsets",
            '{"topic-A":{"0":23}}',
            StartOrEnd(partitions={TopicPartition("topic-A", 0): 23}),
        ),
    ],
)
def test_words_of_offsets_are_matched_in_any_letter_case_and_topics_are_not(
    name: str, value: str, expected: StartOrEnd
) -> None:
    parsed = SourceOptions.parse({"path": "/log", "subscribe": "t", name: value})

    assert expected in (parsed.starting_offsets, parsed.ending_offsets)


# --- JSON ----------------------------------------------------------------------------------------


def test_assigned_partitions_are_parsed() -> None:
    parsed = SourceOptions.parse({"path": "/log", "assign": '{"topicA":[0,1],"topicB":[4,6]}'})

    assert [str(p) for p in parsed.subscription.assigned] == [
        *("topicA-0", "topicA-1", "topicB-4", "topicB-6")
    ]


def test_offsets_by_partition_are_parsed() -> None:
    parsed = StartOrEnd.parse(
        '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}', option="startingOffsets"
    )

    assert parsed.topics == {}
    assert {str(p): offset for p, offset in parsed.partitions.items()} == {
        "topicA-0": 23,
        "topicA-1": -1,
        "topicB-0": -2,
    }


def test_offsets_by_topic_are_parsed() -> None:
    parsed = StartOrEnd.parse('{"topicA":"earliest","topicB":"latest"}', option="startingOffsets")

    assert parsed.partitions == {}
    assert parsed.topics == {"topicA": -2, "topicB": -1}


def test_offsets_by_topic_and_by_partition_are_parsed_side_by_side() -> None:
    parsed = StartOrEnd.parse(
        '{"topicA":"earliest","topicB":{"0":23,"1":-1},"topicC":"LATEST"}', option="startingOffsets"
    )

    assert {str(p): offset for p, offset in parsed.partitions.items()} == {
        "topicB-0": 23,
        "topicB-1": -1,
    }
    assert parsed.topics == {"topicA": -2, "topicC": -1}


def test_a_topic_in_both_forms_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="topicA has both a topic-level offset"):
        StartOrEnd.parse('{"topicA":"earliest","topicA":{"0":23}}', option="startingOffsets")


@pytest.mark.parametrize(
    "text",
    [
        '{"topicA":"first"}',
        '{"topicA":[0,1]}',
        '{"topicA":{"0":"earliest"}}',
        '"earliest"',
        "not json",
    ],
)
def test_malformed_offsets_are_refused_and_shown(text: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        StartOrEnd.parse(text, option="startingOffsets")

    assert str(error.value).startswith("startingOffsets: Expected e.g. ")
    assert text in str(error.value)


# --- isolation level -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, "read_committed"),
        ({"kafka.isolation.level": "read_uncommitted"}, "read_uncommitted"),
        ({"kafka.isolation.level": "read_committed"}, "read_committed"),
        ({"kafka.isolation.level": "READ_COMMITTED"}, "read_committed"),
    ],
)
def test_the_isolation_level_is_read_committed_unless_given(
    given: dict[str, str], level: str
) -> None:
    assert SourceOptions.parse({"path": "/log", "subscribe": "t", **given}).isolation_level == level


def test_another_isolation_level_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"kafka.isolation.level must be read_committed or"):
        SourceOptions.parse(
            {"path": "/log", "subscribe": "t", "kafka.isolation.level": "intentionally_invalid"}
        )


# --- offsets that do not fit ---------------------------------------------------------------------


def test_offsets_must_name_all_partitions(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1, 1: 1, 2: 1})
    options = {
        "subscribe": "t",
        "startingOffsets": '{"t":{"0":-2,"1":-2}}',
        "endingOffsets": '{"t":{"0":-1,"1":3}}',
    }

    with pytest.raises(
        InvalidInputError,
        match=r"KAFKA_START_OFFSET_DOES_NOT_MATCH_ASSIGNED.*startingOffsets.*: t-0, t-1.*t-2",
    ):
        batch(tmp_path, options)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("name", "position"),
    [("startingOffsetsByTimestamp", "start"), ("endingOffsetsByTimestamp", "end")],
)
def test_times_must_name_all_partitions_and_no_other(
    tmp_path: Path, count: int, name: str, position: str
) -> None:
    append_to(tmp_path, "t", {0: 1, 1: 1, 2: 1})
    times = ",".join(f'"{number}":-2' for number in range(count))

    with pytest.raises(
        InvalidInputError,
        match=rf"KAFKA_TIMESTAMP_OFFSET_DOES_NOT_MATCH_ASSIGNED.*based {position} offsets "
        rf"\({name}\).* Specified: t-0, t-1.*Assigned: t-0, t-1, t-2$",
    ):
        batch(tmp_path, {"subscribe": "t", name: f'{{"t":{{{times}}}}}'})


# --- assignment ----------------------------------------------------------------------------------

STATE = State(
    topics={
        name: TopicState(name, "id", {}, (PartitionState(),) * count)
        for name, count in {"pattern-a": 2, "pattern-b": 3, "other": 2}.items()
    }
)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"assign": '{"pattern-b":[0,2]}'}, "pattern-b-0 pattern-b-2"),
        ({"assign": '{"pattern-a":[2]}'}, ""),
        (
            {"subscribe": "pattern-a,pattern-b"},
            "pattern-a-0 pattern-a-1 pattern-b-0 pattern-b-1 pattern-b-2",
        ),
        (
            {"subscribePattern": "pattern.*"},
            "pattern-a-0 pattern-a-1 pattern-b-0 pattern-b-1 pattern-b-2",
        ),
    ],
)
def test_partitions_are_those_of_the_strategy_that_exist(
    strategy: dict[str, str], expected: str
) -> None:
    options = SourceOptions.parse({"path": "/log", **strategy})

    assert [str(p) for p in options.subscription.partitions(STATE)] == expected.split()


def test_a_stream_takes_the_options_of_the_kafka_source_as_they_are(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 1})
    options = {
        "kafka.bootstrap.servers": "h:9092",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.group.id": "g",
        "groupIdPrefix": "p",
        "kafkaConsumer.pollTimeoutMs": "1000",
        "startingOffsetsByTimestampStrategy": "LATEST",
        "failOnDataLoss": "false",
        "minPartitions": "2",
        "maxRecordsPerPartition": "100",
    }

    assert source(tmp_path, **options).schema().fieldNames()[0] == "key"
