"""All interleavings of committers, a reader and a collector of the commit log, as a model.

A process knows the number of its last commit. Each step is one request. A committer that came
second reads the commits of others, and tries again, before it checks any. The variants differ in
what a process asks after it created or read commits: nothing, whether the commit before them is
still there, whether the boundary is below its own commit alone, or whether it is below all of them.
The last is the rule; the others have to be found wrong. So has a collector that moves the boundary
after it has deleted the commits.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Check(Enum):
    """What is asked after a commit was created or read."""

    NOTHING = "nothing"
    PREDECESSOR = "is the commit before it still there?"
    LATE_BOUNDARY = "is the boundary below its own commit?"
    BOUNDARY = "is the boundary below all that was not checked?"


class Process(NamedTuple):
    """A committer or a reader: its step, its last commit and that one's token, its own commits."""

    step: str = "idle"
    number: int = 0
    token: object = "new"
    made: int = 0
    unchecked: tuple[object, ...] = ()
    """The tokens of the commits after `number` that were read and are not checked yet."""


class World(NamedTuple):
    """The store, what truly happened, and the processes."""

    present: frozenset[tuple[int, object]] = frozenset({(0, "new")})
    truth: tuple[object, ...] = ()
    """The token of each commit, from number 1: a create that made the log longer."""
    boundary: int = -1
    committers: tuple[Process, ...] = ()
    reader: Process = Process()
    collecting: int = 0
    """Up to which number the collector deletes; 0 if it rests."""


class Violation(Exception):
    """A process believes in a commit that is not true."""


class Model:
    """The steps of all processes under one variant."""

    def __init__(
        self,
        check: Check,
        tries: tuple[int, ...],
        commits: int,
        *,
        has_reader: bool = True,
        is_boundary_first: bool = True,
    ) -> None:
        self.check = check
        self.tries = tries
        self.commits = commits
        self.has_reader = has_reader
        self.is_boundary_first = is_boundary_first

    def explore(self) -> int:
        """Visit every world; return their count. Raises Violation with the way to a false one."""
        first = World(committers=(Process(),) * len(self.tries))
        came: dict[World, tuple[World, str] | None] = {first: None}
        waiting = collections.deque([first])
        while waiting:
            world = waiting.popleft()
            try:
                for name, after in self.steps(world):
                    if after not in came:
                        came[after] = world, name
                        waiting.append(after)
            except Violation as found:
                way = [str(found)]
                while before := came[world]:
                    world, name = before
                    way.append(name)
                raise Violation(" | ".join(reversed(way))) from None
        return len(came)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield each step that some process can take, and the world after it."""
        for each, process in enumerate(world.committers):
            for name, after, present, truth in self.committer(world, each, process):
                others = (*world.committers[:each], after, *world.committers[each + 1 :])
                yield (
                    f"c{each} {name}",
                    world._replace(present=present, truth=truth, committers=others),
                )
        if self.has_reader:
            for name, reader in self.reading(world, world.reader):
                yield f"r {name}", world._replace(reader=reader)
        yield from self.collector(world)

    def committer(
        self, world: World, each: int, process: Process
    ) -> Iterator[tuple[str, Process, frozenset[tuple[int, object]], tuple[object, ...]]]:
        """Yield the steps of a committer: it follows the log, then creates the next number."""
        present, truth = world.present, world.truth
        number, mine = process.number + len(process.unchecked) + 1, (each, process.made)
        found = dict(present).get(number)
        if process.step in {"idle", "seen", "reopen"}:
            for name, after in self.reading(world, process):
                yield name, after, present, truth
            if process.step == "idle" and found is None and process.made < self.tries[each]:
                yield f"finds no {number}", process._replace(step="put"), present, truth
        elif process.step == "behind":
            if found is None:
                yield f"finds no {number}", process._replace(step="put"), present, truth
            else:
                after = process._replace(unchecked=(*process.unchecked, found))
                yield f"reads {number}", after, present, truth
            if process.unchecked:
                yield "has nothing to change", process._replace(step="seen"), present, truth
        elif process.step == "put":
            if found is not None:
                yield f"412 at {number}", process._replace(step="behind"), present, truth
            elif number <= len(truth):
                created = present | {(number, mine)}
                yield f"creates {number} again", process._replace(step="check"), created, truth
            elif len(truth) < self.commits:
                created = present | {(number, mine)}
                yield (
                    f"creates {number}",
                    process._replace(step="check"),
                    created,
                    (*truth, mine),
                )
        elif process.step == "check":
            if not self.is_sound(world, process, own=1):
                after = process._replace(step="reopen", unchecked=())
                yield f"is fenced at {number}", after, present, truth
                return
            if truth[number - 1] != mine:
                raise Violation(f"c{each} believes that it made {number}")
            self.believe(world, process)
            after = Process("idle", number, mine, process.made + 1)
            yield f"has made {number}", after, present, truth

    def reading(self, world: World, process: Process) -> Iterator[tuple[str, Process]]:
        """Yield the steps of a process that follows the log."""
        if process.step == "idle":
            number = process.number + 1
            token = dict(world.present).get(number)
            if token is not None:
                yield f"reads {number}", process._replace(step="seen", unchecked=(token,))
        elif process.step == "seen":
            number = process.number + len(process.unchecked)
            if not self.is_sound(world, process):
                yield f"doubts {number}", process._replace(step="reopen", unchecked=())
                return
            self.believe(world, process)
            yield f"takes {number}", Process("idle", number, process.unchecked[-1], process.made)
        else:
            newest, token = max(world.present, key=lambda one: one[0])
            yield f"opens at {newest}", Process("idle", newest, token, process.made)

    def believe(self, world: World, process: Process) -> None:
        """Raise Violation unless the commits that were read are the true ones."""
        first, unchecked = process.number, process.unchecked
        if world.truth[first : first + len(unchecked)] != unchecked:
            raise Violation(f"a process believes a false commit after {first}")

    def is_sound(self, world: World, process: Process, *, own: int = 0) -> bool:
        """Return what the variant's question is answered; `own` is 1 with a commit of one's own."""
        last = process.number + len(process.unchecked) + own
        if self.check is Check.BOUNDARY:
            return process.number >= world.boundary
        if self.check is Check.LATE_BOUNDARY:
            return last > world.boundary
        if self.check is Check.PREDECESSOR:
            return last - 1 in dict(world.present)
        return True

    def collector(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield the steps of the collector; the newest commit always stays."""
        oldest = min(number for number, _ in world.present)
        newest = max(number for number, _ in world.present)
        if not world.collecting:
            for to in range(max(1, oldest), len(world.truth)):
                moved = max(world.boundary, to) if self.is_boundary_first else world.boundary
                yield f"boundary {to}", world._replace(boundary=moved, collecting=to)
        elif oldest <= world.collecting and oldest < newest:
            left = frozenset(one for one in world.present if one[0] != oldest)
            yield f"deletes {oldest}", world._replace(present=left)
        else:
            moved = max(world.boundary, world.collecting)
            yield "the collector rests", world._replace(boundary=moved, collecting=0)
