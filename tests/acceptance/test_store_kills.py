"""A micro-batch into an object store that is killed, stopped or spoiled at each of its requests.

Each case is a real process with tasks and commit, on a server that speaks S3, behind a proxy that
counts the requests. KAFKALOG_STORE=full (`make store-test`) has each fault at each request, and
each recovery from each kill; else faults and stops are met at each kind of request.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.object_store import store_state
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.acceptance.store_processes import FAILED, TASKS, Nursery, rows_of
from tests.object_store_proxy import Fault, Rule, StoreProxy, kind_of
from tests.object_store_server import BUCKET, StoreServer
from tests.unit.storage_engine.store_log import WithoutProbe, collect

pytestmark = pytest.mark.slow
IS_FULL = os.environ.get("KAFKALOG_STORE") == "full"
PARTITIONS = 2
LATE_S, STALE_S = 6.0, 2.0
AT_ONCE = 6
"""Cases with faults run at a time."""
KILLS = {"before": Fault.VICTIM_BEFORE, "after": Fault.VICTIM_AFTER}
FAULTS = [
    *(Fault.REFUSED_412, Fault.REFUSED_409, Fault.REFUSED_503, Fault.REFUSED_500),
    *(Fault.DONE_BUT_500, Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.CUT_BODY),
    *(Fault.LATE, Fault.STALE_404),
]
WEEK_MS = 8 * 24 * 3600 * 1000


@pytest.fixture(scope="module")
def nursery(
    tmp_path_factory: pytest.TempPathFactory, store_server: StoreServer
) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery"), store_server) as made:
        yield made


@dataclass
class Site:
    """What all cases of a test share."""

    nursery: Nursery
    server: StoreServer
    proxy: StoreProxy
    scratch: Path

    def case(self) -> Case:
        """Return a case with a log of its own."""
        prefix = secrets.token_hex(8)
        addresses = [
            StoreAddress.parse(
                f"s3://{BUCKET}/{prefix}",
                {
                    "store.endpoint": f"http://127.0.0.1:{port}",
                    "store.region": "us-east-1",
                    "store.allow_http": "true",
                },
            )
            for port in (self.proxy.port, self.server.port)
        ]
        return Case(self, prefix, *addresses, str(self.scratch / prefix))


@pytest.fixture
def site(
    nursery: Nursery, store_server: StoreServer, store_proxy: StoreProxy, tmp_path: Path
) -> Site:
    return Site(nursery, store_server, store_proxy, tmp_path)


@dataclass
class Case:
    """A log with one micro-batch, and the process that writes the next one."""

    site: Site
    prefix: str
    address: StoreAddress
    """Through the proxy, for that process alone."""
    direct: StoreAddress
    kept: str
    expected: list[bytes] = field(default_factory=list)
    rivals: int = 0

    def __post_init__(self) -> None:
        assert CommitLog.create(WithoutProbe(self.direct))
        self.log = ObjectLog(self.direct, create=False)
        self.log.create_topic("t", PARTITIONS, {"cleanup.policy": "delete"})
        assert self.run("micro_batch", batch_id=0) == 0

    def start(self, do: str, *, run: str = "run-1", is_direct: bool = True, **more: object) -> int:
        """Start a process of the query."""
        address = self.direct if is_direct else self.address
        return self.site.nursery.start(address, "q", do=do, run=run, **more)

    def run(self, do: str, **more: object) -> int:
        """Run a process of the query to its end, with nothing going wrong; return its status."""
        pid = self.start(do, **more)
        status = self.site.nursery.wait(pid)
        assert status == 0, self.site.nursery.error(pid)
        return status

    def attempt(
        self,
        rule: Rule | None = None,
        victim: Callable[[int], None] = lambda pid: None,
        **more: object,
    ) -> tuple[int, str]:
        """Run micro-batch 1 with a fault, which may be the process's; return status and error."""
        process: Future[int] = Future()
        if rule is not None:
            rule.part = self.prefix
            rule.victim = lambda: victim(process.result())
            with self.site.proxy.lock:
                self.site.proxy.rules.append(rule)
        pid = self.start("micro_batch", batch_id=1, is_direct=False, kept=self.kept, **more)
        process.set_result(pid)
        return self.site.nursery.wait(pid), self.site.nursery.error(pid)

    def values(self) -> list[list[bytes]]:
        """Return the values of each partition, in the order of offsets."""
        return [
            [
                value
                for rows in self.log.read("t", number, columns=["value"])
                for value in rows["value"].to_pylist()
            ]
            for number in range(PARTITIONS)
        ]

    def rival(self) -> None:
        """Commit a row of somebody else."""
        value = b"rival/%06d" % self.rivals
        self.rivals += 1
        self.log.append("t", [(b"0", value)])

    def check(self, batches: int) -> None:
        """Each row of the first micro-batches must be there once, in order; rivals' rows too."""
        mine = [
            row["value"] for b in range(batches) for t in range(TASKS) for row in rows_of("q", b, t)
        ]
        rivals = [b"rival/%06d" % number for number in range(self.rivals)]
        found = self.values()
        assert Counter(value for part in found for value in part) == Counter(mine + rivals)
        for part in found:
            for start in (b"q/", b"rival/"):
                own = [value for value in part if value.startswith(start)]
                assert own == sorted(own)

    def holds(self, batch_id: int) -> bool:
        """Return whether a micro-batch is there; all of it or nothing must be."""
        wanted = {row["value"] for t in range(TASKS) for row in rows_of("q", batch_id, t)}
        found = wanted & {value for part in self.values() for value in part}
        assert found in (set(), wanted)
        return bool(found)

    def finish(self) -> None:
        """Write the next micro-batch, sweep what no commit names, and look."""
        self.run("micro_batch", run="run-9", batch_id=2)
        self.check(3)
        self.log.sweep_staged(now_ms=clock.now_ms() + WEEK_MS)
        left = {entry.name for entry in self.log.client.list("data")}
        assert left == {*self.log.store_state().objects}
        self.check(3)


def requests_of(site: Site) -> list[str]:
    """Return the kinds of requests that a micro-batch in a new process sends, in their order."""
    case = site.case()
    site.proxy.reset()
    assert case.attempt() == (0, "")
    requests = [kind_of(each) for each in site.proxy.requests]
    case.finish()
    site.proxy.reset()
    return requests


RECOVERIES: Mapping[str, Callable[[Case], int]] = {
    "the query in a new process": lambda case: case.run("micro_batch", run="run-2", batch_id=1),
    "another process with the same tasks": lambda case: case.run(
        "commit", run="run-1", batch_id=1, kept=case.kept
    ),
}


@pytest.mark.parametrize("when", KILLS)
def test_a_process_that_is_killed_at_any_request_loses_and_doubles_nothing(
    site: Site, when: str
) -> None:
    """The query, or another process, does the same again, twice: Spark may forget the end."""
    requests = requests_of(site)
    killed = 0
    cases = [(at, turn) for at in range(len(requests)) for turn in range(len(RECOVERIES))]
    for at, turn in cases if IS_FULL else [(at, turn) for at, turn in cases if at % 2 == turn]:
        request, recover = requests[at], [*RECOVERIES.values()][turn]
        case = site.case()
        rule = Rule(KILLS[when], after=at)
        status, _ = case.attempt(rule, kill)
        site.proxy.reset()
        assert rule.is_met, request
        assert status == -signal.SIGKILL, request
        # The commit's create is the moment from which on it is there.
        create = requests.index("PUT commit")
        assert case.holds(1) == (at > create or (at == create and when == "after")), request
        for _ in range(2):
            recover(case)
            case.check(2)
        case.finish()
        killed += 1
    print(f"\n{killed} kills {when} one of {len(requests)} requests: {' '.join(requests)}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_loses_and_doubles_nothing(site: Site, fault: Fault) -> None:
    """A process that says "committed" is right; the batch of one that fails comes again."""
    requests = requests_of(site)

    def spoil(at: int) -> str:
        case = site.case()
        is_get = fault is Fault.STALE_404
        after = sum(each.startswith("GET") for each in requests[:at]) if is_get else at
        seconds = STALE_S if is_get else LATE_S
        rule = Rule(fault, "GET" if is_get else "*", after=after, seconds=seconds)
        status, error = case.attempt(rule)
        assert rule.is_met, requests[at]
        assert status in {0, FAILED}, error
        if status:
            case.holds(1)
            RECOVERIES["the query in a new process"](case)
        case.check(2)
        case.finish()
        return f"{requests[at]}: {'retried' if status else 'done'}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [*pool.map(spoil, chosen(requests, fault))]
    print(f"\n{fault.value}: {', '.join(found)}", flush=True)


def chosen(requests: list[str], fault: Fault) -> list[int]:
    """Return which requests are spoiled: all, or the last one of each kind."""
    places = [
        at
        for at, each in enumerate(requests)
        if fault is not Fault.STALE_404 or each.startswith("GET")
    ]
    if IS_FULL:
        return places
    return [at for at in places if at == max(n for n in places if requests[n] == requests[at])]


@pytest.mark.parametrize(
    ("has_collected", "fence"),
    [(True, "the collector passed it"), (False, "older than a sweep")],
    ids=["the collector and a sweep", "a sweep"],
)
def test_a_process_that_is_stopped_at_any_request_is_fenced(
    site: Site, has_collected: bool, fence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile others commit, the commits that it knows are deleted, and its objects are swept."""
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    requests = requests_of(site)
    found = []
    for at in chosen(requests, Fault.MEANWHILE):
        request, case = requests[at], site.case()

        def stop(pid: int, case: Case = case) -> None:
            os.kill(pid, signal.SIGSTOP)
            for _ in range(12 if has_collected else 2):
                case.rival()
            if has_collected:
                collect(case.direct, 5)
            case.log.sweep_staged(now_ms=clock.now_ms() + WEEK_MS)
            os.kill(pid, signal.SIGCONT)

        rule = Rule(Fault.MEANWHILE, after=at)
        status, error = case.attempt(rule, stop, snapshot_commits=5)
        assert rule.is_met
        assert status in {0, FAILED}, error
        if status:
            case.holds(1)
            RECOVERIES["the query in a new process"](case)
            error = error.strip().splitlines()[-1]
        case.check(2)
        case.finish()
        site.proxy.reset()
        found.append((request, error))
    print(
        "", *(f"stopped before {request}: {error or 'done'}" for request, error in found), sep="\n"
    )
    assert any(fence in error for _, error in found)
