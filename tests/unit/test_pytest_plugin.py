"""The plugin of pytest gives topics to tests, as its documentation says; used by runs of pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import InvalidInputError

pytest_plugins = ["pytester"]

from kafkalog.pytest_plugin import MakeTopic  # noqa: E402


def test_a_topic_is_filled_and_read(kafkalog_topic: MakeTopic) -> None:
    topic = kafkalog_topic("orders", [("a", "1"), ("b", "2"), ("a", None)])
    assert [(row["key"], row["value"]) for row in topic.records()] == [
        (b"a", b"1"),
        (b"b", b"2"),
        (b"a", None),
    ]
    assert topic.table() == {b"b": b"2"}


def test_topics_of_a_test_share_a_log_and_have_names_of_their_own(
    kafkalog_topic: MakeTopic,
) -> None:
    first, second = kafkalog_topic(), kafkalog_topic(partitions=3)
    assert first.path == second.path
    assert first.log.topics() == [first.name, second.name]
    assert len(second.log.offsets(second.name)) == 3


def test_a_topic_can_be_compacted(kafkalog_topic: MakeTopic) -> None:
    topic = kafkalog_topic(records=[("a", "1"), ("a", "2")])
    topic.clean()
    assert [row["value"] for row in topic.records()] == [b"2"]


@pytest.mark.parametrize(
    "records",
    [
        [(None, "1"), ("b", "2")],
        [{"value": "1"}, {"key": "b", "value": "2"}],
        pa.table({"value": [b"1", b"2"]}),
    ],
    ids=["tuples", "dicts", "Arrow"],
)
def test_a_topic_whose_first_records_lack_keys_is_not_compacted(
    kafkalog_topic: MakeTopic, records: Any
) -> None:
    topic = kafkalog_topic("t", iter(records) if isinstance(records, list) else records)
    assert [row["value"] for row in topic.records()] == [b"1", b"2"]
    assert topic.log.describe("t").config["cleanup.policy"] == "delete"
    with pytest.raises(InvalidInputError, match=r"config=\{'cleanup.policy': 'delete'\}"):
        kafkalog_topic("u", records, config={"cleanup.policy": "compact"})


def test_its_config_is_the_topics(kafkalog_topic: MakeTopic) -> None:
    topic = kafkalog_topic(config={"compression.type": "zstd"})
    assert topic.log.describe(topic.name).config["compression.type"] == "zstd"


@pytest.mark.slow
def test_pytest_finds_the_plugin_where_kafkalog_is_installed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported_before_it_is_asked_for():
            assert not {"pyarrow", "pyspark"} & set(sys.modules)

        def test_a_topic(kafkalog_topic):
            assert kafkalog_topic(records=[("a", "1")]).table() == {b"a": b"1"}
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_log_lies_in_the_tests_temporary_directory(
    kafkalog_topic: MakeTopic, tmp_path: Path
) -> None:
    assert tmp_path in Path(kafkalog_topic().path).parents
