"""Runs command lines in this process; `process` in test_process.py starts the real command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cli import run


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> list[dict[str, Any]]:
        import json

        return [json.loads(line) for line in self.lines]


Command = Callable[..., Result]


@pytest.fixture
def kafkalog(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def command(*arguments: str | Path | int, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Result(status, printed.out, printed.err)

    return command
