"""`kafkalog erase`: the report, the exit status, what is given, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog as library
from kafkalog.cleaner.report.explain import utc_time
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import latest_records
from tests.unit.cli.conftest import Command

KEY = "user-4711"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A log, from a working directory where reports may go."""
    log = LogBuilder(tmp_path / "log", now_ms=clock.now_ms()).topic(
        partitions=2, segment_bytes=1_000
    )
    for turn in range(3):
        log.append((KEY, f"turn {turn}"), (f"{KEY}-2", "longer"), ("u1", "short"))
    log.clean().append((KEY, "last"), ("u1", f"knows {KEY}")).close()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "log"


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def reports() -> list[Path]:
    return sorted(Path().glob("*.json"))


def test_the_first_run_leaves_the_deletion_and_says_when_it_goes(
    root: Path, kafkalog: Command
) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--no-wait")
    assert result.status == 1
    assert any("the deletion itself" in line for line in result.lines)
    assert any("erase again then" in line for line in result.lines)
    assert result.err == "kafkalog: t: something of 1 key is left, see above\n"
    again = kafkalog("erase", root, "t", "--key", KEY, "--report", "again.json", "--no-wait")
    assert again.status == 1
    assert not any(line.startswith("wrote") for line in again.lines)


def test_with_now_nothing_is_left_and_it_says_what_followers_may_miss(
    root: Path, kafkalog: Command
) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--now", "--strict")
    assert result.status == 1  # another record's value knows it
    assert any("with another key have the bytes of one" in line for line in result.lines)
    result = kafkalog("erase", root, "t", "--key", KEY, "--key", "u1", "--now", "--strict",
                      "--report", "second.json")  # fmt: skip
    assert "that has not read them by now keeps the keys for good" in result.err
    assert any("of other keys" in line for line in result.lines) is False
    assert latest_records(root).keys() == {f"{KEY}-2".encode()}
    result = kafkalog("erase", root, "t", "--key", f"{KEY}-2", "--key", KEY, "--key", "u1", "--now",
                      "--strict", "--report", "third.json")  # fmt: skip
    assert result.status == 0
    assert result.lines[-1] == f"erased   no occurrence of 3 keys is left in {root}"


def test_the_report_is_dated_tells_what_was_looked_at_and_has_no_key(
    root: Path, kafkalog: Command
) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--now")
    (file,) = reports()
    assert file.name.startswith("kafkalog-erase-t-2")
    assert f"report   {file}" in result.lines
    text = file.read_text()
    assert KEY not in text
    report = json.loads(text)
    assert report["erased"] is True
    assert report["keys"][0]["sha256"] == hashlib.sha256(KEY.encode()).hexdigest()
    assert (report["keys"][0]["before"] > 0, report["keys"][0]["after"]) == (True, 0)
    assert report["before"]["left"] != []
    assert report["after"]["left"] == []
    looked = {kind["kind"]: kind for kind in report["after"]["kinds"]}
    assert looked["log"]["how"] == "records"
    assert looked["journal"]["how"] == "bytes"
    assert sum(kind["files"] for kind in looked.values()) == report["after"]["files"]
    assert report["time"].startswith("20")
    assert report["notLookedAt"]
    assert f"{report['after']['records']} records" in next(
        line for line in result.lines if line.startswith("after")
    )


def test_json_is_the_report(root: Path, kafkalog: Command) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--now", "--json", "--report", "r.json")
    (printed,) = result.json
    assert printed.pop("file") == "r.json"
    assert printed == json.loads(Path("r.json").read_text())
    assert result.status == 0


def test_a_dry_run_looks_and_changes_nothing(root: Path, kafkalog: Command) -> None:
    before = contents(root)
    result = kafkalog("erase", root, "t", "--key", KEY, "--dry-run", "--json")
    assert result.status == 1
    (report,) = result.json
    assert (report["dryRun"], report["after"], report["erased"]) == (True, None, False)
    assert report["before"]["recordsFound"] > 0
    assert contents(root) == before
    nothing = kafkalog("erase", root, "t", "--key", "nobody", "--dry-run", "--report", "n.json")
    assert nothing.status == 0
    assert any("the key was found nowhere before" in line for line in nothing.lines)
    assert nothing.lines[-1] == "no occurrence of 1 key; nothing was changed"
    assert contents(root) == before


def test_a_dry_run_ends_with_what_to_do_and_writes_a_report_only_where_one_is_named(
    root: Path, kafkalog: Command
) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--dry-run")
    assert (result.status, result.err, reports()) == (1, "", [])
    assert result.lines[-1] == "1 key found; nothing was changed; run without --dry-run"
    assert "again" not in result.out
    kafkalog("erase", root, "t", "--key", KEY, "--dry-run", "--report", "looked.json")
    assert json.loads(Path("looked.json").read_text())["dryRun"] is True
    assert list(Path().iterdir()) == [Path("looked.json")]


def test_a_report_tells_as_of_which_commit_it_is_so(root: Path, kafkalog: Command) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--now", "--report", "r.json")
    with library.open(root, read_only=True) as log:
        number, ends = directory_log_of(log).state().number, log.offsets("t")
    as_of = json.loads(Path("r.json").read_text())["after"]["asOf"]
    assert as_of == {
        "journalRecord": number,
        "highWatermarks": {str(partition): end for partition, (_, end) in ends.items()},
    }
    shown = ", ".join(f"t-{partition} to offset {end}" for partition, (_, end) in ends.items())
    assert f"as of    record {number} of the journal ({shown})" in result.lines


def test_the_first_run_ends_with_the_two_next_steps(root: Path, kafkalog: Command) -> None:
    result = kafkalog("erase", root, "t", "--key", KEY, "--no-wait", "--report", "r.json")
    (left,) = json.loads(Path("r.json").read_text())["deletionsLeft"]
    with library.open(root, read_only=True) as log:
        assert left["nextOffset"] == log.offsets("t")[left["partition"]][1]
    first, second = result.lines[-2:]
    assert f"kafkalog status {root} --checkpoint DIR" in first
    assert f"(t-{left['partition']}: {left['nextOffset']})" in first
    assert "--now" in second
    assert utc_time(left["untilMs"]) in second


def test_runs_of_one_second_have_reports_of_their_own(
    root: Path, kafkalog: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now_ms", lambda: 1_700_000_000_000)
    for _ in range(3):
        assert kafkalog("erase", root, "t", "--key", "nobody").status == 0
    stem = "kafkalog-erase-t-20231114T221320Z"
    names = [f"{stem}{number}.json" for number in ("-2", "-3", "")]
    assert sorted(path.name for path in Path().iterdir()) == names


def test_a_run_that_is_killed_leaves_no_report_and_the_next_one_writes_it(
    root: Path, kafkalog: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves is an empty file of a temporary name."""
    arguments = ("erase", root, "t", "--key", KEY, "--now", "--report", "r.json")
    child = os.fork()
    if not child:
        monkeypatch.setattr("kafkalog.erasure.erase.erase", lambda *_, **__: os._exit(9))
        with contextlib.suppress(BaseException):
            kafkalog(*arguments)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name for path in Path().iterdir()] == ["r.json.tmp"]
    assert kafkalog(*arguments).status == 0
    assert json.loads(Path("r.json").read_text())["erased"] is True
    assert [path.name for path in Path().iterdir()] == ["r.json"]


def test_a_report_has_a_line_for_each_key(root: Path, kafkalog: Command) -> None:
    keys = [f"nobody-{number}" for number in range(50)]
    Path("keys.txt").write_text("\n".join(keys))
    kafkalog("erase", root, "t", "--keys-from", "keys.txt", "--report", "r.json")
    text = Path("r.json").read_text()
    assert [one["sha256"] for one in json.loads(text)["keys"]] == [
        hashlib.sha256(key.encode()).hexdigest() for key in keys
    ]
    assert sum('"sha256"' in line for line in text.splitlines()) == 50


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["abc"], "values and headers of other records were not searched: the key has fewer"),
        (["abc", KEY], "not searched: 1 of 2 keys has fewer than 4 bytes"),
        (["a", "b", KEY], "not searched: 2 of 3 keys have fewer than 4 bytes"),
        ([f"{KEY}{n}" for n in range(257)], "not searched: there are more than 256 keys"),
        (["u1"], "note     the key was compared with the keys of records alone"),
        (["u1", KEY], "note     1 of 2 keys was compared with the keys of records alone"),
        (["nobody-1", "nobody-2"], "note     2 of 2 keys were found nowhere before"),
        ([KEY, f"{KEY}-2"], "note     1 record of another key has the bytes of a key"),
    ],
)
def test_what_was_not_searched_is_told_and_why(
    root: Path, kafkalog: Command, keys: list[str], said: str
) -> None:
    Path("keys.txt").write_text("\n".join(keys))
    result = kafkalog("erase", root, "t", "--keys-from", "keys.txt", "--dry-run")
    assert said in result.out


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"{KEY}\nu1\n", []),
        (f"{KEY}\r\n\r\nu1", []),
        (f"{KEY.encode().hex()}\n {b'u1'.hex()} \n", ["--encoding", "hex"]),
        ("dXNlci00NzEx\ndTE=\n", ["--encoding", "base64"]),
    ],
)
@pytest.mark.parametrize("is_piped", [False, True])
def test_keys_come_from_a_file_or_the_standard_input(
    root: Path, kafkalog: Command, text: str, options: list[str], is_piped: bool
) -> None:
    Path("keys.txt").write_bytes(text.encode())
    given = "-" if is_piped else "keys.txt"
    result = kafkalog(
        "erase", root, "t", "--keys-from", given, "--now", *options, stdin=text.encode()
    )
    assert (result.status, latest_records(root).keys()) == (0, {f"{KEY}-2".encode()})


def test_the_empty_key_is_given_with_key(root: Path, kafkalog: Command) -> None:
    with library.open(root) as log:
        log.append("t", [("", "nobody")])
    assert b"" in latest_records(root)
    assert kafkalog("erase", root, "t", "--key", "", "--now").status == 0
    assert b"" not in latest_records(root)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which key? give --key KEY, or --keys-from FILE"),
        (["--keys-from", "none.txt"], "none.txt: No such file"),
        (["--keys-from", "empty.txt"], "empty.txt: it has no key"),
        (["--keys-from", "-"], "kafkalog: the standard input: it has no key"),
        (["--keys-from", "keys.txt", "--encoding", "hex"], "keys.txt: line 2: 'zz' is not hex"),
        (["--key", "zz", "--encoding", "hex"], "--key: 'zz' is not hex"),
        (["--key", "k", "--now", "--dry-run"], "--now does not go with --dry-run"),
        (["--key", "k", "--now", "--no-wait"], "--now does not go with --no-wait"),
        (["--key", "k", "--no-wait", "--dry-run"], "--no-wait does not go with --dry-run"),
        (["--key", "k", "--report", "{root}/r.json"], "a report does not belong in the log"),
        (["--key", "k", "--report", "keys.txt"], "keys.txt: exists already"),
        (["--key", "k", "--report", "no/r.json"], "no/r.json: No such file"),
    ],
)
def test_wrong_usage_is_one_line_and_changes_nothing(
    root: Path, kafkalog: Command, arguments: list[str], said: str
) -> None:
    Path("empty.txt").write_text("\n\n")
    Path("keys.txt").write_text("00\nzz\n")
    before = contents(root)
    result = kafkalog("erase", root, "t", *(one.replace("{root}", str(root)) for one in arguments))
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert (contents(root), reports()) == (before, [])


def test_what_cannot_be_erased_is_one_line_and_leaves_no_report(
    root: Path, kafkalog: Command
) -> None:
    with library.open(root) as log:
        log.create_topic("events", config={"cleanup.policy": "delete"})
    for arguments, said in (
        ([root, "events"], "events: its cleanup.policy is delete"),
        ([root, "none"], "topic 'none' does not exist"),
        ([root.parent / "here", "t"], "no log here"),
    ):
        result = kafkalog("erase", *arguments, "--key", "k", "--no-wait")
        assert (result.status, result.out) == (2, "")
        assert said in result.err
        assert (result.err.count("\n"), reports()) == (1, [])


def test_a_brokers_directory_is_looked_through_and_not_written(
    tmp_path: Path, root: Path, kafkalog: Command
) -> None:
    broker = root.rename(tmp_path / "broker")
    assert kafkalog("release", broker).status == 0
    (broker / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=1\n")
    before = contents(broker)
    assert kafkalog("erase", broker, "t", "--key", KEY, "--dry-run").status == 1
    refused = kafkalog("erase", broker, "t", "--key", KEY, "--report", "b.json")
    assert (refused.status, "is only read" in refused.err) == (2, True)
    assert contents(broker) == before


@pytest.mark.slow
def test_replaced_files_are_waited_for_unless_told_not_to(root: Path, kafkalog: Command) -> None:
    with library.open(root) as log:
        log.alter_topic("t", {"file.delete.delay.ms": "1500", "delete.retention.ms": "0"})
    first = kafkalog("erase", root, "t", "--key", KEY)
    assert "waiting; --no-wait leaves them" in first.err
    assert not any(".deleted" in line for line in first.lines)
    second = kafkalog("erase", root, "t", "--key", KEY, "--report", "second.json")
    assert second.status == 0
