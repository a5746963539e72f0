"""Kill processes around one log, again and again; all acknowledged records are still there.

A writer, a cleaner and a reader (`roles`) work on a log. SIGKILL hits one of them, mostly the
writer or the cleaner, 0 to 50 ms after the last kill; sometimes it hits all. The program then
compares the log with the notes of what was sent and acknowledged (`oracle`), which lie outside the
log. The process that replaces a killed writer sends the unfinished step once more, with the same
writer and batch id. That step lands exactly once.

Some writers fork a child at a durable act, while they hold their locks, and are killed at once. The
child lives on and must hold none of the locks. Now and then all processes are killed, and every
byte is verified. After 50 kills the log is closed, cleaned and verified, and a new log begins.

    python -m tests.torture.kills [--quick] [--seed N] [--only LIFE] [--jobs N]

`--only` repeats the draws of one log: its records, its victims and its moments. A moment is one of
real time, so a process may be at another place then. A fault that needs an exact place comes back
after some repetitions. The program keeps the log of a violation and names it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from kafkalog.inspection.verify import verify
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.place import directory_log_of
from tests.torture import Tally, parser, roles
from tests.torture.oracle import Model, Notes, Progress, Wrong
from tests.torture.scratch import scratch
from tests.torture.workers import Workers

TARGET: Final = 2_000
QUICK: Final = 40
KILLS: Final = 50
"""Of one log."""
STUCK_S: Final = 20.0
"""Processes that sleep for so long without a commit wait for something that will not come."""
CIRCLES_S: Final = 600.0
"""Processes that work for so long without a commit go round in circles, on any machine."""
_PAUSE_S: Final = 0.002
CHILDREN: Final = 0.15
"""Share of the writers that leave a child behind."""
_DELAYS: Final = ((0.0, 0.003), (0.0, 0.012), (0.0, 0.05))
ROLES: Final = ("write", "clean", "read")
_VICTIMS: Final = (("write",), ("clean",), ("read",), ROLES)


@dataclass
class Outcome:
    """What came of one log's life."""

    life: int
    kills: int = 0
    steps: int = 0
    children_left: int = 0
    verifications: int = 0
    violation: str | None = None
    kept: str = ""
    """Where the log of a violation is."""
    mid_step: int = 0
    """Writers that were killed between the sending and the acknowledgement of a step."""
    by_role: Counter[str] = field(default_factory=Counter)


class Life:
    """One log, the processes around it, and what is known of it."""

    def __init__(self, scratch: Path, seed: int, life: int) -> None:
        self.outcome = Outcome(life)
        self._seed = f"{seed} {life}"
        self._draw = random.Random(self._seed)
        self._root = scratch / "log"
        self._scratch = scratch
        self._notes = Notes(scratch / "notes")
        self._progress = Progress()
        self._model = Model(self._seed)
        self._steps = 0
        self._running: dict[str, roles.Process] = {}
        self._starts = self._checks = 0

    def run(self, kills: int) -> Outcome:
        """Live for so many kills; a violation ends it."""
        try:
            self._live(kills)
        except Exception as fault:  # whatever it is: a log that was killed must not fail
            self.outcome.violation = f"{type(fault).__name__}: {fault}"
        finally:
            with contextlib.suppress(Wrong):  # where a fault ended it, there is one already
                self._stop()
            self._notes.close()
        self.outcome.steps = self._progress.acknowledged
        return self.outcome

    def _live(self, kills: int) -> None:
        roles.create(self._root, is_relaxed=self._draw.random() < 0.3)
        while (before := self.outcome.kills) < kills:
            for role in ROLES:
                self._start(role)
            self._kill()
            self._check()
            if self.outcome.kills // 10 > before // 10:
                self._wait_for_progress()
            if self.outcome.kills // 25 > before // 25:
                self._stop()
                self._verify()
        self._stop()
        self._end()

    # --- processes -------------------------------------------------------------------------------

    def _start(self, role: str) -> None:
        if role in self._running:
            return
        self._starts += 1
        leaves_a_child = self._draw.random() < CHILDREN
        work: dict[str, Callable[[], None]] = {
            "write": partial(self._write, leaves_a_child, self._draw.randrange(1, 60)),
            "clean": partial(roles.clean, self._root, f"{self._seed} {self._starts}"),
            "read": partial(roles.read, self._root, self._seed),
        }
        self._running[role] = roles.Process(
            work[role],
            self._scratch / f"{role}.fault",
            may_kill_itself=leaves_a_child and role == "write",
        )

    def _write(self, leaves_a_child: bool, acts: int) -> None:
        if leaves_a_child:
            roles.leave_a_child_behind(self._notes, acts)
        roles.Writer(self._root, self._seed, self._notes, model=self._model).run(
            self._progress.acknowledged
        )

    def _kill(self) -> None:
        """Kill somebody at a moment; who is dead already has left a child, or found a fault."""
        time.sleep(self._draw.uniform(*self._draw.choice(_DELAYS)))
        (roles_hit,) = self._draw.choices(_VICTIMS, (11, 6, 1, 2))
        victims = {role: self._running.pop(role) for role in roles_hit}
        hit = [role for role, victim in victims.items() if victim.kill()]
        self.outcome.kills += len(hit)
        self.outcome.by_role.update(f"of who {role}s" for role in hit)
        self._progress.take(self._notes.read())
        if "write" in hit and self._progress.sent > self._progress.acknowledged:
            self.outcome.mid_step += 1
        for victim in victims.values():
            victim.check()
        self._reap()

    def _reap(self) -> None:
        """Forget who has left a child and is dead; raises Wrong for any other end."""
        for role, process in list(self._running.items()):
            if process.has_ended():
                del self._running[role]

    def _stop(self) -> None:
        """Kill all that run, and the children that were left behind: they have had their time."""
        ended, self._running = [*self._running.values()], {}
        for process in ended:
            process.kill()
        self._progress.take(self._notes.read())
        children, self._progress.forked = self._progress.forked, []
        self.outcome.children_left += len(children)
        held = {name for pid in children for name in roles.locks_of(pid)}
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in ended:
            process.check()
        if held:
            raise Wrong(f"children that dead writers have left behind hold {sorted(held)}")

    # --- looking ---------------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare what is published with what was acknowledged before, and sent by now.

        Two partitions are read each time, and all of them every fifth time.
        """
        self._checks += 1
        partitions = list(self._model.records)
        self._progress.take(self._notes.read())
        before = self._progress.acknowledged
        with KafkaLog(self._root, read_only=True) as log:
            engine = directory_log_of(log)
            state = engine.state()
            self._progress.take(self._notes.read())
            # What was acknowledged is published; what is published was acknowledged, or sent.
            self._steps = self._model.steps_in(state, max(self._steps, before), self._progress.sent)
            is_all = self._checks % 5 == 0
            self._model.check(engine, partitions if is_all else self._draw.sample(partitions, 2))

    def _wait_for_progress(self) -> None:
        """See that the writer, started anew if need be, gets a step through.

        Time counts while the writer and the cleaner sleep. A busy machine, on which they wait for a
        processor or the disk, takes as long as it takes.
        """
        self._progress.take(self._notes.read())
        before = self._progress.acknowledged
        slept_s, circles_end_s = 0.0, time.monotonic() + CIRCLES_S
        while self._progress.acknowledged == before:
            self._reap()
            for role in ROLES:
                self._start(role)
            time.sleep(_PAUSE_S)
            self._progress.take(self._notes.read())
            if not any(self._running[role].is_busy() for role in ("write", "clean")):
                slept_s += _PAUSE_S
            if slept_s > STUCK_S:
                raise Wrong(f"nothing was committed for {STUCK_S} s, and all processes slept")
            if time.monotonic() > circles_end_s:
                raise Wrong(f"nothing was committed for {CIRCLES_S} s, and processes were busy")

    def _verify(self) -> None:
        """Compare all files with each other; nobody is at work."""
        self.outcome.verifications += 1
        damage = [str(each) for each in verify(self._root, deep=True) if each.is_damage]
        if damage:
            raise Wrong(f"verify found: {damage}")

    def _end(self) -> None:
        """Settle, clean and close the log; what it holds is the same."""
        with KafkaLog(self._root) as log:
            with directory_log_of(log).transaction() as transaction:
                sent = self._progress.sent
                self._steps = self._model.steps_in(transaction.state, self._steps, sent)
            if errors := [stats.error for stats in log.clean(force=True) if stats.error]:
                raise Wrong(f"cleaning failed: {errors}")
        with KafkaLog(self._root, read_only=True) as log:
            self._model.steps_in(directory_log_of(log).state(), self._steps, self._steps)
            self._model.check(directory_log_of(log))
        self._verify()


# --- many lives ----------------------------------------------------------------------------------


def live(directory: Path, seed: int, kills: int, life: int) -> Outcome:
    """Live one life; the log of a violation stays where it says."""
    place = directory / str(life)
    place.mkdir()
    outcome = Life(place, seed, life).run(kills)
    if outcome.violation is None:
        shutil.rmtree(place)
    else:
        outcome.kept = tempfile.mkdtemp(prefix="kills-")
        shutil.move(place, outcome.kept)
        outcome.violation += f" (life {life}, after {outcome.kills} kills; {outcome.kept})"
    return outcome


def be_quiet() -> None:
    """Let the log not warn of every retry."""
    logging.getLogger("kafkalog").setLevel(logging.ERROR)


@functools.cache
def warm() -> None:
    """Import what children of this process need, without threads that a fork loses."""
    be_quiet()
    with scratch("warm") as directory:
        root, notes = directory / "log", Notes(directory / "notes")
        roles.create(root)
        writer = roles.Writer(root, "warm", notes)
        writer.resume(0)
        for number in range(2, 60):
            writer.take(number)
        draw = random.Random(1)
        with KafkaLog(root) as log:
            for _ in range(20):
                roles.clean_once(directory_log_of(log), draw)
            writer.model.check(directory_log_of(log))
            log.lookup("table", "key-1")
        list(verify(root, deep=True))
        notes.close()
    gc.collect()
    gc.freeze()


def outcomes(seed: int, lives: Iterable[int], kills: int, jobs: int) -> Generator[Outcome]:
    """Yield what came of one life after the other, `jobs` at a time. Raises WorkerDied."""
    with scratch("kills") as directory:
        warm()
        with Workers(jobs, be_quiet) as workers:
            yield from workers.results(partial(live, directory, seed, kills), lives)


def main(arguments: list[str] | None = None) -> None:
    made = parser("kills", __doc__)
    made.add_argument("--jobs", type=int, default=1, help="logs at a time (1)")
    options = made.parse_args(arguments)
    tally = Tally("kills", "SIGKILLs", options, TARGET)
    wanted, kills = (QUICK, 40) if options.quick else (TARGET, KILLS)
    lives = [int(options.only)] if options.only else range(2 * wanted // kills)
    totals: Counter[str] = Counter()
    found = outcomes(options.seed, lives, kills, options.jobs)
    with tally.deaths(), contextlib.closing(found):
        for outcome in found:
            tally.tried(outcome.kills)
            totals["logs"] += 1
            totals.update(outcome.by_role)
            totals["steps"] += outcome.steps
            totals["within a step"] += outcome.mid_step
            totals["children left behind"] += outcome.children_left
            totals["verifications"] += outcome.verifications
            if outcome.violation is not None:
                tally.violated(str(outcome.life), outcome.violation)
            if tally.count >= wanted:
                break
    tally.more |= {**totals, "kills a second": round(tally.count / tally.seconds, 1)}
    tally.report()


if __name__ == "__main__":
    main(sys.argv[1:])
