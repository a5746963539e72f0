"""What a caller gives in another type is refused by name, or taken if nothing has to be guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.log import KafkaLog
from tests.unit.rules.places import Place


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.create_topic("u", config="a=b"), r"^config: expected a mapping.*'a=b'$"),
        (lambda log: log.alter_topic("t", config=["a"]), r"^config: expected a mapping.*\['a'\]$"),
        (lambda log: log.create_topic(5), r"^topic name 5 is not allowed: 1 to 249 characters"),
        (lambda log: log.create_topic(".."), r"^topic name '\.\.' .* and not \. or \.\. alone$"),
        (lambda log: log.erase("t", None), r"^keys: expected several.*found NoneType$"),
        (lambda log: log.erase("t", 7), r"^keys: expected several.*found int$"),
    ],
)
def test_an_argument_of_another_type_is_named(
    place: Place, call: Callable[[KafkaLog], object], message: str
) -> None:
    place.topic()
    with pytest.raises(InvalidInputError, match=message):
        call(place.log)
    assert place.log.topics() == ["t"]


@pytest.mark.parametrize("name", ["clean", "explain", "offsets", "describe", "table", "follow"])
def test_a_list_in_the_place_of_a_topic_is_an_unknown_topic(place: Place, name: str) -> None:
    call: Any = getattr(place.topic().log, name)
    with pytest.raises(UnknownTopicError, match=r"^topic \['t'\] does not exist; .*: t$"):
        call(["t"])


def test_one_name_is_not_the_topics_of_its_letters(place: Place, tmp_path: Any) -> None:
    place.topic("t")
    with pytest.raises(InvalidInputError, match=r"^topics: expected several names, .*text 't'$"):
        kafkalog.copy(place.where, tmp_path / "copy", topics="t")


TEXT = pa.array(["a", None, "c"])


@pytest.mark.parametrize(
    "values",
    [
        *(TEXT, TEXT.cast(pa.large_string()), TEXT.cast(pa.large_binary())),
        *(TEXT.cast(pa.string_view()), TEXT.cast(pa.binary_view()), TEXT.dictionary_encode()),
    ],
    ids=lambda values: str(values.type)[:12],
)
def test_text_and_bytes_are_taken_in_each_form_of_arrow(place: Place, values: pa.Array) -> None:
    place.topic()
    place.log.append("t", pa.table({"key": ["1", "2", "3"], "value": values}).slice(1))
    (found,) = place.log.read("t")
    assert found["value"].to_pylist() == [None, b"c"]


def test_a_column_without_any_value_deletes_its_keys(place: Place) -> None:
    place.topic().append(("a", "1"), ("b", "1"))
    place.log.append("t", pa.table({"key": ["a"], "value": [None]}))
    assert place.log.table("t")["key"].to_pylist() == [b"b"]


def test_numbers_are_not_keys(place: Place) -> None:
    place.topic()
    with pytest.raises(InvalidInputError, match="column 'key' is int64, expected binary or str"):
        place.log.append("t", pa.table({"key": [1], "value": ["1"]}))
