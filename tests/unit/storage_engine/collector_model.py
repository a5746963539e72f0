"""All interleavings of committers, swaps and a collector of objects, as a model.

The commit log itself is taken as sound here: a commit is made only at the end of the log that its
process has read. `commit_log_model` checks that. Each step is one request. Objects are written
before they are committed, dropped by swaps, and deleted by the collector. The rule of the model:
no object that the log names is missing. The variants leave one rule of the collector out, and have
to be found wrong.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, TypeAlias


class Rules(Enum):
    """Which rule is left out."""

    ALL = "none"
    DELETED_FIRST = "orphans are deleted before the commit that declares them dead"
    NOT_REFUSED = "a commit takes an object that a sweep has declared dead"
    NOT_CHOSEN_AGAIN = "a sweep deletes what was an orphan when it was listed"
    NOT_ASKED = "a late commit does not ask whether its object is still there"
    FORGOTTEN_FIRST = "a dropped object is forgotten before it is deleted"


class Violation(Exception):
    """The log names an object that is missing."""


class Written(NamedTuple):
    """An object: its writer, and how long the log was that the writer had read."""

    writer: int
    seen: int


Record: TypeAlias = tuple[str, object]
"""`add`, `drop` or `forget` with an object, `swept` with a number."""


class Committer(NamedTuple):
    """A process that writes one object, and commits it, perhaps twice after a doubt."""

    step: str = "idle"
    known: int = 0
    """How much of the log it has read."""
    written: Written | None = None
    tries: int = 0


class Collector(NamedTuple):
    """A collector: its step, how much of the log it has read, and what it deletes."""

    step: str = "idle"
    known: int = 0
    names: frozenset[Written] = frozenset()


class World(NamedTuple):
    """The log, the objects of the store, and the processes."""

    log: tuple[Record, ...] = ()
    present: frozenset[Written] = frozenset()
    committers: tuple[Committer, ...] = ()
    collector: Collector = Collector()
    swaps: int = 0
    rounds: int = 0


def entries(log: tuple[Record, ...]) -> tuple[frozenset[object], frozenset[object]]:
    """Return the live and the dropped objects of the state after a log."""
    live: set[object] = set()
    dead: set[object] = set()
    for kind, each in log:
        if kind == "add":
            live.add(each)
        elif kind == "drop":
            live.remove(each)
            dead.add(each)
        elif kind == "forget":
            dead.remove(each)
    return frozenset(live), frozenset(dead)


def live(log: tuple[Record, ...]) -> frozenset[object]:
    """Return the objects that the log names."""
    return entries(log)[0]


def dead(log: tuple[Record, ...]) -> frozenset[object]:
    """Return the objects that were dropped and are not forgotten."""
    return entries(log)[1]


class Model:
    """The steps of all processes under one set of rules."""

    def __init__(self, rules: Rules, committers: int, *, swaps: int = 1, rounds: int = 2) -> None:
        self.rules = rules
        self.committers = committers
        self.swaps = swaps
        self.rounds = rounds

    def explore(self) -> int:
        """Visit every world; return their count. Raises Violation with the way to a bad one."""
        first = World(committers=(Committer(),) * self.committers)
        came: dict[World, tuple[World, str] | None] = {first: None}
        waiting = collections.deque([first])
        while waiting:
            world = waiting.popleft()
            if missing := live(world.log) - world.present:
                way = [f"{missing} is missing"]
                while before := came[world]:
                    world, name = before
                    way.append(name)
                raise Violation(" | ".join(reversed(way)))
            for name, after in self.steps(world):
                if after not in came:
                    came[after] = world, name
                    waiting.append(after)
        return len(came)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield each step that some process can take, and the world after it."""
        for each, process in enumerate(world.committers):
            for name, log, present, after in self.committer(world, each, process):
                others = (*world.committers[:each], after, *world.committers[each + 1 :])
                moved = world._replace(log=log, present=present, committers=others)
                yield f"c{each} {name}", moved
        if world.swaps < self.swaps:
            for source in live(world.log):
                log = (*world.log, ("drop", source))
                yield f"swaps {source}", world._replace(log=log, swaps=world.swaps + 1)
        yield from self.collecting(world, world.collector)

    def committer(
        self, world: World, each: int, process: Committer
    ) -> Iterator[tuple[str, tuple[Record, ...], frozenset[Written], Committer]]:
        """Yield the steps of a committer."""
        log, present = world.log, world.present
        if process.step in {"idle", "written"} and process.known < len(log):
            yield "reads", log, present, process._replace(known=len(log))
        if process.step == "idle":
            written = Written(each, process.known)
            after = process._replace(step="written", written=written)
            yield f"writes {written}", log, present | {written}, after
            return
        held = process.written
        if held is None or process.step == "done":
            return
        known = log[: process.known]
        if process.step == "written":
            if held in live(known) | dead(known):  # the answer to its first try was lost
                yield "finds its commit", log, present, process._replace(step="done")
            elif self.is_refused(known, held):
                after = process._replace(step="done")
                yield "is refused", log, present - {held}, after
            elif self.is_asked(known, held):
                found = "ready" if held in present else "done"
                yield "asks", log, present, process._replace(step=found)
            else:
                yield "prepares", log, present, process._replace(step="ready")
        elif process.step == "ready":
            if len(log) > process.known:
                yield "is late", log, present, process._replace(step="written")
            else:
                made = (*log, ("add", held))
                yield "commits", made, present, process._replace(step="done", known=len(made))
                if not process.tries:  # the answer is lost, and the process does not look
                    after = process._replace(step="written", tries=1)
                    yield "commits in doubt", made, present, after

    def is_refused(self, known: tuple[Record, ...], held: Written) -> bool:
        """Return whether a sweep has declared an object dead."""
        if self.rules is Rules.NOT_REFUSED:
            return False
        return any(kind == "swept" and held.seen <= int(str(seen)) for kind, seen in known)

    def is_asked(self, known: tuple[Record, ...], held: Written) -> bool:
        """Return whether a committer asks for its object: it is as old as a forgotten one."""
        if self.rules is Rules.NOT_ASKED:
            return False
        gone = [each for kind, each in known if kind == "forget"]
        return any(isinstance(each, Written) and held.seen <= each.seen for each in gone)

    def collecting(self, world: World, process: Collector) -> Iterator[tuple[str, World]]:
        """Yield the steps of the collector, which may die at each of them."""
        log, known = world.log, world.log[: process.known]

        def moved(name: str, **changes: object) -> tuple[str, World]:
            return f"collector {name}", world._replace(**changes)  # type: ignore[arg-type]

        if process.step != "idle":
            yield moved("dies", collector=Collector())
        if process.step == "idle":
            if world.rounds == self.rounds:
                return
            gone = dead(log)
            first = "forget" if self.rules is Rules.FORGOTTEN_FIRST else "delete dead"
            for each in gone:
                assert isinstance(each, Written)
                chosen = Collector(first, len(log), frozenset({each}))
                yield moved(f"chooses {each}", collector=chosen, rounds=world.rounds + 1)
            orphans = world.present - live(log) - gone
            if orphans:
                first = "delete orphans" if self.rules is Rules.DELETED_FIRST else "sweep"
                chosen = Collector(first, len(log), orphans)
                yield moved("lists", collector=chosen, rounds=world.rounds + 1)
        elif process.step == "delete dead":
            last = self.rules is Rules.FORGOTTEN_FIRST
            after = Collector() if last else process._replace(step="forget")
            yield moved("deletes dead", present=world.present - process.names, collector=after)
        elif process.step in {"forget", "sweep"} and len(known) < len(log):
            yield moved("reads", collector=process._replace(known=len(log)))
        elif process.step == "forget":
            records = tuple(("forget", each) for each in process.names & dead(log))
            last = self.rules is not Rules.FORGOTTEN_FIRST
            after = Collector() if last else process._replace(step="delete dead")
            yield moved("forgets", log=log + records, collector=after)
        elif process.step == "sweep":
            names = process.names
            if self.rules is not Rules.NOT_CHOSEN_AGAIN:
                names = names - live(log) - dead(log)  # type: ignore[operator]
            seen = max((each.seen for each in names), default=-1)
            records = (("swept", seen),) if names else ()
            last = self.rules is Rules.DELETED_FIRST
            after = Collector() if last else Collector("delete orphans", len(log) + 1, names)
            yield moved("sweeps", log=log + records, collector=after)
        elif process.step == "delete orphans":
            first = self.rules is Rules.DELETED_FIRST
            after = process._replace(step="sweep") if first else Collector()
            yield moved("deletes orphans", present=world.present - process.names, collector=after)
