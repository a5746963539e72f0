"""One workload crashed: at each moment, in each state that the disk may have, judged and gone on.

A case is a workload, a moment (so many acts are done) and a state: "append,roll:37:lost-35". The
state "died" is that of a process that was killed, the others are those of a power cut. What was
recorded while such a state was opened can be crashed again: "append:12:died>5:all".
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.torture.acts import Names, Resize, Sync
from tests.torture.checks import (
    Snapshot,
    faults_of,
    forget,
    recovered,
    told,
    with_obsolete,
)
from tests.torture.disk import Disk, State
from tests.torture.disk_states import states
from tests.torture.going_on import LATER_MS, GoingOn
from tests.torture.recorder import scan
from tests.torture.recording import OPENING, Recording, Stage, record_recovery
from tests.torture.repeatable import booted, repeatable

__all__ = ["DIED", "Crash", "Crashes", "Outcome"]

DIED: Final = "died"
Snapshots = tuple[Snapshot, ...]


@dataclass(frozen=True)
class Crash:
    """A moment of a recording: what was seen before it, and so must be seen after it."""

    count: int
    """So many acts are done."""
    stage: Stage
    disk: Disk
    lower: Snapshot
    """What the log is never taken back from: what a reader saw, where that is synced."""
    older: Snapshots
    """Or else these."""
    faults: Sequence[str]
    """What is wrong with what the reader saw."""

    @property
    def is_done(self) -> bool:
        """Whether the operation has returned."""
        return self.count == self.stage.end

    @functools.cached_property
    def key(self) -> bytes:
        """Tell expectations apart."""
        stage = self.stage
        told = repr((stage.kind, self.lower, stage.after, self.older, self.is_done))
        return hashlib.blake2b(told.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A state that was checked: a key of it and of what was expected, and what was wrong.

    `tree` tells only states apart.
    """

    case: str
    key: bytes
    tree: bytes
    faults: Sequence[str] = ()
    is_recovery: bool = False


class Crashes:
    """The crashes of one recording.

    `case` names the workload; what is drawn follows from it and the seed. States are made in
    `scratch`, where nothing else may be. `boots` counts the power cuts before.
    """

    def __init__(
        self,
        case: str,
        recording: Recording,
        scratch: Path,
        seed: int,
        going_on: GoingOn,
        *,
        boots: int = 0,
    ) -> None:
        self._case = case
        self.recording = recording
        self._scratch = scratch
        self._seed = seed
        self._going_on = going_on
        self._shown = going_on.shown
        self._boots = boots

    def moments(self, stages: Sequence[Stage]) -> list[int]:
        """Return all moments of some stages."""
        return sorted({n for stage in stages for n in range(stage.first, stage.end + 1)})

    def inherited_moments(self, stages: Sequence[Stage]) -> list[int]:
        """Return those at which the power may still take what was cut before the recording."""
        before = self.recording.begin.count
        return self._moments_with(stages, lambda number: number < before)

    def cutting_moments(self, stages: Sequence[Stage]) -> list[int]:
        """Return those right before a sync, where something was named, or cut, and is not synced.

        By this recording itself.
        """
        before, acts = self.recording.begin.count, self.recording.acts
        found = self._moments_with(stages, lambda number: number >= before)
        return [count for count in found if count < len(acts) and isinstance(acts[count], Sync)]

    def _moments_with(self, stages: Sequence[Stage], is_meant: Callable[[int], bool]) -> list[int]:
        return [
            count
            for count, _, disk in self._disks(stages, self.moments(stages))
            if any(is_meant(n) and isinstance(act, Names | Resize) for n, act in disk.unsynced())
        ]

    def crashes(self, stages: Sequence[Stage], moments: Sequence[int]) -> Iterator[Crash]:
        """Yield crashes at some of the moments of stages; each disk is good until the next."""
        for count, stage, disk in self._disks(stages, moments):
            yield self._seen(count, stage, disk)

    def count(self, stages: Sequence[Stage]) -> int:
        """Count the different states of all crashes in some stages."""
        found: set[bytes] = set()
        for count, _, disk in self._disks(stages, self.moments(stages)):
            found.update(_tree(state) for state in self._states(count, disk))
        return len(found)

    def _disks(
        self, stages: Sequence[Stage], moments: Sequence[int]
    ) -> Iterator[tuple[int, Stage, Disk]]:
        disk = self.recording.begin.copy()
        wanted, done = {*moments}, 0
        for stage in stages:
            # The end of one stage is the beginning of the next.
            for count in range(stage.first + (stage is not stages[0]), stage.end + 1):
                if count in wanted:
                    for act in self.recording.acts[done:count]:
                        disk.apply(act)
                    done = max(done, count)
                    yield count, stage, disk

    def _seen(self, count: int, stage: Stage, disk: Disk) -> Crash:
        """Look at the log as a reader does at that moment."""
        is_done = count == stage.end
        is_pending = bool(stage.older) and (not is_done or stage.name == OPENING)
        begin = stage.after if is_done else stage.before
        crash = Crash(count, stage, disk, begin, stage.older, ())
        older = (*stage.older, stage.before)
        if stage.kind == "handed":
            return dataclasses.replace(crash, older=older if stage.older else ())
        self._write(disk.everything())
        try:
            with booted(self._boot(0)):
                engine = DirectoryLog(self._scratch, read_only=True)
                lower = self._shown.snapshot(engine)
                goes_back = _goes_back(engine, disk, is_pending=is_pending)
        except Exception as fault:
            return dataclasses.replace(crash, faults=[told(fault)])
        after = stage.after
        faults = faults_of(lower, begin, after, "none" if is_done else stage.kind)
        if stage.kind == "partial" and not is_done:
            lower = with_obsolete(lower, stage.before)
        return Crash(count, stage, disk, lower, older if goes_back else (), faults)

    def states(self, crash: Crash) -> Iterator[State]:
        """Yield the states of one crash; equal ones may come more than once."""
        return self._states(crash.count, crash.disk)

    def _states(self, count: int, disk: Disk) -> Iterator[State]:
        yield dataclasses.replace(disk.everything(), label=DIED)
        yield from states(disk, random.Random(f"{self._seed} {self._case} {count}"))

    # --- one state -------------------------------------------------------------------------------

    def check(self, crash: Crash, state: State, *, is_known: bool = False) -> Outcome:
        """Make the state, look at it, and go on with it; unless it is known to be right."""
        faults = list(crash.faults)
        if not faults and not is_known:
            self._write(state)
            try:
                with booted(self._boot(state.label != DIED)), repeatable("going on"):
                    faults = self._faults(crash, state)
            except Exception as fault:
                faults = [told(fault)]
        name, key = self._name(crash, state), self.key(crash, state)
        return Outcome(name, key, _tree(state), faults)

    def _faults(self, crash: Crash, state: State) -> list[str]:
        stage = crash.stage
        if stage.kind == "handed":
            recovered(self._scratch, stage.moment.now_ms)
        found = self._shown.snapshot(DirectoryLog(self._scratch, read_only=True))
        faults = self._unexpected(found, crash, state)
        if faults:
            return faults
        if state.label == DIED:
            # What a dead process has written, and not published, counts for the next one.
            with DirectoryLog(self._scratch, create=False) as engine:
                found = self._shown.snapshot(engine)
            faults = self._unexpected(found, crash, state)
            if faults:
                return faults
        if stage.retry is None or found in crash.older:
            return self._going_on.faults(self._scratch, found, stage.moment)
        return self._going_on.faults(
            self._scratch,
            found,
            stage.moment,
            retry=stage.retry,
            before=stage.before,
            after=stage.after,
        )

    def _unexpected(self, found: Snapshot, crash: Crash, state: State) -> list[str]:
        if state.label != DIED and found in crash.older:
            return []
        kind = "none" if crash.is_done else crash.stage.kind
        return faults_of(found, crash.lower, crash.stage.after, kind)

    # --- a crash while a crash is recovered from -------------------------------------------------

    def recovery(self, crash: Crash, state: State, then: str | None = None) -> Crashes:
        """Open the log in that state and try again, and return the crashes of that.

        The second attempt is made at another time than the first one, by a clock that went on or
        was set back: what it writes at the same places is not the same. Or nothing is tried again,
        and an operation is done `then`.
        """
        case = self._name(crash, state) + ">" + (f"{then}@" if then else "")
        later_ms = random.Random(f"{self._seed} {case}").choice((LATER_MS, -LATER_MS))
        self._write(state)
        is_cut = state.label != DIED
        if is_cut:
            begin = scan(self._scratch)
            disk = Disk(begin)
        else:
            disk = crash.disk.copy()
            begin = scan(self._scratch, state.numbers(), disk.numbered)
        with booted(self._boot(is_cut)):
            if crash.stage.kind == "handed":
                found, older = crash.stage.before, crash.older
            else:
                engine = DirectoryLog(self._scratch, read_only=True)
                found = self._shown.snapshot(engine)
                goes_back = _goes_back(engine, disk, is_pending=bool(crash.older))
                older = (*crash.older, crash.stage.before) if goes_back else ()
            recording = record_recovery(
                self._scratch,
                disk,
                begin,
                crash.stage,
                found,
                older,
                has_died=not is_cut,
                later_ms=later_ms,
                then=then,
            )
        boots = self._boots + is_cut
        return Crashes(case, recording, self._scratch, self._seed, self._going_on, boots=boots)

    @property
    def stages(self) -> list[Stage]:
        """All stages of the recording."""
        return self.recording.stages

    def _write(self, state: State) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        state.write(self._scratch)
        forget()

    def _boot(self, cuts: int) -> str:
        return f"boot {self._boots + cuts}"

    def _name(self, crash: Crash, state: State) -> str:
        return f"{self._case}{crash.count}:{state.label}"

    def key(self, crash: Crash, state: State) -> bytes:
        """Tell states apart: by the tree, by what is expected of it, and by who looks at it."""
        return hashlib.blake2b(_tree(state) + crash.key, digest_size=8).digest()


def _goes_back(engine: DirectoryLog, disk: Disk, *, is_pending: bool) -> bool:
    """Tell whether a power cut may take back what a reader sees, as it does relaxed commits.

    A journal that is written anew has those that were pending as synced, and its name may not be
    durable before the operation has returned.
    """
    return (is_pending and disk.may_lose(layout.COMMIT)) or bool(engine.state().unsynced)


def _tree(state: State) -> bytes:
    """Tell states apart: by what is there, and by whether it was the power that went."""
    return state.digest()[:8] + (b"died" if state.label == DIED else b"cut")
