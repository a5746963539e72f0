"""Processes that have one directory, one after the other: each is killed, or not; then a power cut.

For what takes more deaths than `crash_states` tries in every place: a case is written down.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.torture.acts import Act, Names, Sync, Write
from tests.torture.checks import forget
from tests.torture.disk import Disk, State
from tests.torture.recorder import Recorder, scan
from tests.torture.repeatable import booted, repeatable

__all__ = ["Chain"]


class Chain:
    """A directory in which all that is there is durable, and what is done to it from then on.

    Acts are described in words: "write PATH at POSITION", "resize PATH", "sync PATH", "name PATH",
    "unname PATH" (one act may do several of these), where PATH is relative to the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = Disk(scan(root))
        self._told: dict[int, str] = {}

    def run(self, work: Callable[[Path], object], dies_before: Sequence[str] = ()) -> None:
        """Let a process do its work; or die right before the act that the last pattern describes.

        The first one that comes after those of the patterns before it.
        """
        state = self._disk.everything()
        self._write(state)
        paths = {number: path for path, number in state.numbers().items()}
        begin = scan(self._root, state.numbers(), self._disk.numbered)
        recorder = Recorder(self._root, begin=begin)
        with booted("boot 0"), recorder, repeatable(f"{self._disk.count}"):
            work(self._root)
        waiting = list(dies_before)
        for act in recorder.acts:
            told = _told(act, paths)
            if waiting and re.search(waiting[0], told):
                del waiting[0]
                if not waiting:
                    return
            self._told[self._disk.count] = told
            self._disk.apply(act)
        assert not waiting, f"no act {waiting[0]!r} was done"

    def power_cut(self, loses: str = "") -> None:
        """Leave what is durable, and what of the rest the pattern does not describe."""
        told = {number: self._told[number] for number, _ in self._disk.unsynced()}
        kept = {number: None for number, text in told.items() if not re.search(loses, text)}
        assert len(kept) < len(told) or not told, f"only {list(told.values())} could be lost"
        self._write(self._disk.state("cut", kept))

    def _write(self, state: State) -> None:
        shutil.rmtree(self._root)
        state.write(self._root)
        forget()


def _told(act: Act, paths: dict[int, str]) -> str:
    """Describe an act; names that it gives are added to the paths by number."""
    if isinstance(act, Names):
        told = []
        for directory, name, number in act.changes:
            path = f"{paths[directory]}/{name}" if directory else name
            told.append(f"{'unname' if number is None else 'name'} {path}")
            if number is not None:
                paths[number] = path
        return ", ".join(told)
    if isinstance(act, Sync):
        return f"sync {paths[act.of] if act.of else '/'}"
    if isinstance(act, Write):
        return f"write {paths[act.file]} at {act.position}"
    return f"resize {paths[act.file]}"
