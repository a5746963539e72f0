"""A directory that holds only `orders-0/*.log`: it is read as a copy, and `adopt` takes it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_contents import latest_records, records
from tests.builders.rescued import TOPIC, rescued
from tests.unit.datasource.logs import read_batch

NOW_MS = 1_700_000_100_000


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_rescued_segments_are_read_as_a_copy_whatever_their_codec(tmp_path: Path) -> None:
    written = rescued(tmp_path)
    before = tree(tmp_path)
    assert len(before) == 2 * len(layout.CODECS)
    log = kafkalog.open(tmp_path)
    assert log.topics() == [TOPIC]
    assert records(log, TOPIC) == written
    assert log.lookup(TOPIC, b"key-0", partition=1) is not None
    assert len(latest_records(log, TOPIC))
    assert tree(tmp_path) == before


def test_sparks_reader_reads_rescued_segments(tmp_path: Path) -> None:
    written = rescued(tmp_path)
    rows = read_batch(tmp_path, subscribe=TOPIC)
    names = ("partition", "offset", "key", "value")
    assert sorted(tuple(row[name] for name in names) for row in rows) == written


def test_a_copy_is_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rescued(tmp_path)
    with caplog.at_level(logging.WARNING, "kafkalog"):
        for _ in range(3):
            records(DirectoryLog(tmp_path), TOPIC)
        read_batch(tmp_path, subscribe=TOPIC)
    (notice,) = [record.getMessage() for record in caplog.records]
    assert "read as a copy of a broker's partitions" in notice
    assert f"kafkalog adopt {tmp_path}" in notice


def test_a_copy_is_written_only_after_an_adoption(tmp_path: Path) -> None:
    written = rescued(tmp_path)
    advice = f"a copy of a broker's partitions is only read; .* run: kafkalog adopt {tmp_path}$"
    with pytest.raises(InvalidInputError, match=advice):
        kafkalog.open(tmp_path).append(TOPIC, [("k", "v")])
    report = adopt(tmp_path, config={"*": {"cleanup.policy": "compact"}}, now_ms=NOW_MS)
    assert (report.topics, report.damage) == ((TOPIC,), ())
    with kafkalog.open(tmp_path) as log:
        assert records(log, TOPIC) == written
        log.append(TOPIC, [("k", "v")])
        assert len(records(log, TOPIC)) == len(written) + 1
        log.clean(force=True)
        assert len(records(log, TOPIC)) < len(written)
        assert directory_log_of(log).is_brokers is False


def test_several_copies_are_read_together(tmp_path: Path) -> None:
    written = rescued(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "orders-1").rename(tmp_path / "b" / "orders-1")
    assert records(DirectoryLog([tmp_path / "a", tmp_path / "b"]), TOPIC) == written


def test_a_torn_tail_of_a_copy_does_not_count(tmp_path: Path) -> None:
    written = rescued(tmp_path)
    segment = tmp_path / "orders-0" / f"{20:020}.log"
    segment.write_bytes(segment.read_bytes()[:-1])
    found = records(DirectoryLog(tmp_path), TOPIC)
    assert found == [row for row in written if row[0] != 0 or row[1] < 30]


def test_a_directory_without_segments_does_not_count_as_a_copy(tmp_path: Path) -> None:
    (tmp_path / "dbus-1").mkdir()
    (tmp_path / "dbus-1" / "notes.log").write_text("no segment")
    with pytest.raises(InvalidInputError, match="no log here"):
        DirectoryLog(tmp_path, create=False)
