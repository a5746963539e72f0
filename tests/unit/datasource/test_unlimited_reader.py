"""The reader for Spark 4.0 and 4.1, driven by the calls that these releases make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.datasource.unlimited_reader import UnlimitedStreamReader
from tests.unit.datasource.logs import append, numbered, rows, source


def started(root: Path, **options: str) -> UnlimitedStreamReader:
    given = source(root, **options)
    return UnlimitedStreamReader(KafkaLogStreamReader(dict(given.options), given.schema()))


def keys(reader: UnlimitedStreamReader, start: Any, end: Any) -> list[str]:
    return [row["key"].decode() for row in rows(reader, reader.partitions(start, end))]


def test_a_query_reads_all_once_over_a_restart(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = started(tmp_path, startingOffsets="earliest")
    first = reader.latestOffset()
    assert keys(reader, reader.initialOffset(), first) == ["k0", "k1", "k2"]
    assert reader.latestOffset() == first
    append(tmp_path, "t", numbered(2, start=3))
    second = reader.latestOffset()
    assert keys(reader, first, second) == ["k3", "k4"]

    append(tmp_path, "t", numbered(1, start=5))
    reader = started(tmp_path, startingOffsets="earliest")
    assert keys(reader, second, second) == []  # by which Spark tells where the query goes on
    third = reader.latestOffset()
    reader.commit(second)
    assert keys(reader, second, third) == ["k5"]


def test_a_micro_batch_that_failed_is_repeated_before_what_came_later(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = started(tmp_path, startingOffsets="earliest")
    first = reader.latestOffset()

    append(tmp_path, "t", numbered(2, start=3))
    reader = started(tmp_path, startingOffsets="earliest")
    assert keys(reader, first, first) == []
    assert keys(reader, reader.initialOffset(), first) == ["k0", "k1", "k2"]
    later = reader.latestOffset()
    assert keys(reader, first, later) == ["k3", "k4"]


def test_a_query_from_now_on_begins_where_the_log_ended(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(3))
    reader = started(tmp_path)
    first = reader.latestOffset()
    assert keys(reader, reader.initialOffset(), first) == []
    append(tmp_path, "t", numbered(1, start=3))
    assert keys(reader, first, reader.latestOffset()) == ["k3"]


def test_a_view_comes_first_and_then_its_changes(tmp_path: Path) -> None:
    append(tmp_path, "t", [("a", "1"), ("a", "2"), ("b", "3")])
    reader = started(tmp_path, view="latest")
    first = reader.latestOffset()
    assert sorted(keys(reader, reader.initialOffset(), first)) == ["a", "b"]
    append(tmp_path, "t", [("a", "4")])
    later = reader.latestOffset()
    assert keys(reader, first, later) == ["a"]
    reader.stop()
