"""A look through all files while others write and clean: nothing that moves is passed over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.erasure import topic_scan
from kafkalog.erasure.file_occurrences import FileOccurrences
from kafkalog.erasure.topic_files import FileKind, TopicFile, topic_files
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.searched_log import (
    BASE,
    KEY,
    NOW,
    batch,
    directory,
    kinds,
    searched_log,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    with searched_log(tmp_path / "log") as opened:
        yield opened


def test_what_is_replaced_during_the_search_is_looked_at_too(log: KafkaLog) -> None:
    log.append("t", [(KEY, "1"), (KEY, "2")], now_ms=NOW)
    cleaned: list[object] = []

    def progress(done: int, of: int) -> None:
        if not cleaned:
            cleaned.append(log.clean("t", force=True, now_ms=NOW))

    found = log.occurrences("t", [KEY], now_ms=NOW, progress=progress)
    paths = {file.file.path for file in found.files}
    assert paths >= set(directory(log).iterdir())
    assert {FileKind.LOG, FileKind.RETIRED} <= kinds(found)


def test_what_is_appended_during_the_search_is_looked_at_too(log: KafkaLog) -> None:
    """To a segment that was read by then."""
    log.append("t", [("another", "1")], now_ms=NOW)

    def progress(done: int, of: int) -> None:
        if done == of and len(appended) < 2:
            appended.append(log.append("t", [(KEY, "late")], now_ms=NOW))

    appended: list[object] = []
    found = log.occurrences("t", [KEY], now_ms=NOW, progress=progress)
    assert [(one.found, one.faults) for one in found.files if not one.is_clear] == [({0: 2}, [])]
    assert found.record_number == directory_log_of(log).state().number
    assert found.high_watermarks == {0: log.offsets("t")[0][1]}
    assert len([one for one in found.files if one.file.path.suffix == ".log"]) == len(
        list(directory(log).glob("*.log"))
    )


def test_what_was_committed_of_a_segment_is_read_once(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[int, int | None]] = []
    real = topic_scan.scan_file

    def scan(file: TopicFile, *rest: Any, **options: Any) -> FileOccurrences:
        if file.path == active:
            spans.append((options["start"], options["end"]))
            if len(spans) == 2:
                log.append("t", [(KEY, "late")], now_ms=NOW)
        return real(file, *rest, **options)

    log.alter_topic("t", {"segment.bytes": "100000"}, now_ms=NOW)
    log.append("t", [("another", "1")], now_ms=NOW)
    partition = directory_log_of(log).state().topics["t"].partitions[0]
    active = directory(log) / layout.segment_file(partition.active_base, ".log")
    monkeypatch.setattr(topic_scan, "scan_file", scan)
    found = log.occurrences("t", [KEY], now_ms=NOW)
    size, grown = partition.active_size, active.stat().st_size
    assert grown > size > 0
    assert spans == [(0, size), (size, None), (size, grown), (grown, None)]
    assert sum(one.size for one in found.files if one.file.path == active) == grown
    assert found.by_key == {0: 1}


@pytest.mark.parametrize("is_vanished", [False, True])
def test_what_is_committed_during_the_search_is_looked_at_too(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch, is_vanished: bool
) -> None:
    """A staged file that was read and goes, and one that goes just before it would be read."""
    real = topic_scan.scan_file
    staged: list[StagedMessage] = []
    committed: list[object] = []

    def scan(file: TopicFile, *rest: Any, **options: Any) -> FileOccurrences:
        if not staged:  # it is in the second listing, when the segments have been read
            staged.append(LogBuilder(log).stage((KEY, "v")))
        if file.path.name != staged[0].files[0].name or committed:
            return real(file, *rest, **options)
        if is_vanished:
            committed.append(directory_log_of(log).commit(staged, now_ms=NOW))
            return real(file, *rest, **options)
        found = real(file, *rest, **options)
        committed.append(directory_log_of(log).commit(staged, now_ms=NOW))
        return found

    # The partition's files are read before those of the root.
    monkeypatch.setattr(topic_scan, "topic_files", lambda *of: topic_files(*of)[::-1])
    log.append("t", [("another", "1")], now_ms=NOW)
    monkeypatch.setattr(topic_scan, "scan_file", scan)
    found = log.occurrences("t", [KEY], now_ms=NOW)
    assert committed
    assert kinds(found) == {FileKind.LOG}
    assert found.by_key == {0: 1}


def test_a_file_that_is_renamed_before_it_is_read_is_read_under_its_new_name(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was read before, and has changed since."""
    path = directory(log) / f"{BASE}.log"
    path.write_bytes(batch(KEY))
    real = topic_scan.scan_file
    steps: list[str] = []

    def scan(file: TopicFile, *rest: Any, **options: Any) -> FileOccurrences:
        if file.path == path and steps:
            steps.append("renamed")
            path.rename(f"{path}.deleted")
        found = real(file, *rest, **options)
        if file.path == path:
            steps.append("changed")
            os.utime(path, ns=(0, 0))
        return found

    monkeypatch.setattr(topic_scan, "scan_file", scan)
    found = log.occurrences("t", [KEY], now_ms=NOW)
    assert steps == ["changed", "renamed"]
    assert [one.path.name for one in found.residuals] == [f"{BASE}.log.deleted"]


def test_a_file_that_a_listing_misses_is_not_passed_over(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a directory may, where a file is renamed meanwhile."""
    path = directory(log) / f"{BASE}.log"
    path.write_bytes(batch(KEY))
    listings: list[object] = []

    def listed(*of: Any) -> list[TopicFile]:
        listings.append(of)
        return [file for file in topic_files(*of) if file.path != path or len(listings) != 2]

    monkeypatch.setattr(topic_scan, "topic_files", listed)
    assert [one.path for one in log.occurrences("t", [KEY], now_ms=NOW).residuals] == [path]


def test_a_writer_that_never_pauses_is_held_off_for_the_last_round(log: KafkaLog) -> None:
    """And it may be the one that is told of progress."""
    commits: list[object] = []

    def progress(done: int, of: int) -> None:
        commits.append(log.append("t", [(KEY, str(done))], now_ms=NOW))

    found = log.occurrences("t", [KEY], now_ms=NOW, progress=progress)
    assert found.by_key == {0: len(commits)}
    assert found.record_number == directory_log_of(log).state().number
