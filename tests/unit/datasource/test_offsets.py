import json

import pytest

from kafkalog.datasource.offsets import (
    EARLIEST,
    LATEST,
    StartOrEnd,
    TopicPartition,
    from_json,
    to_json,
)
from kafkalog.errors import InvalidInputError

A0, A1, A10, B0 = (
    TopicPartition("a", 0),
    TopicPartition("a", 1),
    TopicPartition("a", 10),
    TopicPartition("b", 0),
)


def test_equal_offsets_give_equal_text_whatever_their_order() -> None:
    one = to_json({B0: 5, A10: 3, A1: 2, A0: 1})
    other = to_json({A0: 1, A1: 2, A10: 3, B0: 5})

    assert json.dumps(one) == json.dumps(other) == '{"a": {"0": 1, "1": 2, "10": 3}, "b": {"0": 5}}'


def test_offsets_survive_json() -> None:
    offsets = {A0: 2**63 - 1, A1: LATEST, B0: EARLIEST}

    assert from_json(json.loads(json.dumps(to_json(offsets)))) == offsets


def test_offsets_of_a_kafka_checkpoint_are_read() -> None:
    assert from_json(json.loads('{"b":{"0":7},"a":{"10":3,"1":2}}')) == {B0: 7, A10: 3, A1: 2}


@pytest.mark.parametrize(("text", "offset"), [("earliest", -2), (" LATEST ", -1), ("Latest", -1)])
def test_a_word_holds_for_all_partitions(text: str, offset: int) -> None:
    assert StartOrEnd.parse(text, option="startingOffsets").offsets(
        [B0, A0], option="startingOffsets"
    ) == {A0: offset, B0: offset}


def test_json_names_each_partition() -> None:
    parsed = StartOrEnd.parse('{"a":{"0":23,"1":-1},"b":{"0":-2}}', option="startingOffsets")

    assert parsed.offsets([A0, A1, B0], option="startingOffsets") == {
        A0: 23,
        A1: LATEST,
        B0: EARLIEST,
    }


def test_json_names_a_topic_at_once() -> None:
    parsed = StartOrEnd.parse('{"a":"earliest","b":{"0":23}}', option="startingOffsets")

    assert parsed.offsets([A0, A1, B0], option="startingOffsets") == {
        A0: EARLIEST,
        A1: EARLIEST,
        B0: 23,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest_records",
        "[]",
        "{",
        '{"a":1}',
        '{"a":"first"}',
        '{"a":{"x":1}}',
        '{"a":{"0":"1"}}',
        '{"a":{"0":1.5}}',
        '{"a":{"0":true}}',
        '{"a":{"0":-3}}',
        '{"a":{"-1":0}}',
        '{"a":{"0":1},"a":{"0":2}}',
        '{"a":{"0":9223372036854775808}}',
        "[" * 100_000,
    ],
)
def test_bad_json_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"Expected e\.g\. .*\"topicA\":.*, got "):
        StartOrEnd.parse(text, option="startingOffsets")


@pytest.mark.parametrize("assigned", [[A0], [A0, A1, B0]])
def test_json_must_name_exactly_the_assigned_partitions(assigned: list[TopicPartition]) -> None:
    parsed = StartOrEnd.parse('{"a":{"0":1,"1":2}}', option="startingOffsets")

    with pytest.raises(
        InvalidInputError, match=r"If startingOffsets contains.*Specified: a-0, a-1"
    ):
        parsed.offsets(assigned, option="startingOffsets")


def test_a_topic_without_assigned_partitions_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"TOPIC_OFFSET_DOES_NOT_MATCH_ASSIGNED.* of b;"):
        StartOrEnd.parse('{"a":"latest","b":"latest"}', option="startingOffsets").offsets(
            [A0], option="startingOffsets"
        )
