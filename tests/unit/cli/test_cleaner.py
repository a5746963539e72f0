"""`kafkalog cleaner`, `explain` and the progress of `clean`, as processes and in this one."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.cleaner.dedup.presence import is_cleaner_running
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import clock, locks
from kafkalog.storage_engine.place import directory_log_of
from tests import ROOT
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command

COMMAND = [sys.executable, "-m", "kafkalog"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    log = LogBuilder(tmp_path / "log", now_ms=clock.now_ms()).topic(segment_bytes=2_000)
    return log.rounds(5, (f"key-{n}" for n in range(100))).close()


@contextmanager
def cleaner(root: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [*COMMAND, "cleaner", str(root), "--backoff-ms", "50", *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def until_clean(root: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with library.open(root, read_only=True) as log:
            (status,) = log.status()
        if status.last_cleaning is not None and status.state != "dirty":
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_where_a_broker_holds_the_directory_the_cleaner_says_so_once_and_ends(
    root: Path,
) -> None:
    with locks.RootLock(root).exclusive(), cleaner(root) as running:
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err.count("\n")) == (1, 1)
    assert "a Kafka broker holds this directory" in err


def test_a_cleaner_without_threads_is_wrong_usage(root: Path, kafkalog: Command) -> None:
    result = kafkalog("cleaner", root, "--config", "log.cleaner.threads=0")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_cleaner_process_cleans_until_it_is_stopped(root: Path, kind: signal.Signals) -> None:
    with cleaner(root) as running:
        until_clean(root)
        assert is_cleaner_running(root)
        running.send_signal(kind)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "")
    first, last = err.splitlines()
    assert first == f"{root}: the cleaner runs"
    found = re.search(r"stopped: (\d+) cleanings?(?: \(.*\))? removed (\d+) records", last)
    assert found is not None
    assert int(found[1]) >= 1
    assert int(found[2]) > 0
    assert not is_cleaner_running(root)


@pytest.mark.slow
def test_a_cleaner_process_serves_its_metrics(root: Path) -> None:
    with cleaner(root, "--metrics-port", "0") as running:
        assert running.stderr is not None
        port = re.search(r":(\d+)/metrics", running.stderr.readline())
        assert port is not None
        until_clean(root)
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=120) as answer:
            assert "kafkalog_cleaner_cleanings_total 1.0" in answer.read().decode()
        running.terminate()
        assert running.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_partitions_fault_is_reported_while_the_cleaner_runs(root: Path) -> None:
    path = sorted((root / "t-0").glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with cleaner(root) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == f"{root}: the cleaner runs\n"
        line = running.stderr.readline()
        assert line.startswith("kafkalog: t-0 cannot be cleaned: ")
        assert path.name in line
        running.terminate()
        assert running.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--threads", "0"],
        ["--config", "log.cleaner.thread=2"],
        ["--config", "log.cleaner.threads=x"],
        ["--metrics-port", "70000"],
        ["--metrics-address", "0.0.0.0"],
        ["--metrics-port", "0", "--metrics-address", ""],
        ["--threads", "2", "--config", "log.cleaner.threads=3"],
        ["--backoff-ms", "5", "--config", "log.cleaner.backoff.ms=7"],
    ],
)
def test_wrong_settings_of_the_cleaner_are_one_line(
    kafkalog: Command, root: Path, options: list[str]
) -> None:
    result = kafkalog("cleaner", root, *options)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1


def test_a_setting_that_is_given_twice_is_told_with_both_values(
    kafkalog: Command, root: Path
) -> None:
    options = ["--threads", "2", "--config", "log.cleaner.threads=3"]
    told = kafkalog("cleaner", root, *options).err
    assert "--threads 2" in told and "log.cleaner.threads=3" in told


def test_the_cleaner_makes_no_log(kafkalog: Command, tmp_path: Path) -> None:
    result = kafkalog("cleaner", tmp_path / "x")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert not (tmp_path / "x").exists()


def test_explain_says_why_and_what_would_change_it(kafkalog: Command, root: Path) -> None:
    text = kafkalog("explain", root, "t")
    assert text.status == 0
    assert text.lines[0] == "t-0 is due, and no cleaner runs:"
    assert text.lines[1].startswith("  It is due: its dirty ratio is 1.00 (")
    assert any(line.startswith("    -> ") for line in text.lines)
    (row,) = kafkalog("explain", root, "t", "--json").json
    assert (row["topic"], row["partition"], row["due"]) == ("t", 0, True)
    assert [finding["code"] for finding in row["findings"]] == ["due", "no cleaner"]
    assert set(row["findings"][0]) == {"code", "sentence", "remedy", "commands", "untilMs"}
    assert row["findings"][0]["sentence"] == text.lines[1].strip()


@pytest.mark.parametrize("command", [["cleaner"], ["clean"], ["clean", "--force"]])
def test_a_log_that_may_not_be_written_is_reported_at_once(
    kafkalog: Command, root: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """A mount that is only read, say: a cleaner that sleeps there would never say a word."""
    verb, *options = command
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        result = kafkalog(verb, root, *options)
        explained = kafkalog("explain", root, "t", "--json").json[0]
    assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
    assert f"{root}: may not be written here" in result.err
    finding = explained["findings"][1]
    assert finding["code"] == "no cleaner"
    assert "may not write" in finding["sentence"]
    assert not list((root / "t-0").glob("kl-uncleanable"))


def test_explain_of_an_unknown_topic_is_wrong_usage(kafkalog: Command, root: Path) -> None:
    result = kafkalog("explain", root, "u")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)


def test_status_tells_the_last_cleaning(kafkalog: Command, root: Path) -> None:
    assert "cleaned" not in kafkalog("status", root).lines[2].split()
    kafkalog("clean", root, "--force")
    header = kafkalog("status", root).lines[2].split("  ")
    assert "cleaned" in header
    row = kafkalog("status", root, "--json").json[-1]
    last = row["lastCleaning"]
    assert (last["startOffset"], last["endOffset"]) == (0, 500)
    assert (last["recordsRead"], last["recordsKept"]) == (500, 100)
    assert row["tombstonesWaiting"] == 0
    assert row["earliestDeleteHorizonMs"] is None
    assert row["bytes"] == row["cleanBytes"] + row["dirtyBytes"] + row["uncleanableBytes"]


@pytest.mark.slow
def test_a_forced_cleaning_draws_a_bar_on_a_terminal(root: Path) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "clean", str(root), "--force", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as running:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the terminal's other side is closed
                break
            if not part:
                break
            shown += part
        assert running.stdout is not None
        out = running.stdout.read()
    os.close(master)
    assert running.returncode == 0
    assert b"cleaning" in shown
    assert out.count(b"\n") == 1
    assert b"recordsKept" in out


@pytest.mark.slow
def test_a_cleaner_that_only_retains_is_not_told_to_be_one(root: Path) -> None:
    with cleaner(root, "--config", "log.cleaner.threads=0"):
        time.sleep(2)
        assert not is_cleaner_running(root)


def test_a_reader_is_blamed_for_what_it_holds_back_alone(tmp_path: Path, kafkalog: Command) -> None:
    from contextlib import ExitStack

    from kafkalog.storage_engine.directory import pins
    from kafkalog.storage_engine.fs import clock
    from tests.unit.cleaner.transactional_log import Log

    log = Log.create(tmp_path / "log", cleanup_policy="compact")
    log.data(1, 2)
    log.roll()
    log.data(1, 2)
    log.roll()
    log.transact(7, 3, 4)  # open from offset 4 on
    with ExitStack() as held:
        action = pins.Action("app", "execution 1")
        pins.pin(log.engine.root, action, log.engine.state, clock.now_ms(), held=held)
        result = kafkalog("clean", tmp_path / "log", "--force")
        assert "snapshot pin" not in result.err
        assert result.status == 0
        log.commit(7)
        result = kafkalog("clean", tmp_path / "log", "--force")
        assert "t-0 was cleaned only up to offset 4: the snapshot pin" in result.err
        assert result.status == 1
    log.data(3)
    assert kafkalog("clean", tmp_path / "log", "--force").status == 0


def test_a_forced_cleaning_has_to_reach_what_there_was_before_it(
    tmp_path: Path, kafkalog: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a log that is written to, readers pin moments, and writers append, all the while."""
    from contextlib import ExitStack

    from kafkalog.cleaner.schedule import manager
    from kafkalog.storage_engine.directory import pins
    from kafkalog.storage_engine.fs import clock

    with library.open(tmp_path / "log") as log:
        log.create_topic("t", 1)
        log.append("t", [(f"k{i % 3}", "v") for i in range(10)])
        old = directory_log_of(log).state()
    clean_and_retain = manager.clean_and_retain

    with ExitStack() as held:

        def on_a_live_log(engine: DirectoryLog, *arguments: Any, **named: Any) -> object:
            """One reader pins what has been cleaned, another what has been passed."""
            found = clean_and_retain(engine, *arguments, **named)
            for name, load_state in (("1", engine.state), ("2", lambda: old)):
                action = pins.Action("app", name)
                assert pins.pin(engine.root, action, load_state, clock.now_ms(), held=held)
            engine.append("t", [("k1", "v")])
            return found

        monkeypatch.setattr(manager, "clean_and_retain", on_a_live_log)
        result = kafkalog("clean", tmp_path / "log", "--force")
        assert "was cleaned only up to" not in result.err
        assert result.status == 0
        monkeypatch.undo()
        result = kafkalog("clean", tmp_path / "log", "--force")
        assert "t-0 was cleaned only up to offset 10: the snapshot pin" in result.err
        assert result.status == 1


def test_what_was_passed_over_is_told(root: Path, kafkalog: Command) -> None:
    from kafkalog.cleaner import abort_and_pause

    with library.open(root) as log, abort_and_pause(log, "t", 0):
        result = kafkalog("clean", root, "t", "--force")
    assert result.status == 1
    assert "t-0 was skipped: cleaning is paused by another process" in result.err


def test_a_verbose_cleaner_says_of_each_cleaning_why_it_was_made_and_what_went(root: Path) -> None:
    with cleaner(root, "--verbose") as running:
        until_clean(root)
        running.send_signal(signal.SIGTERM)
        _, told = running.communicate(timeout=60)
    assert re.search(
        r"kafkalog: t-0: cleaned offsets 0 to \d+, because the dirty ratio was above "
        r"min.cleanable.dirty.ratio: records removed: \d+, bytes removed: \d+, "
        r"bytes written: \d+, seconds: \d+\.\d\d\n",
        told,
    )


def test_a_check_tells_whether_a_cleaner_runs(root: Path, kafkalog: Command) -> None:
    refused = kafkalog("cleaner", root, "--check")
    assert (refused.status, refused.err) == (
        1,
        f"kafkalog: {root}: no cleaner runs. Start `kafkalog cleaner {root}`.\n",
    )
    with cleaner(root):
        until_clean(root)
        checked = kafkalog("cleaner", root, "--check")
        assert (checked.status, checked.out, checked.err) == (0, "", "")


def test_nothing_tells_whether_a_cleaner_runs_on_a_store(kafkalog: Command) -> None:
    url = "memory://checked/log"
    library.open(url).close()
    refused = kafkalog("cleaner", url, "--check")
    assert refused.status == 1
    assert "nothing tells whether a cleaner runs" in refused.err
