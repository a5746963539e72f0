"""A git repository's history as a stream of changes, and its last tree as a table.

Each commit of the first-parent history changes some paths. A `Change` with an `Entry` is an upsert,
one without is a delete. The latest change of each path must equal `git ls-tree -r HEAD`, so git
itself can check a table that follows the changes.

- A merge is compared with its first parent, the root with the empty tree. In a shallow clone the
  oldest commit is the root.
- A rename is a delete and an upsert; a submodule is an entry of mode 160000; an empty commit
  changes nothing.
- Paths are bytes, as git stores them: any byte but NUL, in no particular encoding.

The output of one `git log` process is read as it is written, in bounded memory.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

__all__ = ["Change", "Entry", "GitError", "changes", "commit_count", "head_tree"]

CHUNK_SIZE: Final = 1 << 16
COMMIT_MARK: Final = b"\x01"
"""The first byte of a commit's line; git writes nothing else there."""
SETTINGS: Final = (
    *("core.quotePath=false", "core.fsmonitor=false", "log.showRoot=true"),
    *("log.showSignature=false", "diff.renames=false", "diff.ignoreSubmodules=none"),
)
"""Settings by which a user's configuration could change the output."""
FOREIGN: Final = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_DIFF_OPTS"),
    *("GIT_EXTERNAL_DIFF", "GIT_TRACE", "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS"),
)
"""Variables that git sets for a program it calls, as in a hook; they name another repository."""
UNBORN: Final = {"Not a valid object name HEAD", "bad revision 'HEAD'"}
"""Git's messages for HEAD in a repository without commits, by `ls-tree` and `log`."""


class GitError(Exception):
    """Git failed; the message is one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a path: git's mode (six octal digits) and its object's name, in hex."""

    mode: str
    blob: str


@dataclass(frozen=True, slots=True)
class Change:
    """One path in one commit."""

    commit: str
    time: int | None
    """Author time in seconds since 1970; None if git cannot read the commit's time."""
    path: bytes
    entry: Entry | None
    """None: the path was deleted."""


def changes(repository: Path) -> Iterator[list[Change]]:
    """Yield each first-parent commit's changes, oldest first, empty ones too; raises GitError."""
    command = git(
        repository,
        "log",
        *("--first-parent", "--reverse", "--diff-merges=first-parent"),
        *("--raw", "-r", "-z", "--no-abbrev", "--no-renames", "--no-relative"),
        *("--no-ext-diff", "--no-textconv", "--ignore-submodules=none", "--no-color"),
        *("--no-notes", "--no-show-signature", "--no-mailmap", "--encoding=UTF-8"),
        *("--format=tformat:%x01%H %at", "HEAD", "--"),
    )
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, env=environment()
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield from parse_log(process.stdout)
        finally:
            process.stdout.close()  # an abandoned iteration ends git as well
            status = process.wait()
        if status:
            messages.seek(0)
            raise GitError(complaint(repository, messages.read()))


def head_tree(repository: Path) -> dict[bytes, Entry]:
    """Return the list of `git ls-tree -r HEAD`: path to mode and object name."""
    tree = {}
    for line in output(repository, "ls-tree", "-r", "-z", "--full-tree", "HEAD").split(b"\0"):
        if line:
            fields, path = line.split(b"\t", 1)
            mode, _, blob = fields.decode("ascii").split(" ")
            tree[path] = Entry(mode, blob)
    return tree


def commit_count(repository: Path) -> int:
    """Return how many commits `changes` will yield."""
    return int(output(repository, "rev-list", "--count", "--first-parent", "HEAD", "--"))


def parse_log(stream: IO[bytes]) -> Iterator[list[Change]]:
    r"""Yield the changes of each commit in the output of `git log --raw -z`.

    A commit is `\x01<name> <time>\0`. If it changes something, a newline follows, then for each
    path `:<mode> <mode> <blob> <blob> <status>\0<path>\0`. A field that begins with a colon,
    perhaps after a newline, is therefore a change, and the next field is its path, whatever bytes
    that has.
    """
    fields = split_at_nul(stream)
    commit, time, found = "", None, list[Change]()
    for field in fields:
        if field.startswith(COMMIT_MARK):
            if commit:
                yield found
            name, _, seconds = field[1:].decode("ascii").partition(" ")
            commit, time, found = name, int(seconds) if seconds else None, []
            continue
        columns = field.removeprefix(b"\n")
        if not columns.startswith(b":") or not commit:
            raise GitError(f"git log: expected a commit or a change, found {field[:80]!r}")
        _, mode, _, blob, status = columns[1:].decode("ascii").split(" ")
        path = next(fields)
        entry = None if status == "D" else Entry(mode, blob)
        found.append(Change(commit, time, path, entry))
    if commit:
        yield found


def split_at_nul(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the NUL-terminated fields of a stream; bytes after the last NUL are dropped."""
    rest = b""
    while chunk := stream.read(CHUNK_SIZE):
        *fields, rest = (rest + chunk).split(b"\0")
        yield from fields


def output(repository: Path, *arguments: str) -> bytes:
    """Run git and return what it prints; raises GitError."""
    result = subprocess.run(
        git(repository, *arguments), capture_output=True, env=environment(), check=False
    )
    if result.returncode:
        raise GitError(complaint(repository, result.stderr))
    return result.stdout


def git(repository: Path, *arguments: str) -> list[str]:
    """Return a command that runs git in a repository: a work tree or a bare git directory."""
    settings = [word for setting in SETTINGS for word in ("-c", setting)]
    return ["git", "-C", str(repository), "--no-pager", *settings, *arguments]


def environment() -> dict[str, str]:
    """Return our environment without foreign repositories, and with messages in English."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    # Replaced objects are a local overlay; the history is what was committed.
    return kept | {"LC_ALL": "C", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0"}


def complaint(repository: Path, messages: bytes) -> str:
    """Return git's error message as one line that names the repository."""
    lines = [line.strip() for line in messages.decode("utf-8", "replace").splitlines()]
    wanted = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines
    reason = next(filter(None, wanted), "git failed without a message")
    reason = reason.removeprefix("fatal: ").removeprefix("error: ")
    return f"{repository}: {'no commits yet' if reason in UNBORN else reason}"
