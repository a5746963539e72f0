"""`writers`, and who is at work on a log by `status`: writers, staged files, pins, cleaners."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock, locks
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = LogBuilder(tmp_path / "log", now_ms=clock.now_ms()).topic("u").topic("t")
    for writer in (Writer("q", "t", 4), Writer("name with spaces", "*", 1)):
        builder.commit(("k", "v"), writer=writer)
    builder.to("u").commit(("k", "v"), writer=Writer("q", "u", 7))
    return builder.close()


def rows(result: Any, kind: str) -> list[dict[str, Any]]:
    return [row for row in result.json if row["type"] == kind]


def test_writers_are_listed_with_their_last_batches(kafkalog: Command, root: Path) -> None:
    listed = kafkalog("writers", root, "--json").json
    assert [(w["writer"], w["topic"], w["batchId"], w["rows"]) for w in listed] == [
        ("name with spaces", "*", 1, 1),
        ("q", "t", 4, 1),
        ("q", "u", 7, 1),
    ]
    assert listed == rows(kafkalog("status", root, "--json"), "writer")
    assert kafkalog("writers", root, "--topic", "u", "--json").json == listed[2:]
    assert [line.split()[-4] for line in kafkalog("writers", root).lines[1:]] == ["*", "t", "u"]


def test_a_forgotten_writer_begins_anew(kafkalog: Command, root: Path) -> None:
    with library.open(root) as log:
        builder = LogBuilder(log, now_ms=clock.now_ms())
        assert builder.commit(("k", "v"), writer=Writer("q", "t", 4)).rows == 0
    result = kafkalog("writers", root, "--forget", "q", "--topic", "t")
    assert result.lines == ["writer q to topic t is forgotten: its last batch was 4, of 1 row"]
    assert result.err == ("its next batch will be appended, even if the log has it already\n")
    left = [(w["writer"], w["topic"]) for w in kafkalog("writers", root, "--json").json]
    assert left == [("name with spaces", "*"), ("q", "u")]
    with library.open(root) as log:
        builder = LogBuilder(log, now_ms=clock.now_ms())
        assert builder.commit(("k", "v"), writer=Writer("q", "t", 3)).rows == 1


def test_all_targets_of_a_writer_are_forgotten_in_one_commit(kafkalog: Command, root: Path) -> None:
    before = kafkalog("status", root, "--json").json[0]["record"]
    forgotten = kafkalog("writers", root, "--forget", "q", "--json").json
    assert [(w["topic"], w["batchId"], w["forgotten"]) for w in forgotten] == [
        *(("t", 4, True), ("u", 7, True))
    ]
    assert kafkalog("status", root, "--json").json[0]["record"] == before + 1


@pytest.mark.parametrize("options", [["nobody"], ["q", "--topic", "none"], ["q t"]])
def test_an_unknown_writer_is_refused_with_those_there_are(
    kafkalog: Command, root: Path, options: list[str]
) -> None:
    result = kafkalog("writers", root, "--forget", *options)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "known: name with spaces (topic *), q (topic t), q (topic u)\n" in result.err
    assert len(kafkalog("writers", root, "--json").json) == 3


def test_a_log_without_writers_says_so(kafkalog: Command, tmp_path: Path) -> None:
    library.open(tmp_path / "log").close()
    result = kafkalog("writers", tmp_path / "log")
    assert (result.status, result.out, result.err) == (0, "", "no writer is remembered\n")
    assert "known: none" in kafkalog("writers", tmp_path / "log", "--forget", "x").err


# --- status --------------------------------------------------------------------------------------


def test_status_tells_what_is_staged_by_whom_and_until_when_it_is_kept(
    kafkalog: Command, root: Path
) -> None:
    with library.open(root) as log:
        builder = LogBuilder(log, now_ms=clock.now_ms())
        message = builder.stage(("k", "v"), writer_slug=writer_slug("q", "t"), batch_id=5)
        builder.stage(("k", "v"), writer_slug="0" * 32)
    path = root / message.files[0].name
    modified_ms = clock.now_ms() - 3 * DAY_MS
    os.utime(path, ns=(modified_ms * 1_000_000,) * 2)
    found = {row["writer"]: row for row in rows(kafkalog("status", root, "--json"), "staged")}
    staged, unknown = found["q"], found["0" * 32]
    age_ms = staged.pop("ageMs")
    assert 3 * DAY_MS <= age_ms < 3 * DAY_MS + 600_000
    assert staged == {
        "type": "staged",
        "file": message.files[0].name,
        "writer": "q",
        "topic": "t",
        "batchId": 5,
        "bytes": path.stat().st_size,
        "modifiedMs": modified_ms,
        "keptUntilMs": modified_ms + 7 * DAY_MS,
    }
    assert (unknown["topic"], unknown["batchId"]) == (None, 0)
    text = kafkalog("status", root).out
    assert f"{message.files[0].name}  q" in text
    assert "3 days" in text


def test_status_tells_live_pins_and_whether_somebody_reads_by_them(
    kafkalog: Command, root: Path
) -> None:
    def found() -> list[tuple[int, bool]]:
        return [(row["record"], row["read"]) for row in rows(status(), "pin")]

    def status() -> Any:
        return kafkalog("status", root, "--json")

    now_ms = clock.now_ms()
    with library.open(root) as log:
        number = directory_log_of(log).state().number
        with contextlib.ExitStack() as held:
            pin = pins.pin(
                root, pins.Action("app", "1"), directory_log_of(log).state, now_ms, held=held
            )
            assert pin is not None
            assert found() == [(number, True)]
            (row,) = rows(status(), "pin")
            assert row["pin"] == pin.path.name
            assert row["leasedUntilMs"] - row["renewedMs"] == pins.LEASE_MS
            assert f"{pin.path.name}  " in kafkalog("status", root).out
        assert found() == [(number, False)]
        pins.renew(pin.path, now_ms - pins.LEASE_MS - 60_000)
        assert found() == []


def test_status_tells_whether_a_cleaner_runs_and_what_is_cleaned(
    kafkalog: Command, root: Path
) -> None:
    def cleaner() -> tuple[bool, list[dict[str, Any]], str]:
        (row,) = rows(kafkalog("status", root, "--json"), "cleaner")
        return row["running"], row["cleaning"], kafkalog("status", root).lines[0]

    assert cleaner() == (False, [], f"{root}  owner: kafkalog  locks: work  cleaner: none")
    with library.open(root, cleaner=CleanerConfig(backoff_ms=60_000)):
        deadline = time.monotonic() + 120
        while not cleaner()[0] and time.monotonic() < deadline:
            time.sleep(0.01)  # its thread has only just begun
        assert cleaner()[0] is True
        assert cleaner()[2].endswith("cleaner: runs")
    with locks.FileLock(root / "u-0" / layout.CLEANER_LOCK).exclusive():
        is_running, cleaning, line = cleaner()
    assert (is_running, cleaning) == (False, [{"topic": "u", "partition": 0}])
    assert line.endswith("cleaner: none  cleaning now: u-0")
