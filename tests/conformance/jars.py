"""Kafka's programs out of the jars that `make peers` fetches, as processes beside the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

from tests import ROOT, class_archives
from tests.conformance.installation import Ended, Program, UnavailableError

PEERS = ROOT / ".peers"


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


class Jars:
    """An installation of Kafka in a directory of jars for each profile of pom.xml."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name = f"Kafka's jars in {root.name}/"

    @classmethod
    def find(cls, root: Path = PEERS) -> Self:
        """Return the jars of the root, if they are complete and Java is there."""
        if not (root / ".ready").exists():
            raise UnavailableError("`make peers` fetches them")
        if shutil.which(_java()) is None:
            raise UnavailableError("Java is missing")
        return cls(root)

    def _command(self, program: Program, arguments: tuple[str, ...]) -> list[str]:
        class_path = f"{self._root / program.profile}/*"
        java, *words = program.command(_java(), class_path, *arguments)
        return [java, *class_archives.options(class_archives.BROKER), *words]

    def source_command(self, source: Path) -> list[str]:
        """Return the command that compiles a Java file beside the broker's classes, and runs it."""
        class_path = f"{self._root / Program.SERVER.profile}/*"
        return [_java(), "-Xmx512m", "-XX:+UseSerialGC", "-cp", class_path, str(source)]

    def run(self, program: Program, *arguments: str, directory: Path, timeout: float) -> Ended:
        """Run a program to its end."""
        # A JVM that finds options there says so, in the midst of what the program says.
        quiet = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        result = subprocess.run(
            self._command(program, arguments),
            check=False,
            cwd=directory,
            env=quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Ended(result.returncode, result.stdout, result.stderr)

    def start(
        self, program: Program, *arguments: str, directory: Path, output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program."""
        with output.open("ab") as stream:
            return subprocess.Popen(
                self._command(program, arguments),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
