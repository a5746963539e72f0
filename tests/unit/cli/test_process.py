"""The command as a process: installed, quick to start, at peace with pipes and signals."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cli import VERBS
from kafkalog.cli.terminal.output import PipeClosed, pause
from tests import ROOT
from tests.acceptance.users import as_nobody
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command

COMMAND = [sys.executable, "-m", "kafkalog"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    records = [(f"key-{n}", "value" * 20) for n in range(5000)]
    return LogBuilder(tmp_path / "log").topic(partitions=3).append(*records).close()


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def test_the_package_installs_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kafkalog": "kafkalog.cli:main"}


@pytest.mark.slow
def test_the_exit_status_is_the_processs(log: Path) -> None:
    assert process("verify", log).returncode == 0
    (log / "commit").write_bytes(b"x" * 600)
    damaged = process("verify", log)
    assert damaged.returncode == 1
    missing = process("read", log, "none")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("kafkalog: ")
    assert missing.stderr.count("\n") == 1
    assert process("rread", log).returncode == 2


@pytest.mark.parametrize("verb", [["read"], ["status"], ["topics", "create"], ["adopt"]])
def test_a_path_that_is_too_long_is_one_line(kafkalog: Command, verb: list[str]) -> None:
    result = kafkalog(*verb, "x" * 5000, *(["t"] if verb != ["adopt"] else []))
    assert (result.out, result.err.count("\n")) == ("", 1)
    assert result.status in (1, 2)


@pytest.mark.parametrize(
    "line",
    [
        *(
            [verb, "LOG"]
            for verb in (
                "status",
                "verify",
                "adopt",
                "release",
                "clean",
                "cleaner",
                "writers",
                "ui",
            )
        ),
        *([verb, "LOG", "t"] for verb in ("read", "explain", "append")),
        ["topics", "list", "LOG"],
        ["erase", "LOG", "t", "--key", "k"],
        ["dump", "LOG/commit"],
        ["copy", "LOG", "nowhere"],
    ],
    ids=" ".join,
)
def test_a_log_that_this_user_may_not_read_is_one_line_and_no_wrong_usage(
    kafkalog: Command, log: Path, line: list[str]
) -> None:
    log.chmod(0o700)
    for directory in list(log.parents)[:3]:
        directory.chmod(directory.stat().st_mode | 0o011)
    told = [word.replace("LOG", str(log)) for word in line]
    kafkalog(*(word.replace("LOG", "nowhere") for word in line))  # its modules are loaded now
    with as_nobody():
        result = kafkalog(*told)
    assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
    assert "Permission denied" in result.err


def test_a_limit_beyond_any_number_of_records_does_not_limit(log: Path, kafkalog: Command) -> None:
    result = kafkalog("read", log, "t", "--limit", "9" * 20)
    assert (result.status, len(result.lines)) == (0, 5000)


@pytest.mark.slow
def test_a_closed_pipe_prints_no_traceback(log: Path) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [*COMMAND, "read", str(log), "t"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
    ) as running:
        os.close(writer)
        assert os.read(reader, 10)
        os.close(reader)
        _, err = running.communicate(timeout=60)
    assert err == b""
    assert running.returncode == 141


@pytest.mark.slow
def test_following_ends_when_its_reader_goes_away_though_nothing_is_committed(log: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "read", str(log), "t", "--follow", "--from-beginning", "--key", "key-7"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        assert b"key-7" in running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr.read() == b""


def test_a_pause_ends_when_the_reader_of_the_output_has_gone_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, (tmp_path / "out").open("w") as file:
        for output in (pipe, file, io.StringIO()):
            monkeypatch.setattr(sys, "stdout", output)
            pause(0)
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(PipeClosed):
            pause(60)


def test_help_into_a_closed_pipe_shows_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [*COMMAND, "--help"], cwd=ROOT, check=False, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_show_no_traceback(log: Path, closed: str) -> None:
    command = f"{shlex.join(COMMAND)} topics list {log} {closed}"
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, check=False, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert process("verify", log).returncode == 0


@pytest.mark.slow
def test_a_full_disk_behind_the_output_is_one_line(log: Path) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*COMMAND, "topics", "list", str(log)],
            cwd=ROOT,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    expected = b"kafkalog: the standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, expected)


@pytest.mark.slow
def test_what_the_output_cannot_tell_is_escaped(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.append("t", [("k", "\u00e9")])
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for option, shown in (([], b"\\xe9\n"), (["--json"], b'"value":"\\u00e9"}\n')):
        result = subprocess.run(
            [*COMMAND, "read", str(tmp_path / "log"), "t", *option],
            cwd=ROOT,
            check=False,
            capture_output=True,
            env={**os.environ, **ascii_only},
        )
        assert (result.returncode, result.stderr) == (0, b"")
        assert result.stdout.endswith(shown)


@pytest.mark.slow
def test_an_interrupt_shows_no_traceback_and_leaves_nothing(log: Path) -> None:
    with subprocess.Popen(
        # What a shell runs in its background ignores the signal, and so do its children.
        ["env", "--default-signal=INT", *COMMAND, "append", str(log), "t"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin is not None
        running.stdin.write(b'{"key":"k","value":"v"}\n' * 300_000)  # it has begun to read
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert [path.name for path in log.iterdir() if "staged" in path.name] == []


def test_no_bar_is_drawn_but_on_a_terminal(log: Path) -> None:
    assert process("verify", log).stderr == f"{log}: no damage, no notices\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"pyarrow", "numpy", "rich"}),
        (["status", "LOG", "--json"], {"pyarrow", "rich"}),
        (["explain", "LOG", "t"], {"pyarrow", "rich"}),
        (["topics", "list", "LOG"], {"pyarrow", "rich"}),
        (["dump", "LOG/commit"], {"pyarrow", "rich"}),
    ],
)
def test_a_verb_loads_what_it_needs_alone(log: Path, arguments: list[str], heavy: set[str]) -> None:
    given = [argument.replace("LOG", str(log)) for argument in arguments]
    program = (
        "import sys; from kafkalog.cli import run; status = run(sys.argv[1:]);"
        f"loaded = {heavy!r} & sys.modules.keys(); sys.exit(str(loaded) if loaded else status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *given], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_that_says_what_it_does(kafkalog: Command, verb: str) -> None:
    result = kafkalog(verb, "--help")
    assert result.status == 0
    assert VERBS[verb].split()[-1].strip(".") in result.out
    assert verb in kafkalog("--help").out


def test_the_release_is_printed_and_whether_the_kernels_are_compiled(kafkalog: Command) -> None:
    import kafkalog as package

    assert package.__compiled__
    assert kafkalog("--version").out == f"kafkalog {package.__version__} (kernels: compiled)\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["read"], ["read", "--partition", "x", "a"]])
def test_wrong_usage_is_one_line_that_leads_to_help(
    kafkalog: Command, arguments: list[str]
) -> None:
    result = kafkalog(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "--help" in result.err
