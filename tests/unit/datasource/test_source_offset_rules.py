"""The rules of Spark's KafkaSourceOffsetSuite: offsets as the lines of a checkpoint."""

import json
from typing import Any

import pytest

from kafkalog.datasource.offsets import OffsetJson, TopicPartition, from_json, to_json

ONE: OffsetJson = {"t": {"0": 1}}
TWO: OffsetJson = {"t": {"0": 2, "1": 3}}


def line(offsets: OffsetJson) -> str:
    """What Spark writes of the offsets that a source returns, and compares."""
    return json.dumps(to_json(from_json(offsets)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"t": {"0": 1}}, {"t": {"0": 2}}),
        ({"t": {"0": 1, "1": 0}}, {"t": {"0": 2, "1": 1}}),
        ({"t": {"0": 1}, "T": {"0": 0}}, {"T": {"0": 1}, "t": {"0": 2}}),
        ({"t": {"0": 1}}, {"t": {"0": 2, "1": 1}}),
        ({"t": {"0": 1}}, {"t": {"0": 2, "1": 3}}),
    ],
)
def test_offsets_equal_themselves_in_any_order_and_no_others(
    one: OffsetJson, two: OffsetJson
) -> None:
    def turned(offsets: OffsetJson) -> Any:
        return {t: dict(reversed(p.items())) for t, p in reversed(offsets.items())}

    for offsets, other in ((one, two), (two, one)):
        assert line(offsets) == line(turned(offsets)) == line(json.loads(line(offsets)))
        assert line(offsets) != line(other)


def test_what_is_written_is_read() -> None:
    assert from_json(json.loads(json.dumps(to_json(from_json(TWO))))) == from_json(TWO)


def test_lines_of_a_checkpoint_stay_as_they_are_when_they_are_written_again() -> None:
    lines = [line(ONE), line(TWO)]

    assert [line(json.loads(text)) for text in lines] == lines


def test_the_format_of_old_checkpoints_is_read() -> None:
    text = '{"topic1":{"0":456,"1":789},"topic2":{"0":0}}'

    assert from_json(json.loads(text)) == {
        TopicPartition("topic1", 0): 456,
        TopicPartition("topic1", 1): 789,
        TopicPartition("topic2", 0): 0,
    }
