"""Kill, refuse, lose and delay each request to an object store; then work continues.

The program counts the requests of an operation on a log in an object store. It then does the
operation again and again, and each time spoils another request:

- The process is killed before the request, or after it.
- The store refuses it (412, 409 or 503), or answers 500 after it has done it.
- The request is lost, or its answer, or half of a body; or it is late, and the store does it after
  others have worked. A read finds no object where there is one.
- The store stays down until the operation has ended.

The operation must succeed or report the fault; one that is a single commit is there as a whole or
not at all. Then the same process continues, or another one. It does the operation again, which must
succeed, once more, appends, cleans, and deletes what nobody needs. Every request that was late is
done before or after that. A model (`store_operations`) says what topics, offsets and records there
must be at each step. In the end every object is named by the log and sound, and nothing is left.

Pairs of operations follow. The first one is spoiled at each of its requests, in a way that is
drawn, and the other one comes before it is tried again. In addition, the first one is stopped
before each of its requests, another process does the other one, and the first one continues. If a
pair has more than 60 such cases, the program draws 60.

    python -m tests.torture.store_requests [--quick] [--seed N] [--only CASE] [--jobs N]

A case is `OPERATION:N:FAULT:PROCESS` or `OPERATION+OTHER:N:FAULT:PROCESS`, where PROCESS is `same`
or `new`. The part before the first colon names all cases of an operation or pair. The store is in
memory, and faults are raised where obstore answers. `make store-test` does the same to a
micro-batch with a server that speaks S3.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.collector import unnamed
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.torture import Tally, parser
from tests.torture.checks import told
from tests.torture.complaints import Complaints
from tests.torture.scratch import scratch
from tests.torture.spoiled_requests import (
    FAULTS,
    Fault,
    Killed,
    Requests,
    process,
    short_patience,
)
from tests.torture.store_operations import (
    OPERATIONS,
    Content,
    append_and_clean,
    gone_on,
    prepare,
    seen,
)
from tests.torture.stores import Stores, memory_address
from tests.torture.workers import Workers

__all__ = ["NEW", "SAME", "Bench", "Case", "Pair", "cases", "main"]

TARGET: Final = 10_000
_QUICK: Final = 1
"""Cases of each operation in a quick run, and as many pairs as there are operations."""
_OF_PAIR: Final = 60
"""Cases of a pair, drawn where there are more."""
_DELETED: Final = tuple(
    f"{folder}/"
    for folder in (
        layout.STORED_DATA,
        layout.STORED_SEGMENTS,
        layout.STORED_CLAIMS,
        layout.STORED_PROBE,
    )
)
"""The folders of which a collector deletes what no commit names."""
_FENCES: Final = ("collect", "pass_by", "sweep")
"""Operations after which a process that had seen no later commit is refused once."""
SAME: Final = "same"
NEW: Final = "new"


@dataclass(frozen=True, slots=True)
class Pair:
    """An operation that is spoiled, and perhaps another one that comes in between."""

    first: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.first}+{self.other}" if self.other else self.first

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written."""
        first, _, other = text.partition("+")
        return cls(first, other)


@dataclass(frozen=True, slots=True)
class Case:
    """The n-th request of an operation is spoiled, and who goes on."""

    pair: Pair
    n: int
    fault: Fault
    who: str = SAME

    def __str__(self) -> str:
        return f"{self.pair}:{self.n}:{self.fault}:{self.who}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written."""
        pair, n, fault, who = text.split(":")
        return cls(Pair.parse(pair), int(n), Fault(fault), who)


class Wrong(Exception):
    """The log is not what it has to be."""


class Bench:
    """Where cases are tried: the prepared log, and what unspoiled operations do to it."""

    def __init__(self) -> None:
        address = memory_address()
        prepare(address)
        self._stores = Stores(address)
        self.before: Content = seen(self._stores.fresh())

    @functools.cache  # noqa: B019 - there is one bench in a process
    def requests(self, name: str) -> tuple[Sequence[str], object]:
        """Return the kinds of the requests of an operation, and what it returns."""
        address, requests = self._stores.fresh(), Requests()
        with process(requests):
            log = _opened(address)
            requests.is_armed = True
            read = OPERATIONS[name].run(log)
        return requests.kinds, read

    def try_case(self, case: Case) -> str | None:
        """Try a case; return what is wrong, also if the operation has no such request."""
        _, read = self.requests(case.pair.first)
        trial = _Trial(case, self._stores.fresh(), self.before, read)
        with Complaints() as complaints:
            try:
                trial.run()
            except Exception as fault:
                found = str(fault) if isinstance(fault, Wrong) else told(fault)
                return f"{trial.requests.spoiled or 'nothing'} {case.fault}: {found}"
        if not trial.requests.spoiled:
            return "nothing was spoiled"
        return "; ".join(complaints.faults) or None


def _opened(address: StoreAddress) -> ObjectLog:
    """Open a log as the process that is the current one; late-bound, as `short_patience` asks."""
    return object_log.ObjectLog(address, create=False)


class _Trial:
    """One case."""

    def __init__(self, case: Case, address: StoreAddress, before: Content, read: object) -> None:
        self._case = case
        self._address = address
        self._before = before
        self._read = read
        self._first = OPERATIONS[case.pair.first]
        self._other = OPERATIONS[case.pair.other] if case.pair.other else None
        self._dice = random.Random(str(case))
        self.requests = Requests(case.n, case.fault, self._do_other)
        self._is_dead = False

    def run(self) -> None:
        """Spoil the operation, and go on. Raises Wrong."""
        with process(self.requests):
            log = _opened(self._address)
        is_done = self._spoil(log)
        if self._dice.random() < 0.5:
            self.requests.land_late()
        if self._case.fault is not Fault.STOPPED and self._other is not None:
            self._do_other()
        if self._is_dead or self._case.who == NEW:
            log = _opened(self._address)
        self._try_again(log, is_done=is_done)
        self.requests.land_late()
        self._compare("after what was late", *self._ends())
        self._go_on(log)

    def _spoil(self, log: ObjectLog) -> bool:
        """Do the operation, of which a request is spoiled; return whether it says it is done."""
        before = self._before
        after = self._first.model(before)
        read: object = None
        is_done = False
        self.requests.is_armed = True
        try:
            with process(self.requests):
                read = self._first.run(log)
            is_done = True
        except Killed:
            self._is_dead = True
        except StorageError:
            pass
        except InvalidInputError as refusal:
            if not self._explains(refusal):
                raise
        finally:
            self.requests.is_armed = False
        if self._case.fault is Fault.STOPPED:
            return is_done
        allowed, halfway = [after], self._first.halfway
        if not is_done:
            allowed += [before, *(each(before) for each in halfway)]
        self._compare("the operation", *allowed, is_whole=not halfway)
        if is_done and read != self._read:
            raise Wrong(f"it has read other records: {read}")
        return is_done

    def _explains(self, refusal: InvalidInputError) -> bool:
        """Tell whether the case explains that an operation is refused."""
        told = {
            # Another process has deleted the topic, or given it as many partitions.
            (Fault.STOPPED, "delete_topic"): "does not exist",
            (Fault.STOPPED, "alter"): "their number can only grow",
            # A log without its mark is none.
            (Fault.STALE_404, self._case.pair.other): "there is no log",
        }.get((self._case.fault, self._case.pair.other))
        return told is not None and told in str(refusal)

    def _do_other(self) -> None:
        """Let another process do the other operation."""
        assert self._other is not None
        with process(Requests()):
            self._other.run(_opened(self._address))

    def _do(self, act: Callable[[ObjectLog], object], log: ObjectLog) -> None:
        """Do something; a process that a collector has passed may have to do it again."""
        try:
            act(log)
        except StorageError:
            if self._case.pair.other not in _FENCES:
                raise
            act(log)

    def _try_again(self, log: ObjectLog, *, is_done: bool) -> None:
        """Do the operation again, twice: who was told that it is done may have forgotten that."""
        for _ in range(2):
            is_there = is_done or seen(self._address) != self._before
            if self._first.is_repeatable or not is_there:
                self._do(self._first.run, log)
            is_done = True
            self._compare("tried again", *self._ends())

    def _ends(self) -> Sequence[Content]:
        """Return what the log may have once both operations are done, in whatever order."""
        before, first = self._before, self._first.model
        if self._other is None:
            return [first(before)]
        other = self._other.model
        begun = [before, first(before), *(each(before) for each in self._first.halfway)]
        return [first(other(content)) for content in begun]

    def _compare(self, when: str, *allowed: Content, is_whole: bool = False) -> None:
        """Raise Wrong unless the log has what is allowed: each place of it by itself, or all."""
        found = seen(self._address)
        if found in allowed:
            return
        for name in sorted({*found, *(name for each in allowed for name in each)}):
            values = [each.get(name) for each in allowed]
            if found.get(name) not in values:
                raise Wrong(f"{when}: {name} has {found.get(name)} (expected {values})")
        if is_whole:
            raise Wrong(f"{when}: it is there in part: {found}")

    def _go_on(self, log: ObjectLog) -> None:
        """Append, clean, and delete; nothing is damaged then, and nothing is left."""
        ends = [gone_on(end) for end in self._ends()]
        self._do(append_and_clean, log)
        self._compare("going on", *ends)
        fresh = _opened(self._address)
        found = [str(each) for each in verify_store(fresh, deep=True)]
        if found:
            raise Wrong(f"verify found: {found}")
        state = fresh.store_state()
        listed = [each.name for each in fresh.client.list("")]
        left = [name for name in unnamed(state, listed) if name.startswith(_DELETED)]
        if left:
            raise Wrong(f"objects are left: {left}")


# --- which cases ---------------------------------------------------------------------------------


def cases(bench: Bench, pair: Pair, seed: int) -> list[Case]:
    """Return all cases of an operation, or those of a pair that are drawn."""
    dice = random.Random(f"{seed} {pair}")
    kinds, _ = bench.requests(pair.first)
    if not pair.other:
        return [
            Case(pair, n, fault, dice.choice((SAME, NEW)))
            for n, kind in enumerate(kinds, 1)
            for fault in FAULTS[kind]
        ]
    found = [
        Case(pair, n, fault, dice.choice((SAME, NEW)))
        for n, kind in enumerate(kinds, 1)
        for fault in (dice.choice(FAULTS[kind]), Fault.STOPPED)
    ]
    return dice.sample(found, min(_OF_PAIR, len(found)))


def pairs(seed: int, *, quick: bool) -> list[Pair]:
    """Return all operations and all pairs of them; of a quick run some pairs."""
    firsts = [each.name for each in OPERATIONS.values() if each.is_repeatable]
    both = [Pair(first, other) for first in firsts for other in OPERATIONS]
    both.remove(Pair("copy", "alter"))  # a copy refuses a topic with other partitions than it has
    if quick:
        both = random.Random(f"pairs {seed}").sample(both, len(OPERATIONS))
    return [*map(Pair, OPERATIONS), *both]


@dataclass(slots=True)
class Found:
    """What became of some cases."""

    faults: Counter[str] = field(default_factory=Counter)
    """How often each fault was tried."""
    pairs: int = 0
    """How many of the cases are of pairs."""
    violations: list[tuple[str, str]] = field(default_factory=list)


@functools.cache
def _bench() -> Bench:
    return Bench()


def try_pair(seed: int, pair: Pair, *, most: int = 0, only: Case | None = None) -> Found:
    """Try the cases of a pair: all, at most so many that are drawn, or one."""
    logging.disable(logging.CRITICAL)  # the library warns of every failure
    found = Found()
    with short_patience():
        bench = _bench()
        chosen = [only] if only is not None else cases(bench, pair, seed)
        if most:
            chosen = random.Random(f"most {seed} {pair}").sample(chosen, min(most, len(chosen)))
        for case in chosen:
            wrong = bench.try_case(case)
            found.faults[case.fault] += 1
            found.pairs += bool(pair.other)
            if wrong is not None:
                found.violations.append((str(case), f"{case}: {wrong}"))
    return found


def _all(options: Namespace) -> Iterator[Found]:
    if options.only and ":" in options.only:
        case = Case.parse(options.only)
        yield try_pair(options.seed, case.pair, only=case)
        return
    made = [Pair.parse(options.only)] if options.only else pairs(options.seed, quick=options.quick)
    work = partial(try_pair, options.seed, most=_QUICK if options.quick else 0)
    if options.jobs == 1 or len(made) == 1:
        yield from map(work, made)
        return
    with Workers(options.jobs, kind="spawn") as workers:
        yield from workers.results(work, made)


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    made = parser("store_requests", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    options = made.parse_args(arguments)
    tally = Tally("store_requests", "requests to an object store", options, TARGET)
    faults: Counter[str] = Counter()
    in_pairs = 0
    with scratch("store-requests") as directory, tally.deaths():
        tempfile.tempdir = os.environ["TMPDIR"] = str(directory)  # of the workers, too
        for found in _all(options):
            tally.tried(found.faults.total())
            faults += found.faults
            in_pairs += found.pairs
            for case, wrong in found.violations:
                tally.violated(case, wrong)
    tally.more = {"operations": len(OPERATIONS), "of pairs of operations": in_pairs, **faults}
    tally.report()


if __name__ == "__main__":
    main()
