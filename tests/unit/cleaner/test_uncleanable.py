"""The mark of an uncleanable partition, also where the disk does not take it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.shelves import moment_of
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable, read_uncleanable
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.unit.cleaner.test_manager import MINUTE, filled

HOUR = 60 * MINUTE


def test_a_mark_outlives_the_process_and_says_why_since_when_and_until_when(
    tmp_path: Path,
) -> None:
    written = mark_uncleanable(
        DirectoryNotes(tmp_path), KafkaLogError("a reason"), {"a": "1"}, now_ms=5
    )
    assert read_uncleanable(DirectoryNotes(tmp_path)) == written
    assert (written.reason, written.since_ms, written.retry_at_ms) == ("a reason", 5, 5 + MINUTE)
    DirectoryNotes(tmp_path).remove(layout.UNCLEANABLE)
    assert read_uncleanable(DirectoryNotes(tmp_path)) is None


def test_the_pause_doubles_up_to_an_hour_and_begins_anew_after_success(tmp_path: Path) -> None:
    notes = DirectoryNotes(tmp_path)
    pauses = [
        mark_uncleanable(notes, KafkaLogError(f"{n}"), {}, now_ms=n).retry_at_ms - n
        for n in range(10)
    ]
    assert pauses == [MINUTE * 2**n for n in range(6)] + [HOUR] * 4
    mark = read_uncleanable(DirectoryNotes(tmp_path))
    assert mark is not None and (mark.reason, mark.failures, mark.since_ms) == ("9", 10, 0)
    DirectoryNotes(tmp_path).remove(layout.UNCLEANABLE)
    again = mark_uncleanable(DirectoryNotes(tmp_path), KafkaLogError("again"), {}, now_ms=0)
    assert again.retry_at_ms == MINUTE


def test_another_config_is_a_reason_to_try_again(tmp_path: Path) -> None:
    mark = mark_uncleanable(DirectoryNotes(tmp_path), KafkaLogError("why"), {"a": "1"}, now_ms=0)
    assert not mark.is_due({"a": "1"}, MINUTE - 1)
    assert mark.is_due({"a": "1"}, MINUTE) and mark.is_due({"a": "2"}, 1) and mark.is_due({}, 1)


def test_a_mark_that_is_not_text_keeps_the_cleaner_away_until_it_is_removed(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    path = tmp_path / "t-0" / layout.UNCLEANABLE
    path.write_bytes(b"\xff\xfe")
    assert clean(engine, now_ms=10**12) == []
    assert status(moment_of(engine, 1))[0].state == "uncleanable"
    path.unlink()
    assert len(clean(engine, now_ms=1)) == 1


def test_a_mark_that_cannot_be_read_stops_no_other_partition(tmp_path: Path) -> None:
    engine = filled(tmp_path, "bad", "good")
    (tmp_path / "bad-0" / layout.UNCLEANABLE).mkdir()
    assert [stats.topic for stats in clean(engine, now_ms=1)] == ["good"]


def test_a_full_disk_takes_no_mark_so_the_process_remembers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", full)
        mark = mark_uncleanable(DirectoryNotes(tmp_path), KafkaLogError("why"), {}, now_ms=0)
        mark = mark_uncleanable(DirectoryNotes(tmp_path), KafkaLogError("why"), {}, now_ms=10)
    assert not (tmp_path / layout.UNCLEANABLE).exists()
    assert read_uncleanable(DirectoryNotes(tmp_path)) == mark
    assert (mark.failures, mark.since_ms) == (2, 0)
    again = mark_uncleanable(DirectoryNotes(tmp_path), KafkaLogError("still"), {}, now_ms=20)
    assert json.loads((tmp_path / layout.UNCLEANABLE).read_bytes())["failures"] == 3
    assert read_uncleanable(DirectoryNotes(tmp_path)) == again
    (tmp_path / layout.UNCLEANABLE).unlink()
    assert read_uncleanable(DirectoryNotes(tmp_path)) is None  # what is on the disk counts again


@pytest.mark.parametrize("was_marked", [False, True])
def test_what_a_process_remembers_ends_with_the_success_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_marked: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    engine = filled(tmp_path, "t")
    directory = engine.partition_directory("t", 0)
    if was_marked:
        mark_uncleanable(DirectoryNotes(directory), KafkaLogError("before"), {}, now_ms=0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", full)
        mark_uncleanable(DirectoryNotes(directory), KafkaLogError("why"), {}, now_ms=1)
    mark = read_uncleanable(DirectoryNotes(directory))
    assert mark is not None and mark.reason == "why"
    program = (
        "import kafkalog, sys; (stats,) = kafkalog.open(sys.argv[1]).clean(force=True); "
        "assert stats.error is None"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert read_uncleanable(DirectoryNotes(directory)) is None
