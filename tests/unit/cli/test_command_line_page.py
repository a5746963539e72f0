"""What docs/command-line.md shows is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import ROOT
from tests.unit.cli.conftest import Command

PAGE = ROOT / "docs" / "command-line.md"
_TOPIC_ID = re.compile(r"(?<![\w-])[A-Za-z0-9_-]{22}(?![\w-])")


def test_the_commands_of_the_page_print_what_it_shows(
    kafkalog: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    shown = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
    assert len(shown) >= 17
    for line, output in shown:
        name, *arguments = shlex.split(line.replace("/data", str(tmp_path)))
        if name == "export":
            monkeypatch.setenv(*arguments[0].split("=", 1))
            continue
        if name == "cat":
            Path(arguments[0]).write_text(output)
            continue
        assert name == "kafkalog"
        result = kafkalog(*arguments)
        printed = (result.out + result.err).replace(str(tmp_path), "/data")
        assert _TOPIC_ID.sub("id", printed) == _TOPIC_ID.sub("id", output), line
