"""`append` from lines of text, as kafka-console-producer takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command


@pytest.fixture
def root(kafkalog: Command, tmp_path: Path) -> Path:
    for name, policy in (("t", "compact"), ("d", "delete")):
        config = ("--config", f"cleanup.policy={policy}")
        assert kafkalog("topics", "create", tmp_path / "log", name, *config).status == 0
    return tmp_path / "log"


def pairs(kafkalog: Command, root: Path, topic: str = "t") -> list[tuple[object, object]]:
    return [(row["key"], row["value"]) for row in kafkalog("read", root, topic, "--json").json]


def test_a_line_is_a_key_and_a_value(kafkalog: Command, root: Path) -> None:
    lines = "a=1\r\nä=x=y\nb=\n=empty key\nlast=no newline".encode()
    result = kafkalog("append", root, "t", "--key-separator", "=", stdin=lines)
    assert (result.status, result.lines[-1]) == (0, "5 records appended")
    assert pairs(kafkalog, root) == [
        *(("a", "1"), ("ä", "x=y"), ("b", ""), ("", "empty key"), ("last", "no newline"))
    ]


@pytest.mark.parametrize("separator", ["\t", r"\t", "::"])
def test_a_separator_is_any_text_and_a_tab_can_be_spelled(
    kafkalog: Command, root: Path, separator: str
) -> None:
    line = f"a{'::' if separator == '::' else chr(9)}1\n".encode()
    assert kafkalog("append", root, "t", "--key-separator", separator, stdin=line).status == 0
    assert pairs(kafkalog, root) == [("a", "1")]


def test_a_line_without_keys_is_a_value(kafkalog: Command, root: Path) -> None:
    assert kafkalog("append", root, "d", "--text", stdin=b"a=1\n\nx\n").status == 0
    assert pairs(kafkalog, root, "d") == [(None, "a=1"), (None, ""), (None, "x")]
    refused = kafkalog("append", root, "t", "--text", stdin=b"x\n")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "key" in refused.err


def test_a_marker_stands_for_null_and_nothing_else_does(kafkalog: Command, root: Path) -> None:
    option = ("--key-separator", "=", "--null-marker", "NULL")
    lines = b"a=NULL\nb=null\nc=NULL \nd=\n"
    assert kafkalog("append", root, "t", *option, stdin=lines).status == 0
    assert pairs(kafkalog, root) == [("a", None), ("b", "null"), ("c", "NULL "), ("d", "")]
    assert kafkalog("append", root, "d", *option, stdin=b"NULL=v\n").status == 0
    assert pairs(kafkalog, root, "d") == [(None, "v")]


def test_keys_and_values_of_lines_have_an_encoding(
    kafkalog: Command, root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_text("ff00:80\n")
    option = ("--key-separator", ":", "--encoding", "hex")
    assert kafkalog("append", root, "t", file, *option, "--partition", 0).status == 0
    (found,) = kafkalog("read", root, "t", "--json", "--encoding", "hex").json
    assert (found["key"], found["value"]) == ("ff00", "80")


@pytest.mark.parametrize(
    ("options", "lines", "reason"),
    [
        (["--key-separator", "="], b"a=1\nb\n", "line 2: no '=' ends a key in 'b'"),
        (["--key-separator", "="], b"a=1\n\n", "line 2: no '=' ends a key in ''"),
        (["--key-separator", "="], b"a=\xff\n", "line 1: expected text in UTF-8"),
        (["--key-separator", "=", "--encoding", "hex"], b"zz=00\n", "line 1: key: 'zz' is not hex"),
        (["--key-separator", ""], b"", "--key-separator: expected some text"),
        (["--key-separator", "=", "--text"], b"", "--text has only values"),
        (["--null-marker", "N"], b"", "--null-marker is for lines of text"),
        (["--raw", "FILE", "--partition", "0", "--text"], b"", "--raw FILE takes neither --text"),
        (
            ["--raw", "FILE", "--partition", "0", "--encoding", "hex"],
            b"",
            "--raw FILE takes neither",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line_and_nothing_is_appended(
    kafkalog: Command, root: Path, options: list[str], lines: bytes, reason: str
) -> None:
    result = kafkalog("append", root, "t", *options, stdin=lines)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert reason in result.err
    assert pairs(kafkalog, root) == []
