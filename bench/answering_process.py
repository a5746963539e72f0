"""A process of its own that a benchmark asks line by line, so that its memory is its alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from bench import NO_BYTECODE

__all__ = ["AnsweringProcess"]

_LAST_S: Final = 60
"""How long it may take to end."""


class AnsweringProcess:
    """A program of `bench` that answers each line by a line of JSON; a context manager.

    Its messages go to the file `errors`, or where those of this process go.
    """

    def __init__(self, program: str, *arguments: str, errors: Path | None = None) -> None:
        self._program = program
        self._errors = errors
        inherited = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
        told = None if errors is None else errors.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                env=inherited,
            )
        finally:
            if told is not None:
                told.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_LAST_S)
            except BaseException:
                process.kill()
                raise
        if kind is None and process.returncode:
            self._give_up()

    def ask(self, line: str) -> Any:
        """Send a line, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._give_up()
        return json.loads(answer)

    def _give_up(self) -> NoReturn:
        told = "" if self._errors is None else self._errors.read_text(errors="replace")[-2000:]
        status = self._process.wait()
        raise SystemExit(f"{told}\n{self._program} has ended with {status}".lstrip())
