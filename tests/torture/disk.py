"""What a disk may have of what was done to a directory, if the power goes off at some moment.

What a sync did not make durable may be there or not, each act by itself: a file system keeps no
order that nobody asked for. A write may be torn where sectors end, a name is set or not. The sync
of a file makes its content and its size durable, not its name; that of a directory its names.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from tests.torture.acts import Act, Allocate, Names, Resize, Sync, Write
from tests.torture.recorder import Recorder, Scan, scan

__all__ = ["Disk", "Kept", "State", "Tear", "check_recorded", "without_zeros"]

SECTOR: Final = 512
_ZEROS: Final = bytes(4096)
"""A file of the log has up to a megabyte of zeros at its end, which are compared piece by piece."""

Tear: TypeAlias = tuple[str, int]
"""What is there of a write: ("cut", bytes of it), ("sector", all but the one at), ("zero", 0)."""
Kept: TypeAlias = Mapping[int, Tear | None]
"""The unsynced acts that the disk has, by their numbers; None: as a whole."""
_Part: TypeAlias = tuple[int, Tear | None]


@dataclass(slots=True)
class _Entry:
    """An act in the order in which it was done; what came before may be less durable."""

    number: int
    act: Act
    is_durable: bool = False
    in_limbo: bool = False
    """Its sync has failed: a later one does not write it."""

    def sync(self, failed: bool) -> None:
        if failed and not self.is_durable:
            self.in_limbo = True
        elif not self.in_limbo:
            self.is_durable = True


@dataclass(frozen=True, slots=True)
class _Content:
    """A file's bytes, without the zeros at its end, its size, and its digest."""

    data: bytes
    size: int
    digest: bytes

    @classmethod
    def of(cls, content: bytes | bytearray) -> _Content:
        data, size = without_zeros(content), len(content)
        digest = hashlib.blake2b(data, digest_size=12, salt=size.to_bytes(8, "big")).digest()
        return cls(data, size, digest)


def without_zeros(content: bytes | bytearray) -> bytes:
    """Return the bytes without the zeros at their end."""
    end = len(content)
    while content.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return bytes(content[:end]).rstrip(b"\0")


@dataclass
class _Shape:
    """The names of a tree: what leads to which directory, and to which file."""

    directories: list[tuple[str, int]] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)

    @functools.cached_property
    def digest(self) -> bytes:
        """Tell names apart, and directories from files."""
        names = ("\0".join(path for path, _ in each) for each in (self.directories, self.files))
        return hashlib.blake2b("\0\0".join(names).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class State:
    """A tree that the disk may have; the label says which of the unsynced acts it has."""

    label: str
    _shape: _Shape
    _contents: Mapping[int, _Content]

    @property
    def is_simple(self) -> bool:
        """Whether the disk has all of the unsynced acts, all but one, or none."""
        return self.label in ("died", "all", "none") or self.label.startswith("lost-")

    def digest(self) -> bytes:
        """Tell trees apart: by their names, and what is in their files."""
        contents = self._contents
        inside = b"".join([contents[number].digest for _, number in self._shape.files])
        return hashlib.blake2b(self._shape.digest + inside, digest_size=16).digest()

    def write(self, directory: str | Path) -> None:
        """Make the tree; the directory must not exist."""
        root = os.fspath(directory)
        os.mkdir(root)
        for name, _ in self._shape.directories:
            os.mkdir(f"{root}/{name}")
        written: dict[int, str] = {}
        for name, number in self._shape.files:
            path = f"{root}/{name}"
            if number in written:
                os.link(written[number], path)
                continue
            written[number] = path
            content = self._contents[number]
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if content.data:
                os.write(fd, content.data)
            if content.size != len(content.data):
                os.ftruncate(fd, content.size)
            os.close(fd)

    def numbers(self) -> dict[str, int]:
        """Return the number of each path."""
        return {**dict(self._shape.directories), **dict(self._shape.files)}

    def tree(self) -> dict[str, bytes | None]:
        """Return each path's bytes; None for a directory."""
        found: dict[str, bytes | None] = {path: None for path, _ in self._shape.directories}
        for path, number in self._shape.files:
            content = self._contents[number]
            found[path] = content.data.ljust(content.size, b"\0")
        return dict(sorted(found.items()))


class Disk:
    """Files and directories as they are durable, and the acts that are not, or not yet."""

    def __init__(self, begin: Scan) -> None:
        self.count = 0
        """How many acts there were."""
        self._files = dict(begin.files)
        self._directories = {number: dict(names) for number, names in begin.directories.items()}
        self._written: dict[int, list[_Entry]] = {}
        self._named: list[_Entry] = []
        self._synced: dict[int, _Content] = {}
        self._contents: dict[int, dict[tuple[_Part, ...], _Content]] = {}
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def copy(self) -> Disk:
        """Return a disk that goes on from here by itself."""
        made = Disk(Scan())
        made.count = self.count
        made._files = dict(self._files)
        made._synced = dict(self._synced)
        made._directories = {number: dict(names) for number, names in self._directories.items()}
        made._written = {
            number: [replace(entry) for entry in entries]
            for number, entries in self._written.items()
        }
        made._named = [replace(entry) for entry in self._named]
        return made

    @property
    def numbered(self) -> int:
        """Files and directories have numbers below this one."""
        return max(*self._files, *self._directories, 0) + 1

    def apply(self, act: Act) -> None:
        """Do the next act."""
        entry = _Entry(self.count, act)
        self.count += 1
        if isinstance(act, Sync):
            if act.of in self._directories:
                self._sync_names(act)
            else:
                self._sync_file(act)
        elif isinstance(act, Names):
            if act.made is not None and act.made[1]:
                self._directories[act.made[0]] = {}
            elif act.made is not None:
                self._files[act.made[0]] = b""
            self._named.append(entry)
            self._shapes.clear()
        else:
            self._written.setdefault(act.file, []).append(entry)
            self._contents.pop(act.file, None)

    def _sync_file(self, act: Sync) -> None:
        entries = self._written.get(act.of, [])
        for entry in entries:
            entry.sync(act.failed)
        done = list(itertools.takewhile(lambda entry: entry.is_durable, entries))
        if done:
            content = bytearray(self._files[act.of])
            for entry in done:
                _do(content, entry.act, None)
            self._files[act.of] = bytes(content)
            self._synced.pop(act.of, None)
            del entries[: len(done)]
            if not entries:
                del self._written[act.of]
        self._contents.pop(act.of, None)

    def _sync_names(self, act: Sync) -> None:
        for entry in self._named:
            assert isinstance(entry.act, Names)
            if any(directory == act.of for directory, _, _ in entry.act.changes):
                entry.sync(act.failed)
        while self._named and self._named[0].is_durable:
            _name(self._directories, self._named.pop(0).act)
        self._shapes.clear()

    # --- what may be lost ------------------------------------------------------------------------

    def may_lose(self, name: str) -> bool:
        """Tell whether a file got this name, or lost it, and no sync has made that durable."""
        acts = (act for _, act in self.unsynced() if isinstance(act, Names))
        return any(name == changed for act in acts for _, changed, _ in act.changes)

    def unsynced(self) -> list[tuple[int, Act]]:
        """Return the acts that may be lost, and their numbers, in the order they were done."""
        entries = [entry for written in self._written.values() for entry in written]
        entries += self._named
        found = [(entry.number, entry.act) for entry in entries if not entry.is_durable]
        return sorted(found, key=lambda pair: pair[0])

    def tears(self, act: Act) -> list[Tear]:
        """Return ways in which a write may be there in part: up to each sector, or without it."""
        if not isinstance(act, Write):
            return []
        end = act.position + len(act.data)
        first = act.position // SECTOR * SECTOR + SECTOR
        cuts = [place - act.position for place in range(first, end, SECTOR)]
        found: list[Tear] = []
        if cuts:
            found += [("cut", cut) for cut in cuts]
            found += [("sector", at) for at in [0, *cuts]]
        if end > len(self._files[act.file]):
            found.append(("zero", 0))
        return found

    def state(self, label: str, kept: Kept) -> State:
        """Return the tree with these of the unsynced acts, and all that are durable."""
        names = tuple(n.number for n in self._named if n.is_durable or n.number in kept)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._shapes[names] = self._shape(set(names))
        return State(label, shape, self._all_contents(kept))

    def everything(self) -> State:
        """Return the tree that whoever looks at the directory sees, while the power is on."""
        return self.state("all", {number: None for number, _ in self.unsynced()})

    def _all_contents(self, kept: Kept) -> dict[int, _Content]:
        """Return what is in the files: mostly what was synced, of which there is one way only."""
        if len(self._synced) < len(self._files):
            for number in self._files.keys() - self._synced.keys():
                self._synced[number] = _Content.of(self._files[number])
        written = {number: self._content(number, kept) for number in self._written}
        return {**self._synced, **written}

    def _content(self, number: int, kept: Kept) -> _Content:
        parts = tuple(
            (entry.number, None if entry.is_durable else kept[entry.number])
            for entry in self._written.get(number, ())
            if entry.is_durable or entry.number in kept
        )
        known = self._contents.setdefault(number, {})
        found = known.get(parts)
        if found is None:
            content = bytearray(self._files[number])
            acts = {entry.number: entry.act for entry in self._written.get(number, ())}
            for part, tear in parts:
                _do(content, acts[part], tear)
            found = known[parts] = _Content.of(content)
        return found

    def _shape(self, kept: set[int]) -> _Shape:
        directories = {number: dict(names) for number, names in self._directories.items()}
        for entry in self._named:
            if entry.number in kept:
                _name(directories, entry.act)
        made = _Shape()
        self._walk(made, directories, 0, "")
        return made

    def _walk(
        self, made: _Shape, directories: dict[int, dict[str, int]], number: int, prefix: str
    ) -> None:
        for name, there in sorted(directories[number].items()):
            if there in directories:
                made.directories.append((prefix + name, there))
                self._walk(made, directories, there, f"{prefix}{name}/")
            else:
                made.files.append((prefix + name, there))


def _do(content: bytearray, act: Act, tear: Tear | None) -> None:
    if isinstance(act, Resize):
        del content[act.size :]
        content.extend(bytes(act.size - len(content)))
    elif isinstance(act, Allocate):
        content.extend(bytes(max(0, act.size - len(content))))
    elif isinstance(act, Write):
        how, at = tear or ("", 0)
        end = act.position + (at if how == "cut" else len(act.data))
        if how == "zero":
            content.extend(bytes(max(0, end - len(content))))
            return
        content.extend(bytes(max(0, end - len(content))))
        lost = bytes(content[act.position + at :][:SECTOR]) if how == "sector" else b""
        content[act.position : end] = act.data[: end - act.position]
        if how == "sector":
            stop = (act.position + at) // SECTOR * SECTOR + SECTOR
            start, stop = act.position + at, min(stop, end)
            content[start:stop] = lost[: stop - start]


def _name(directories: dict[int, dict[str, int]], act: Act) -> None:
    assert isinstance(act, Names)
    for directory, name, number in act.changes:
        if number is None:
            directories[directory].pop(name, None)
        else:
            directories[directory][name] = number


def check_recorded(recorder: Recorder) -> None:
    """Raise AssertionError if the directory is not what the recorded acts have made of it."""
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    made = disk.everything()
    found = Disk(scan(Path(recorder.root))).state("found", {})
    if made.digest() == found.digest():
        return
    left, right = made.tree(), found.tree()
    wrong = [path for path in sorted({*left, *right}) if left.get(path, 0) != right.get(path, 0)]
    raise AssertionError(f"done to these, and not recorded: {', '.join(wrong)}")
