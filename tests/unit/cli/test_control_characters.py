"""A terminal gets no control characters from a log, and a pipe gets what is there."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kafkalog as library
from kafkalog.cli import run as run_command
from kafkalog.cli.terminal.control_characters import escaped

CONTROLS = {
    "\x1b[31mred\x1b]0;title\x07": "\\x1b[31mred\\x1b]0;title\\x07",
    "a\n0\t9\tforged": "a\\n0\\t9\\tforged",
    "gone\r\b\x7f": "gone\\r\\x08\\x7f",
    "\x9b2J\x85": "\\x9b2J\\x85",
    "\u202egnp.exe\u2069\u200f": "\\u202egnp.exe\\u2069\\u200f",
    "\u2028line\x00": "\\u2028line\\x00",
}
PLAIN = ["apple", "Ünïcødé ✓", "👩‍👩‍👧", "C:\\new", '"quoted"', ""]


class Terminal(io.TextIOWrapper):
    """A standard stream that says it is a terminal, or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with both streams on a terminal, or not."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")  # no bars

    def called(*arguments: object, is_terminal: bool = True) -> tuple[str, str]:
        out, err = (Terminal(is_terminal=is_terminal) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            run_command([str(each) for each in arguments])
        return out.text(), err.text()

    return called


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A log with control characters wherever a record can have them."""
    with library.open(tmp_path / "log") as log:
        log.create_topic("t", config={"cleanup.policy": "delete"})
        log.append("t", [(text, text, [(text, text.encode())]) for text in CONTROLS])
    yield tmp_path / "log"


@pytest.mark.parametrize("text", CONTROLS)
def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_not(text: str) -> None:
    assert escaped(text) == CONTROLS[text]
    for plain in PLAIN:
        assert escaped(plain) == plain
        assert escaped(plain + text) == plain + CONTROLS[text]


SEGMENT = "t-0/00000000000000000000.log"
LINES = [
    ("read", "LOG", "t"),
    ("read", "LOG", "t", "--format", "%t %p %o %T %K %S %k %s %h %R\n"),
    ("tail", "LOG", "t"),
    ("tail", "LOG", "t", "--format", "%k=%s\n"),
    ("read", "LOG", "t", "--json"),
    ("dump", f"LOG/{SEGMENT}", "--print-data-log"),
    ("dump", f"LOG/{SEGMENT}", "--print-data-log", "--json"),
]


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_terminal_gets_none_from_records_and_a_line_for_each(
    line: tuple[str, ...], log: Path, run: Run
) -> None:
    out, err = run(*(word.replace("LOG", str(log)) for word in line))
    assert (escaped(out, kept="\n\t"), err) == (out, "")
    others = {"read": 0, "tail": 0, "dump": 2}[line[0]]  # of the file, and of the batch
    others += line[0] == "dump" and "--json" not in line
    assert out.count("\n") == len(CONTROLS) + others
    if "--json" not in line:
        for text in CONTROLS.values():
            assert text in out


@pytest.mark.parametrize("line", [line for line in LINES if "--json" not in line], ids=" ".join)
def test_raw_and_a_pipe_give_what_the_records_have(
    line: tuple[str, ...], log: Path, run: Run
) -> None:
    words = [word.replace("LOG", str(log)) for word in line]
    raw, _ = run(*words, "--raw")
    piped, _ = run(*words, is_terminal=False)
    assert raw == piped
    for text in CONTROLS:
        assert text in raw


def test_json_says_the_same_on_a_terminal_and_gives_the_text_back(log: Path, run: Run) -> None:
    out, _ = run("read", log, "t", "--json")
    assert (out, "") == run("read", log, "t", "--json", is_terminal=False)
    assert [json.loads(row)["value"] for row in out.splitlines()] == list(CONTROLS)


@pytest.mark.parametrize(
    "verb", [("read", "LOG", "t"), ("tail", "LOG", "t"), ("dump", "LOG/commit")]
)
def test_raw_has_no_meaning_for_json(verb: tuple[str, ...], log: Path, run: Run) -> None:
    out, err = run(*(word.replace("LOG", str(log)) for word in verb), "--raw", "--json")
    assert out == "" and "--raw and --json" in err


@pytest.mark.parametrize("text", [each for each in CONTROLS if "\x00" not in each])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_messages_and_names_on_a_disk_are_escaped(
    text: str, is_terminal: bool, log: Path, run: Run
) -> None:
    (log / text).touch()
    (log / "t-0" / text).touch()
    told = [
        run("read", log, text, is_terminal=is_terminal)[1],
        run("verify", log, text, is_terminal=is_terminal)[1],
        run("read", log / text, "t", is_terminal=is_terminal)[1],
        run("topics", "create", log, text, is_terminal=is_terminal)[1],
        run("read", log, "t", "--key", text, "--encoding", "hex", is_terminal=is_terminal)[1],
    ]
    for message in told:
        assert message.count("\n") == 1 and escaped(message[:-1]) == message[:-1]
    out, _ = run("verify", log, is_terminal=is_terminal)
    if is_terminal:
        assert escaped(out, kept="\n") == out and out.count("\n") == 2
    assert is_terminal == (CONTROLS[text] in out)
