"""A workload with all its acts, and what the log showed before and after each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.torture.acts import Act
from tests.torture.checks import Snapshot, forget, recovered, snapshot, with_obsolete
from tests.torture.disk import Disk, check_recorded
from tests.torture.recorder import Recorder, Scan
from tests.torture.repeatable import repeatable
from tests.torture.workloads import OPERATIONS, Moment, Opened

__all__ = ["OPENING", "Recording", "Stage", "record", "record_recovery"]

OPENING = "open"
RECOVERING = "recover"
Snapshots = tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """One operation of a recording: its acts are those of [first, end).

    A power cut may take the log back to `older` ones, as relaxed commits are not synced.
    """

    name: str
    kind: str
    first: int
    end: int
    before: Snapshot
    after: Snapshot
    older: Snapshots
    moment: Moment

    @property
    def retry(self) -> str | None:
        """The operation to do again if it is broken off."""
        return self.name if self.name in OPERATIONS else None


@dataclass(frozen=True, slots=True)
class Recording:
    """The disk as it was, all that was done to it, and the operations that did it."""

    begin: Disk
    acts: list[Act]
    stages: list[Stage]


class _Stages:
    """Gathers stages while a recorder runs."""

    def __init__(self, recorder: Recorder, older: Snapshots = ()) -> None:
        self.found: list[Stage] = []
        self.older = older
        self._recorder = recorder

    def add(
        self,
        name: str,
        before: Snapshot,
        moment: Callable[[], Moment],
        work: Callable[[], DirectoryLog],
        *,
        kind: str = "none",
    ) -> Snapshot:
        """Do the work of a stage; return what the log shows then."""
        first = len(self._recorder.acts)
        engine = work()
        end = len(self._recorder.acts)
        after = snapshot(engine)
        self.found.append(Stage(name, kind, first, end, before, after, self.older, moment()))
        self.older = (*self.older, before) if engine.state().unsynced else ()
        return after


def record(root: Path, names: Sequence[str], moment: Moment) -> Recording:
    """Perform operations on a log, and record each of them; all that is there is durable.

    `moment` is that of the last operation before them.
    """
    forget()
    recorder = Recorder(root)
    with recorder, repeatable(",".join(names)):
        log = Opened(root, moment)
        now = snapshot(log.engine)
        stages = _Stages(recorder)
        for name in names:

            def work(name: str = name) -> DirectoryLog:
                log.perform(name)
                return log.engine

            kind = OPERATIONS[name].kind
            now = stages.add(name, now, lambda: log.moment, work, kind=kind)
        log.engine.close()
    check_recorded(recorder)
    return Recording(Disk(recorder.begin), recorder.acts, stages.found)


def record_recovery(
    root: Path,
    disk: Disk,
    begin: Scan,
    broken: Stage,
    found: Snapshot,
    older: Snapshots,
    *,
    has_died: bool,
    later_ms: int,
    then: str | None = None,
) -> Recording:
    """Record how a log is opened after a crash in a stage, and that operation is tried again.

    Or, with `then`, another one is done that comes next.

    `disk` has what is in `root`, and may lose some of it; the log shows `found`, and may go back
    to `older` ones. What a process that `has_died` has written may count from then on. The clock of
    the one that tries again differs from its clock by `later_ms`.
    """
    recorder = Recorder(root, begin=begin)
    with recorder, repeatable("recovery"):
        stages = _Stages(recorder, older)
        last = broken.moment if then is None else broken.moment.next()
        moment = replace(last, now_ms=last.now_ms + later_ms)
        if broken.kind == "handed":

            def recover() -> DirectoryLog:
                recovered(root, moment.now_ms)
                return DirectoryLog(root, read_only=True)

            found = stages.add(RECOVERING, found, lambda: moment, recover, kind="handed")
        opened: list[Opened] = []

        def open_log() -> DirectoryLog:
            opened.append(Opened(root, moment))
            return opened[0].engine

        def try_again() -> DirectoryLog:
            opened[0].perform_again(retry.name)
            return opened[0].engine

        def open_and_try_again() -> DirectoryLog:
            open_log()
            return try_again()

        retry = OPERATIONS[then or broken.retry or "append"]
        if has_died and broken.kind == "partial":
            # What the dead process has cleaned is not durable before it is cleaned again.
            before = with_obsolete(found, broken.before)
            stages.add(retry.name, before, lambda: moment, open_and_try_again, kind=retry.kind)
        else:
            kind = broken.kind if has_died and broken.kind != "handed" else "none"
            found = stages.add(OPENING, found, lambda: moment, open_log, kind=kind)
            # Opening makes nothing durable, not even the name of a journal that was written anew.
            stages.older = stages.older or older
            is_again = then is None and found != broken.before
            if is_again and (not retry.repeatable or retry.kind == "topic"):
                retry = OPERATIONS["alter"]  # it was done, and would be seen to be done again
            stages.add(retry.name, found, lambda: moment, try_again, kind=retry.kind)
        opened[0].engine.close()
    return Recording(disk, recorder.acts, stages.found)
