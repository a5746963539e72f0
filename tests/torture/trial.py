"""One trial: a workload whose last operation meets a call that fails, and what comes of it.

Who goes on is the same process, or another one, which knows nothing of the failure. The process may
die some calls after the one that failed. Or it died before, and the one that tries again meets a
call that fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import layout
from tests.torture.calls import Calls, CutReader, DiedError, Disturbed
from tests.torture.checks import (
    Snapshot,
    faults_of,
    is_repeatable,
    later,
    recovered,
    snapshot,
    told,
    with_obsolete,
    works,
)
from tests.torture.complaints import Complaints
from tests.torture.memory import forget, remembers
from tests.torture.repeatable import repeatable
from tests.torture.workloads import OPERATIONS, Opened, begin, prepare

__all__ = ["DEAD", "NEW", "SAME", "Bench", "Case", "Course", "Tried", "Workload"]

SAME: Final = "same"
NEW: Final = "new"
DEAD: Final = "dead"
_DIED: Final = DiedError.__name__
_LATER_MS: Final = 7
"""After which a broken off operation is tried again: what it writes then bears other times."""
_SETTLES_DOUBT: Final = ("adopt", "commit", "wide")
"""Operations that have a batch id, by which the log itself knows whether they were done."""
_MAY_LEAVE_OUT: Final = ("pin",)
"""Operations that clean, and leave out what is held by a pin that they cannot read."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Operations on a prepared log, of which the last one is disturbed.

    With a `death` the process has died before that call of the last operation. What is disturbed is
    the next process, which does it again.
    """

    operations: tuple[str, ...]
    variant: str = "plain"
    death: int = 0

    @property
    def last(self) -> str:
        """The operation that is disturbed."""
        return self.operations[-1]

    def __str__(self) -> str:
        death = f"!{self.death}" if self.death else ""
        return "+".join(self.operations) + "@" + self.variant + death

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written."""
        operations, _, rest = text.partition("@")
        variant, _, death = rest.partition("!")
        return cls(tuple(operations.split("+")), variant, int(death or 0))


@dataclass(frozen=True, slots=True)
class Case:
    """The n-th call of a workload's last operation fails in some way, and who goes on."""

    workload: Workload
    n: int
    kind: str
    who: str = SAME
    """The process that goes on: the same one, or a new one. With `dead` and a number, a new one,
    after the first has died so many calls after the one that failed."""

    @property
    def death(self) -> int:
        """The number of the call before which the process dies; 0 if it lives."""
        after = self.who.removeprefix(DEAD)
        return 0 if after == self.who else self.n + int(after)

    def __str__(self) -> str:
        return f"{self.workload}:{self.n}:{self.kind}:{self.who}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written."""
        workload, n, kind, who = text.rsplit(":", 3)
        return cls(Workload.parse(workload), int(n), kind, who)


@dataclass(frozen=True, slots=True)
class Course:
    """How the last operation of a workload goes when nothing fails."""

    name: str
    """The operation; where it was done when its process died, another one."""
    calls: list[str]
    before: Snapshot
    after: Snapshot
    older: tuple[Snapshot, ...]
    """What a power cut before it may take the log back to: not all may have been synced."""
    unacknowledged: tuple[Snapshot, ...] = ()
    """What a power cut may take the log back to until it has succeeded: a process had died."""


@dataclass(slots=True)
class Tried:
    """What became of one case."""

    has_fired: bool = False
    raised: str = ""
    """The type of what the operation raised; empty where it succeeded."""
    faults: list[str] = field(default_factory=list)


class Bench:
    """A place where cases are tried, one after the other."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._cuts = CutReader(scratch)
        self._known: set[bytes] = set()
        """Logs on which work went on."""

    def course(self, workload: Workload, base: Course | None = None) -> Course:
        """Do a workload without failures: once for its calls, and once to look at the log.

        `base`: the course of a workload with a death, if nobody had died.
        """
        if workload.death:
            base = base or self.course(replace(workload, death=0))
            return self._course_after_death(workload, base)
        calls = self._calls(workload, workload.last)
        older: tuple[Snapshot, ...] = ()
        with _repeatable(workload):
            log = Opened(self._copy(workload.variant), begin(workload.variant))
            shown = snapshot(log.engine)
            for name in workload.operations:
                before, safe = shown, older
                log.perform(name)
                shown = snapshot(log.engine)
                older = (*older, before) if log.engine.state().unsynced else ()
        return Course(workload.last, calls, before, shown, safe)

    def _course_after_death(self, workload: Workload, base: Course) -> Course:
        """Do the last operation again, after the process of the first try has died."""
        calls, root, name = Calls(), self._copy(workload.variant), workload.last
        with Disturbed(root, calls), _repeatable(workload):
            log = _before_last(root, workload, calls)
            before, found = base.before, snapshot(log.engine)
            is_once = not is_repeatable(name) or OPERATIONS[name].kind == "topic"
            if found != before and is_once:
                before, name = found, "alter"  # it was done, and would be seen to be done again
            _perform_last(log, workload, name)
            after = snapshot(log.engine)
        older = (*base.older, base.before)
        calls_of_it = self._calls(workload, name)
        return Course(name, calls_of_it, before, after, base.older, unacknowledged=older)

    def _calls(self, workload: Workload, name: str) -> list[str]:
        calls, root = Calls(), self._copy(workload.variant)
        with Disturbed(root, calls), _repeatable(workload):
            log = _before_last(root, workload, calls)
            calls.is_armed = True
            _perform_last(log, workload, name)
            calls.is_armed = False
        return calls.names

    def try_case(self, case: Case, course: Course) -> Tried:
        """Let a call of the last operation fail, and go on."""
        calls, tried = Calls(case.n, case.kind, case.death), Tried()
        workload = case.workload
        root = self._copy(workload.variant)
        with (
            Disturbed(root, calls) as disturbed,
            _repeatable(workload),
            Complaints() as complaints,
        ):
            log = _before_last(root, workload, calls)
            calls.is_armed = True
            try:
                _perform_last(log, workload, course.name)
            except (Exception, DiedError) as fault:
                tried.raised = _DIED if calls.has_died else type(fault).__name__
                if not (calls.has_died or _says_where(fault)):
                    tried.faults.append(f"raised {told(fault)}")
            finally:
                calls.is_armed = False
            tried.has_fired = bool(calls.failed) and calls.has_died == bool(case.death)
            if not tried.has_fired:
                return tried
            try:
                aftermath = _Aftermath(case, course, disturbed, self._cuts, self._known, log)
                tried.faults += aftermath.faults(tried.raised)
            except Exception as fault:
                tried.faults.append(told(fault))
        tried.faults += complaints.faults
        if tried.faults:
            what = f"{calls.failed[0]} failed, the operation: {tried.raised or 'done'}"
            tried.faults = list(dict.fromkeys([what, *tried.faults]))
        return tried

    def _copy(self, variant: str) -> Path:
        """Return the root of a fresh copy of the prepared log."""
        start, root = self._scratch / variant, self._scratch / "log"
        if not start.exists():
            prepare(start, variant)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        forget()
        return root


@dataclass(slots=True)
class _Aftermath:
    """What comes after the failure."""

    case: Case
    course: Course
    disturbed: Disturbed
    cuts: CutReader
    known: set[bytes]
    log: Opened

    def faults(self, raised: str) -> list[str]:
        """Go on, and return what is wrong."""
        operation = OPERATIONS[self.course.name]
        before, after = self.course.before, self.course.after
        is_new = self.case.who != SAME
        if is_new:
            self.log = _another_process(self.log, operation.name)
        shown = before
        if is_new or operation.kind != "handed":
            shown = snapshot(self.log.engine)
            faults = faults_of(shown, before, after, operation.kind)
            if not raised and shown != after and operation.name not in _MAY_LEAVE_OUT:
                faults.append("it succeeded, but was not done")
            safe = shown
            if raised and operation.kind == "partial":
                safe = with_obsolete(shown, before)  # a cleaning is durable when it is done
            if raised == _DIED:
                safe = before  # nobody was told that it is done, whatever is seen of it
            # `close` tells of a sync that failed in a warning.
            is_broken_off = bool(raised) or operation.name == "close"
            faults = faults or self._cut(safe, after, operation.kind, is_broken_off=is_broken_off)
            if faults:
                return faults
        if raised == "CommitInDoubtError" and operation.name not in _SETTLES_DOUBT and not is_new:
            self.log.reopen()  # which settles it: until then nobody knows if it is to be done again
            shown = snapshot(self.log.engine)
        if raised and (is_repeatable(operation.name) or shown == before):
            wanted = later(after, before, _LATER_MS) if shown == before else after
            self.log.perform_again(operation.name, later_ms=_LATER_MS)
            shown = snapshot(self.log.engine)
            faults = [] if shown == after else faults_of(shown, wanted, None, "none")
            if faults := faults or self._cut(shown, shown, "none"):
                return [f"after the retry: {fault}" for fault in faults]
        if self._is_known(shown):
            return []
        if faults := works(self.log, shown):
            return faults
        shown = snapshot(self.log.engine)
        return [f"in the end: {fault}" for fault in self._cut(shown, shown, "none")]

    def _is_known(self, shown: Snapshot) -> bool:
        """Tell whether work went on with such a log before.

        What comes then follows from the files, from what a power cut would leave of them, and from
        what this process knows.
        """
        if remembers():
            return False
        told = repr((shown, self.log.moment, vars(self.log.engine._journal))).encode()
        key = hashlib.blake2b(told + self.disturbed.digest(), digest_size=16).digest()
        is_known = key in self.known
        self.known.add(key)
        return is_known

    def _cut(
        self, shown: Snapshot, after: Snapshot, kind: str, *, is_broken_off: bool = False
    ) -> list[str]:
        """Return what a power cut would take of what the log shows.

        Relaxed commits that were pending may go back with the name of a journal that was written
        anew, until the next one who writes has synced that: nobody was told that they are durable.
        """
        is_unsynced = bool(self.log.engine.state().unsynced)
        if is_broken_off and self.course.older:
            is_unsynced |= self.disturbed.may_lose(layout.COMMIT)
        older = (*self.course.older, self.course.before) if is_unsynced else ()
        if is_broken_off:
            older = (*older, *self.course.unacknowledged)
        for state in self.disturbed.cuts():
            with self.disturbed.away():
                try:
                    found = self.cuts.read(state)
                    faults = [] if found in older else faults_of(found, shown, after, kind)
                except Exception as fault:
                    faults = [told(fault)]
            if faults:
                return [f"after a power cut ({state.label}): {fault}" for fault in faults]
        return []


def _repeatable(workload: Workload) -> contextlib.AbstractContextManager[None]:
    """Let a workload make the same files each time, and the same ones up to its death."""
    return repeatable(str(replace(workload, death=0)))


def _before_last(root: Path, workload: Workload, calls: Calls) -> Opened:
    """Do all operations but the last one; or that too, and die, and be another process."""
    log = Opened(root, begin(workload.variant))
    for name in workload.operations[:-1]:
        log.perform(name)
    if not workload.death:
        return log
    with calls.dying(workload.death):
        log.perform(workload.last)
    return _another_process(log, workload.last)


def _perform_last(log: Opened, workload: Workload, name: str) -> None:
    """Do the last operation; after a death a little later than the first time."""
    if workload.death:
        log.perform_again(name, later_ms=_LATER_MS)
    else:
        log.perform(name)


def _another_process(log: Opened, name: str) -> Opened:
    """Know nothing of what was: the process that did an operation has ended, as it was."""
    forget()
    if OPERATIONS[name].kind == "handed":
        recovered(log.root, log.moment.now_ms)
    return Opened(log.root, log.moment)


def _says_where(fault: BaseException) -> bool:
    """Tell whether an error is one of those that are promised, and names what it is about."""
    return isinstance(fault, StorageError) or (
        isinstance(fault, OSError) and fault.filename is not None
    )
