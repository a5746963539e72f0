"""What a terminal gets and nothing else does: colours, and bars with a rate and a time left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.builders.log_builder import LogBuilder

RATE = re.compile(r"[0-9.,]+(/s| bytes/s| [kMG]B/s)")
LEFT = re.compile(r"-:--:--|[0-9]+:[0-9]{2}:[0-9]{2}")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

pytestmark = pytest.mark.slow


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = LogBuilder(tmp_path / "log").topic(partitions=2, segment_bytes=20_000)
    return log.rounds(5, (f"key-{n}" for n in range(500))).close()


def on_terminal(
    *arguments: str | Path, streams: tuple[str, ...] = ("stdout", "stderr"), **environment: str
) -> str:
    """Return what a command writes to a terminal; a stream that is not there goes nowhere."""
    leader, follower = pty.openpty()
    files = {
        name: follower if name in streams else subprocess.DEVNULL for name in ("stdout", "stderr")
    }
    known = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "kafkalog", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        **files,
        env={**known, "TERM": "xterm-256color", "COLUMNS": "120", **environment},
    ) as running:
        os.close(follower)
        written = read_all(leader)
        running.wait(timeout=60)
    return written


def read_all(leader: int) -> str:
    found = b""
    try:
        while data := os.read(leader, 1 << 16):
            found += data
    except OSError:  # the last one who had it open has closed it
        pass
    os.close(leader)
    return found.decode()


def test_a_table_has_colours_on_a_terminal(log: Path) -> None:
    on_terminal("clean", log, "--force")
    assert "\x1b[32mclean" in on_terminal("status", log)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_are_left_out_where_none_are_wanted(log: Path, environment: dict[str, str]) -> None:
    assert "\x1b" not in on_terminal("status", log, **environment)
    error = on_terminal("read", log, "none", **environment)
    assert error.startswith("kafkalog: topic 'none'")
    bar = on_terminal("verify", log, **environment)
    assert COLOUR.search(bar.replace("\x1b[0m", "")) is None


def test_an_error_stands_out_on_a_terminal(log: Path) -> None:
    assert on_terminal("read", log, "none").startswith("\x1b[31mkafkalog:\x1b[0m topic 'none'")


def test_a_dumb_terminal_gets_no_bar(log: Path) -> None:
    assert on_terminal("verify", log, TERM="dumb") == f"{log}: no damage, no notices\r\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "LOG"),
        ("clean", "LOG", "--force"),
        ("read", "LOG", "t"),
        ("read", "LOG", "t", "--key", "key-7"),
        ("read", "LOG", "t", "--latest"),
        ("append", "LOG", "t", "LINES", "--key-separator", "="),
        ("dump", "LOG/t-0/00000000000000000000.log"),
    ],
)
def test_what_may_take_long_shows_a_bar_with_a_rate_and_the_time_left(
    log: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"key-{n}={'v' * 500_000}\n" for n in range(30)))
    given = [part.replace("LOG", str(log)).replace("LINES", str(lines)) for part in arguments]
    shown = ESCAPE.sub("", on_terminal(*given, streams=("stderr",)))
    assert re.search(r"(read|verify|clean|append|dump|compil)ing ", shown)
    assert RATE.search(shown)
    assert LEFT.search(shown)


def test_adoption_and_release_show_of_how_many_partitions(tmp_path: Path) -> None:
    from tests.unit.cli.test_verbs import broker_directory

    broker_directory(tmp_path / "broker")
    for verb in ("adopt", "release"):
        shown = ESCAPE.sub("", on_terminal(verb, tmp_path / "broker", streams=("stderr",)))
        assert "1/1" in shown, verb


def test_a_bar_gives_way_to_the_records_on_the_same_terminal(log: Path) -> None:
    plain = ESCAPE.sub("", on_terminal("read", log, "t"))
    assert "reading" not in plain
    found = on_terminal("read", log, "t", "--key", "key-7")
    last = found.rindex("reading") if "reading" in found else -1
    assert last < found.index("key-7")
