"""`read`: where it begins, which keys, what they have now, and what is committed later."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog as library
from kafkalog.cli import read
from kafkalog.cli.changelog import Changelog
from kafkalog.cli.terminal.time_text import epoch_ms
from kafkalog.errors import DataLossError, InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.place import directory_log_of
from tests import ROOT
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.transactional_log import Log
from tests.unit.cli.conftest import Command
from tests.unit.cli.test_verbs import broker_directory

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
FORMS = r"2026-11-22 \(midnight in UTC\), 2026-11-22T10:00:00Z, epoch milliseconds, or how long ago"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two partitions: a key written thrice, one that was deleted, and one beside its partition."""
    log = LogBuilder(tmp_path / "log", now_ms=NOW_MS).topic(partitions=2)
    log.append(("a", "1"), ("b", "1"), partition=0)
    log.append(("a", "2"), ("b", None), partition=0, now_ms=NOW_MS + HOUR_MS)
    log.append(("a", "3"), partition=0, now_ms=NOW_MS + 2 * HOUR_MS)
    log.append(("a", "elsewhere"), partition=1, now_ms=NOW_MS + 2 * HOUR_MS)
    return log.close()


def values(rows: list[dict[str, object]]) -> list[object]:
    return [row["value"] for row in rows]


# --- from where ----------------------------------------------------------------------------------


def test_a_read_begins_at_the_first_record_unless_it_is_told_otherwise(
    kafkalog: Command, root: Path
) -> None:
    everything = kafkalog("read", root, "t").lines
    assert len(everything) == 6
    assert kafkalog("read", root, "t", "--from-beginning").lines == everything


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2023-11-14T22:13:20Z", ["1", "1", "2", None, "3", "elsewhere"]),
        ("2023-11-14T22:13:20.001Z", ["2", None, "3", "elsewhere"]),
        ("2023-11-15T00:13:20.500+01:00", ["3", "elsewhere"]),
        (str(NOW_MS + HOUR_MS), ["2", None, "3", "elsewhere"]),
        ("2023-11-14", ["1", "1", "2", None, "3", "elsewhere"]),
        ("2023-11-15", ["3", "elsewhere"]),
        ("2099-01-01T00:00:00Z", []),
        ("-36500d", ["1", "1", "2", None, "3", "elsewhere"]),
        ("-1h", []),
    ],
)
def test_a_read_begins_with_the_first_record_of_a_time(
    kafkalog: Command, root: Path, moment: str, expected: list[str | None]
) -> None:
    read = kafkalog("read", root, "t", "--json", "--from-time", moment)
    assert (read.status, values(read.json)) == (0, expected)


def test_how_long_ago_is_counted_from_now() -> None:
    for text, ago_ms in (("-90s", 90_000), ("-15m", 900_000), ("-7d", 168 * HOUR_MS)):
        assert epoch_ms(text, now_ms=NOW_MS, option="--from-time") == NOW_MS - ago_ms


def test_a_date_is_its_midnight_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert epoch_ms("2023-11-15", now_ms=NOW_MS, option="--from-time") == 1_700_006_400_000
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2023-11-14T22:13:20", f"has no zone: end it in Z .*; a moment is {FORMS}"),
        ("2023-11-14 22:13", "has no zone"),
        ("2023-11-31", "expected a moment"),
        ("yesterday", f"expected a moment: {FORMS}"),
        ("-1w", "expected a moment"),
        ("", "expected a moment"),
    ],
)
def test_a_moment_that_is_not_one_or_depends_on_the_machine_is_refused(
    text: str, reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^--from-time '{text}': {reason}"):
        epoch_ms(text, now_ms=NOW_MS, option="--from-time")


# --- of which key --------------------------------------------------------------------------------


def test_the_changelog_of_a_key_is_all_of_its_records_in_every_partition(
    kafkalog: Command, root: Path
) -> None:
    assert values(kafkalog("read", root, "t", "--key", "a", "--json").json) == [
        *("1", "2", "3", "elsewhere")
    ]
    assert values(kafkalog("read", root, "t", "--key", "b", "--json").json) == ["1", None]
    ranged = ("--partition", 0, "--start", 1, "--end", 3)
    assert values(kafkalog("read", root, "t", "--key", "a", "--json", *ranged).json) == ["2"]
    assert kafkalog("read", root, "t", "--key", "none").lines == []


def test_keys_that_only_look_alike_are_left_out(kafkalog: Command, root: Path) -> None:
    """The engine compares the ends of long keys alone."""
    alike = ["x" * 40 + middle + "y" * 40 for middle in ("1", "2")]
    with library.open(root) as log:
        LogBuilder(log).append(*((key, key[40]) for key in alike), partition=0)
    found = kafkalog("read", root, "t", "--key", alike[1], "--json").json
    assert values(found) == ["2"]


def test_a_key_is_found_far_beyond_others(
    kafkalog: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kafkalog.cli import changelog

    monkeypatch.setattr(changelog, "_SPAN", 3)
    with library.open(root) as log:
        others = [(f"{n}", "v") for n in range(50)]
        LogBuilder(log).append(*others, partition=0).append(("a", "4"), partition=0)
    assert values(kafkalog("read", root, "t", "--key", "a", "--json").json) == [
        *("1", "2", "3", "4", "elsewhere")
    ]


def test_a_key_is_given_in_the_encoding_of_keys(kafkalog: Command, root: Path) -> None:
    for encoding, key in (("hex", "61"), ("base64", "YQ==")):
        for mode in ([], ["--latest"]):
            command = ("read", root, "t", "--json", "--encoding", encoding, "--key", key, *mode)
            assert {row["key"] for row in kafkalog(*command).json} == {key}
    wrong = kafkalog("read", root, "t", "--encoding", "hex", "--key", "x")
    assert (wrong.status, wrong.err) == (2, "kafkalog: --key: 'x' is not hex\n")


# --- what keys have now --------------------------------------------------------------------------


@pytest.mark.parametrize("is_cleaned", [False, True])
def test_latest_is_the_latest_record_of_each_key_without_tombstones(
    kafkalog: Command, root: Path, is_cleaned: bool
) -> None:
    if is_cleaned:
        assert kafkalog("clean", root, "--force").status == 0
    read = ("read", root, "t", "--latest", "--json")
    assert values(kafkalog(*read).json) == ["3", "elsewhere"]
    assert values(kafkalog(*read, "--partition", 1).json) == ["elsewhere"]
    assert values(kafkalog(*read, "--limit", 1).json) == ["3"]


def test_a_lookup_prints_what_latest_prints_of_the_key(kafkalog: Command, root: Path) -> None:
    everything = kafkalog("read", root, "t", "--latest", "--json").lines
    for key in ("a", "b", "none"):
        wanted = [line for line in everything if f'"key":"{key}"' in line]
        assert kafkalog("read", root, "t", "--latest", "--json", "--key", key).lines == wanted


def test_a_read_stops_after_as_many_records_as_it_may(kafkalog: Command, root: Path) -> None:
    for limit in (1, 4, 5, 6, 9):
        assert len(kafkalog("read", root, "t", "--limit", limit).lines) == min(limit, 6)


# --- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--from-beginning", "--start", "1"], "--from-beginning and --start: give one of them"),
        (["--from-time", "-1h", "--start", "1"], "--from-time and --start: give one of them"),
        (["--from-beginning", "--from-time", "-1h"], "give one of them"),
        (["--follow", "--end", "3"], "--follow does not end and --end does"),
        (["--latest", "--follow"], "--latest prints the latest record of each key"),
        (["--latest", "--start", "1"], "--latest prints"),
        (["--latest", "--end", "1"], "--latest prints"),
        (["--latest", "--from-time", "-1h"], "--latest prints"),
        (["--latest", "--isolation-level", "read_uncommitted"], "--latest prints"),
        (["--start", "1"], "offsets of one --partition"),
        (["--partition", "7"], "has partitions 0 to 1"),
        (["--partition", "7", "--latest"], "has partitions 0 to 1"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    kafkalog: Command, root: Path, options: list[str], reason: str
) -> None:
    result = kafkalog("read", root, "t", *options)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert reason in result.err


def test_to_follow_from_an_offset_that_is_not_there_is_refused(
    kafkalog: Command, root: Path
) -> None:
    result = kafkalog("read", root, "t", "--follow", "--partition", 0, "--start", 9)
    assert (result.status, result.out) == (1, "")
    assert "the valid range is [0, 5]" in result.err


# --- what is committed later ---------------------------------------------------------------------


def followed(
    log: KafkaLog,
    *acts: Callable[[], object],
    level: str = "read_committed",
    key: bytes | None = None,
) -> list[list[object]]:
    """Follow a topic from its end; returns the values that came before each act, and at last."""
    numbers = tuple(log.offsets("t"))
    changelog = Changelog(directory_log_of(log), "t", numbers, level, key)
    todo = list(acts)
    reports: list[list[object]] = [[]]

    def wait() -> bool:
        if not todo:
            return False
        reports.append([])
        todo.pop(0)()
        return True

    state = directory_log_of(log).state()
    starts = changelog.ends(state)
    for batch in changelog.following(state, wait).batches(starts, is_all=True):
        reports[-1] += batch["value"].to_pylist()
    return reports


def test_what_is_committed_later_is_told_and_nothing_before(root: Path) -> None:
    with library.open(root) as log:
        builder = LogBuilder(log)
        acts = (
            lambda: builder.append(("a", "4"), ("c", "1"), partition=0),
            lambda: builder.append(("a", "5"), partition=1),
            lambda: log.create_topic("other"),
        )
        assert followed(log, *acts) == [[], [b"4", b"1"], [b"5"], []]
        last = ("a", "6"), ("c", "2")
        again = followed(log, lambda: builder.append(*last, partition=0), key=b"c")
        assert again == [[], [b"2"]]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("read_committed", [[], [], [b"0", b"1"], []]),
        ("read_uncommitted", [[], [b"0", b"1"], [], [b"3"]]),
    ],
)
def test_records_of_a_transaction_are_told_when_it_is_committed(
    tmp_path: Path, level: str, expected: list[list[bytes]]
) -> None:
    log = Log.create(tmp_path / "log", cleanup_policy="compact")
    acts = (
        lambda: log.transact(7, 1, 2),
        lambda: log.commit(7),
        lambda: (log.transact(7, 4), log.abort(7)),
    )
    with library.open(tmp_path / "log") as reader:
        assert followed(reader, *acts, level=level) == expected


@pytest.mark.parametrize("is_created_anew", [False, True])
def test_a_topic_that_is_deleted_ends_the_following(root: Path, is_created_anew: bool) -> None:
    def delete() -> None:
        log.delete_topic("t")
        if is_created_anew:
            log.create_topic("t", 2)

    with (
        library.open(root) as log,
        pytest.raises(DataLossError, match="topic 't' was deleted while it was followed"),
    ):
        followed(log, delete)


def test_what_is_deleted_before_it_is_read_is_told_and_the_rest_follows(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose() -> None:
        LogBuilder(log).append(("a", "4"), ("a", "5"), ("a", "6"), partition=0)
        log.delete_records("t", 0, 7)

    with library.open(root) as log:
        log.alter_topic("t", {"cleanup.policy": "compact,delete"})
        assert followed(log, lose) == [[], [b"6"]]
        assert capsys.readouterr().err == (
            "kafkalog: t-0: offsets 5 to 6 were deleted before they were read\n"
        )
        assert followed(log, lambda: log.delete_records("t", 0, -1)) == [[], []]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_following_ends_with_ctrl_c_and_every_record_was_sent_off_before(root: Path) -> None:
    command = [sys.executable, "-m", "kafkalog", "read", str(root), "t", "--follow"]
    with subprocess.Popen(
        # What a shell runs in its background ignores the signal, and so do its children.
        ["env", "--default-signal=INT", *command, "--from-beginning", "--key", "a"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline().split()[-1] for _ in range(4)] == [
            *("1", "2", "3", "elsewhere")
        ]
        with library.open(root) as log:
            LogBuilder(log).append(("b", "9"), ("a", "4"), partition=0)
        assert running.stdout.readline().split()[-1] == "4"
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_following_ends_with_a_ctrl_c_whose_exception_python_drops(
    kafkalog: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    pauses = iter([Finalized])
    monkeypatch.setattr(read, "pause", lambda _: bool(next(pauses)()))
    # What a shell runs in its background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert kafkalog("read", root, "t", "--follow").status == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_following_may_stop_after_some_records(kafkalog: Command, root: Path) -> None:
    followed = kafkalog("read", root, "t", "--follow", "--from-beginning", "--limit", 6)
    assert followed.lines == kafkalog("read", root, "t").lines


def test_a_brokers_directory_is_read_in_all_these_ways(kafkalog: Command, tmp_path: Path) -> None:
    broker_directory(tmp_path)
    read = ("read", tmp_path, "stock", "--json")
    everything = kafkalog(*read).json
    assert [row["offset"] for row in everything] == [0, 1, 2, 3]
    time_ms = everything[2]["timestamp"]
    assert kafkalog(*read, "--from-time", time_ms).json == everything[2:]
    assert kafkalog(*read, "--follow", "--from-beginning", "--limit", 4).json == everything
    for option in ([], ["--latest"]):
        assert kafkalog(*read, "--key", everything[3]["key"], *option).json == everything[3:]
    assert kafkalog(*read, "--latest").json == everything
