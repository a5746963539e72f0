"""A streaming query with view=latest: the view first, then every change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.datasource import snapshot
from kafkalog.datasource.offsets import Offsets
from kafkalog.datasource.range_reader import SnapshotPartition
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import DataLossError, InvalidInputError, MomentPassedError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, files
from tests.builders.log_builder import LogBuilder
from tests.unit.datasource.logs import append_to, rows, source

ALL = ReadAllAvailable()
OLD = {b"a": b"0", b"b": b"0", b"c": b"0"}


def stream(root: Path, **options: str) -> KafkaLogStreamReader:
    data_source = source(root, view="latest", **options)
    return data_source.streamReader(data_source.schema())


def append(root: Path, pairs: Mapping[bytes, bytes | None]) -> None:
    log = LogBuilder(root).topic(segment_bytes=100, exist_ok=True)
    log.append_each(*pairs.items()).close()


def table(found: list[dict[str, Any]], before: Mapping[bytes, bytes] = {}) -> dict[bytes, bytes]:
    """A table after some changes have been applied to it."""
    after = {**before, **{row["key"]: row["value"] for row in found}}
    return {key: value for key, value in after.items() if value is not None}


def test_the_first_batch_is_the_view_and_the_next_ones_are_the_changes(tmp_path: Path) -> None:
    append(tmp_path, {**OLD, b"x": None})
    append(tmp_path, {b"a": b"1"})
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)

    first = rows(reader, reader.partitions(start, end))
    assert [(row["key"], row["value"]) for row in first] == [
        (b"b", b"0"),
        (b"c", b"0"),
        (b"x", None),
        (b"a", b"1"),
    ]

    append(tmp_path, {b"a": b"2", b"b": None, b"c": b"1"})
    append(tmp_path, {b"a": b"3"})
    later = reader.latestOffset(end, ALL)
    changes = rows(reader, reader.partitions(end, later))
    assert [(row["key"], row["value"]) for row in changes] == [
        (b"a", b"2"),
        (b"b", None),
        (b"c", b"1"),
        (b"a", b"3"),
    ]


def test_a_streams_view_has_a_deletion_as_long_as_it_is_in_the_log(tmp_path: Path) -> None:
    log = LogBuilder(tmp_path).topic("t", 2, policy="compact")
    log.append((b"a", b"0"), (b"b", b"0"), (b"a", None), partition=[0, 0, 1]).close()
    first = rows(*planned(stream(tmp_path)))
    assert {(row["key"], row["value"]) for row in first} == {
        (b"a", b"0"),
        (b"b", b"0"),
        (b"a", None),
    }
    chosen = rows(*planned(stream(tmp_path, keys='["a"]')))
    assert {row["value"] for row in chosen} == {b"0", None}

    later_ms = clock.now_ms() + 7 * 86_400_000
    with DirectoryLog(tmp_path) as engine:
        for now_ms in (later_ms, 2 * later_ms):
            clean(engine, "t", force=True, now_ms=now_ms)
    assert table(rows(*planned(stream(tmp_path)))) == {b"a": b"0", b"b": b"0"}


def planned(
    reader: KafkaLogStreamReader,
) -> tuple[KafkaLogStreamReader, Sequence[InputPartition]]:
    """A new query's reader, and the tasks of its first micro-batch."""
    start = reader.initialOffset()
    return reader, reader.partitions(start, reader.latestOffset(start, ALL))


def test_uncommitted_records_are_refused(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    reader = stream(tmp_path, **{"kafka.isolation.level": "read_uncommitted"})
    with pytest.raises(InvalidInputError, match="read_uncommitted cannot be set with view=latest"):
        reader.initialOffset()


def test_the_limit_cuts_the_changes_and_not_the_view(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    reader = stream(tmp_path, maxOffsetsPerTrigger="1")
    limit = ReadMaxRows(1)
    start = reader.initialOffset()
    end = reader.latestOffset(start, limit)
    assert len(rows(reader, reader.partitions(start, end))) == 3

    append(tmp_path, OLD)
    assert reader.latestOffset(end, limit) == {"t": {"0": 4}}


def test_a_partition_that_appears_begins_with_its_view(tmp_path: Path) -> None:
    append_to(tmp_path, "t1", {0: 2})
    reader = stream(tmp_path, subscribePattern="t.", maxOffsetsPerTrigger="1")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(1))
    append_to(tmp_path, "t2", {0: 3})

    later = reader.latestOffset(end, ReadMaxRows(1))
    (partition,) = reader.partitions(end, later)

    assert later == {"t1": {"0": 2}, "t2": {"0": 3}}
    assert isinstance(partition, SnapshotPartition)
    assert len(rows(reader, [partition])) == 3


def test_the_view_of_the_first_batch_is_kept_from_the_cleaner(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    planned = reader.partitions(start, end)
    append(tmp_path, {b"a": b"1", b"b": b"1"})
    with DirectoryLog(tmp_path) as engine:
        clean(engine, "t", now_ms=clock.now_ms())
        assert engine.describe("t").partitions[0].cleaned_to <= 3

    assert table(rows(reader, planned)) == OLD
    assert len([name for name in os.listdir(tmp_path) if name.startswith(layout.PIN)]) == 1


def test_a_first_batch_repeated_after_a_cleaning_makes_the_same_table(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    reader.partitions(start, end)
    reader.stop()
    append(tmp_path, {b"a": b"1", b"b": None, b"d": b"0"})
    with DirectoryLog(tmp_path) as engine:
        clean(engine, "t", force=True, now_ms=clock.now_ms())

    again = stream(tmp_path)
    first = table(rows(again, again.partitions(again.initialOffset(), end)))
    assert first == {b"c": b"0"}
    later = again.latestOffset(end, ALL)
    assert table(rows(again, again.partitions(end, later)), first) == {
        b"a": b"1",
        b"c": b"0",
        b"d": b"0",
    }


def cleaned_beyond(root: Path) -> None:
    """Write newer records of two keys, and clean by force."""
    append(root, {b"a": b"1", b"b": b"1"})
    append(root, {b"z": b"0"})
    with DirectoryLog(root) as engine:
        clean(engine, "t", force=True, now_ms=clock.now_ms())


def test_no_cleaning_takes_a_record_of_the_view_once_its_end_is_chosen(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    cleaned_beyond(tmp_path)
    planned = reader.partitions(start, end)
    cleaned_beyond(tmp_path)
    assert table(rows(reader, planned)) == OLD

    reader.latestOffset(end, ALL)
    cleaned_beyond(tmp_path)
    with DirectoryLog(tmp_path) as engine:
        assert engine.describe("t").partitions[0].cleaned_to > 3


def test_an_end_that_a_cleaner_passes_before_it_is_pinned_is_chosen_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, OLD)
    pin_ends, ends = snapshot.pin_ends, []

    def pinned(engine: DirectoryLog, wanted: Offsets, held: contextlib.ExitStack) -> Path | None:
        if not ends:
            cleaned_beyond(tmp_path)
        ends.append(*wanted.values())
        return pin_ends(engine, wanted, held)

    monkeypatch.setattr(snapshot, "pin_ends", pinned)
    reader = stream(tmp_path)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    assert ends == [3, 6]
    found = table(rows(reader, reader.partitions(start, end)))
    assert found == {b"a": b"1", b"b": b"1", b"c": b"0", b"z": b"0"}


def test_a_view_that_nothing_holds_is_refused_once_a_cleaner_has_passed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, OLD)
    monkeypatch.setattr(snapshot, "pin_ends", lambda engine, ends, held: None)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    planned = reader.partitions(start, reader.latestOffset(start, ALL))
    cleaned_beyond(tmp_path)
    with pytest.raises(MomentPassedError, match=r"as of offset 3, .* start the query again$"):
        rows(reader, planned)


def test_a_view_below_the_log_start_is_a_loss(tmp_path: Path) -> None:
    append(tmp_path, OLD)
    strict, lenient = planned(stream(tmp_path)), planned(stream(tmp_path, failOnDataLoss="false"))
    append(tmp_path, {b"a": b"1", b"b": b"1", b"c": b"1"})
    with DirectoryLog(tmp_path) as engine:
        engine.alter_topic("t", {"cleanup.policy": "compact,delete"})
        engine.delete_records("t", 0, 5)

    with pytest.raises(DataLossError, match=r"wanted the offsets \[0, 3\), available .*\[5, 6\)"):
        rows(*strict)
    reader = lenient[0]
    assert rows(*lenient) == []
    end = {"t": {"0": 3}}
    later = rows(reader, reader.partitions(end, reader.latestOffset(end, ALL)))
    assert table(later) == {b"c": b"1"}


def test_a_batch_as_of_an_offset_that_a_cleaner_has_passed_names_the_offsets_to_ask_for(
    tmp_path: Path,
) -> None:
    append(tmp_path, OLD)
    cleaned_beyond(tmp_path)
    data_source = source(tmp_path, view="latest", endingOffsets='{"t": {"0": 3}}')
    reader = data_source.reader(data_source.schema())
    with pytest.raises(InvalidInputError, match="ask for that offset or a later one"):
        rows(reader, reader.partitions())


def test_a_root_that_cannot_be_written_gives_the_view_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, OLD)

    def refuse(path: Path, data: bytes = b"") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "create", refuse)
    reader = stream(tmp_path)
    start = reader.initialOffset()
    assert table(rows(reader, reader.partitions(start, reader.latestOffset(start, ALL)))) == OLD


@pytest.mark.parametrize(
    "options", [{"startingOffsets": "latest"}, {"startingTimestamp": "1"}, {"minPartitions": "2"}]
)
def test_a_view_has_no_start_and_no_pieces(tmp_path: Path, options: dict[str, str]) -> None:
    append(tmp_path, OLD)
    with pytest.raises(InvalidInputError, match="cannot be set with view=latest"):
        stream(tmp_path, **options)
