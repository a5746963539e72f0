"""A git repository under test, with the verbs that the tests are told in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

AUTHOR_TIME: Final = 1_500_000_000
IDENTITY: Final = {
    **{f"GIT_{who}_NAME": "A U Thor" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "author@example.com" for who in ("AUTHOR", "COMMITTER")},
    "GIT_AUTHOR_DATE": f"{AUTHOR_TIME} +0200",
    "GIT_COMMITTER_DATE": "1600000000 +0000",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}
ODD_NAMES: Final = [
    *(b"line\nbreak", b'quo"te', b"back\\slash", b"\xff\xfe not utf-8", "snow \u2603".encode()),
    *(b":100644 000000", b"\x01" + b"a" * 40 + b" 1", b"tab\t", b" ", b"-rf", b"\n:x", b"\x7f"),
]


class Repository:
    """A new repository in `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str | bytes, given: bytes | None = None) -> str:
        command = ["git", "-C", str(self.path), "-c", "protocol.file.allow=always", *arguments]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        } | IDENTITY
        result = subprocess.run(
            command, input=given, env=environment, check=True, capture_output=True
        )
        return result.stdout.decode().strip()

    def write(self, name: str | bytes, content: str = "x") -> None:
        path = self.path / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def remove(self, name: str | bytes) -> None:
        (self.path / os.fsdecode(name)).unlink()

    def commit(self, *arguments: str) -> str:
        """Commit all there is, or nothing; return the commit's name."""
        message = "message\n\n:100644 is no change"
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message, *arguments)
        return self.git("rev-parse", "HEAD")
