"""Commits on a server that speaks S3, with faults and kills at each request, by a proxy."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from kafkalog.errors import CommitInDoubtError, StorageError
from kafkalog.storage_engine.object_store import store_state
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from tests import ROOT
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer
from tests.unit.storage_engine.store_log import batch, collect, committed, new_log, reread

OF_A_VICTIM = {Fault.VICTIM_BEFORE, Fault.VICTIM_AFTER, Fault.MEANWHILE}
FAULTS = [each for each in Fault if each not in {*OF_A_VICTIM, Fault.SLOW_LINE}]
THAT_WAIT = {Fault.STALE_404, Fault.LATE}
IN_ORDER = [
    pytest.param(each, marks=[pytest.mark.slow] if each in THAT_WAIT else []) for each in FAULTS
]
WRITER = """
import pickle, sys
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from tests.unit.storage_engine.store_log import batch

address = pickle.loads(bytes.fromhex(sys.argv[1]))
client = ObjectClient(address, patience_s=5.0)
log = CommitLog(client, patience_s=5.0)
print("opened", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3]), int(sys.argv[4])):
    log.commit(batch(sys.argv[2], number))
print("committed", flush=True)
"""


def opened(address: StoreAddress) -> CommitLog:
    return CommitLog(ObjectClient(address, patience_s=5.0, timeout_s=1.0), patience_s=5.0)


class WriterProcess:
    """A process that opens the log, says so, waits for `go`, and commits batches."""

    def __init__(
        self, address: StoreAddress, name: str, batches: range, server: StoreServer
    ) -> None:
        text = pickle.dumps(address).hex()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, text, name, str(batches.start), str(batches.stop)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **server.environment},
        )
        assert self.said() == "opened"

    def go(self) -> None:
        """Let it commit."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self) -> str:
        """Return its next line; empty if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Kill it, as the proxy's victim."""
        self.process.kill()

    def ended(self) -> int:
        """Wait for its end; return its status."""
        with self.process:
            return self.process.wait(60)


@pytest.mark.parametrize("fault", IN_ORDER)
def test_a_fault_at_any_request_of_a_commit_loses_and_doubles_nothing(
    s3_address: StoreAddress,
    store_proxy: StoreProxy,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rival comes first: the commit creates, reads the rival's, and creates the next number."""
    rival = new_log(s3_address)
    expected: Counter[str] = Counter()
    for at in range(8):
        log = opened(s3_address)
        rival.poll()
        rival.commit(batch("rival", at))
        rule = Rule(fault, after=at, seconds=1.5)
        store_proxy.reset(rule)
        try:
            log.commit(batch("w", at))
        except StorageError:
            store_proxy.reset()
            log.commit(batch("w", at))
        is_spoiled = rule.met > at
        store_proxy.reset()
        expected.update([f"rival-{at}", f"w-{at}"])
        assert committed(reread(s3_address)) == expected
        if not is_spoiled:
            break
    assert at >= 4
    assert not is_spoiled


@pytest.mark.parametrize(("kind", "part"), [("PUT", ".commit"), ("GET", "boundary")])
def test_a_committer_that_stops_at_a_request_past_the_collector_is_fenced(
    s3_address: StoreAddress,
    store_proxy: StoreProxy,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    part: str,
) -> None:
    """Its create lands where the true commit was deleted; or its own true commit was deleted."""
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    rival, stopped = new_log(s3_address), opened(s3_address)
    number = stopped.state.number + 1

    def meanwhile() -> None:
        for batch_id in range(12):
            rival.commit(batch("rival", batch_id))
        collect(s3_address, 5)

    store_proxy.victim = meanwhile
    store_proxy.reset(Rule(Fault.MEANWHILE, kind, part))
    with pytest.raises(CommitInDoubtError, match="the collector passed it"):
        stopped.commit(batch("w", 0))
    assert number <= 5 < stopped.state.number
    expected = {f"rival-{batch_id}": 1 for batch_id in range(12)}
    has_landed = kind == "GET"
    assert committed(reread(s3_address)) == {**expected, **({"w-0": 1} if has_landed else {})}
    stopped.commit(batch("w", 0))
    assert committed(reread(s3_address)) == {**expected, "w-0": 1}


def test_commits_polls_and_opening_send_so_many_requests(
    s3_address: StoreAddress, store_proxy: StoreProxy
) -> None:
    log = new_log(s3_address)
    reader = opened(s3_address)
    store_proxy.reset()
    log.commit(batch("w", 0))
    assert store_proxy.counts == {"PUT": 1, "GET": 1}
    store_proxy.reset()
    reader.poll()
    assert store_proxy.counts == {"GET": 3}
    store_proxy.reset()
    reader.poll()
    assert store_proxy.counts == {"GET": 1}
    store_proxy.reset()
    opened(s3_address)
    assert store_proxy.counts == {"LIST": 1, "GET": 1 + 2 + 1}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [Fault.VICTIM_BEFORE, Fault.VICTIM_AFTER])
def test_a_process_that_is_killed_at_any_request_of_a_commit_leaves_all_or_nothing(
    s3_address: StoreAddress, store_proxy: StoreProxy, store_server: StoreServer, victim: Fault
) -> None:
    rival = new_log(s3_address)
    expected: Counter[str] = Counter()
    for at in range(8):
        process = WriterProcess(s3_address, "w", range(at, at + 1), store_server)
        rival.poll()
        rival.commit(batch("rival", at))
        rule = Rule(victim, after=at)
        store_proxy.victim = process.kill
        store_proxy.reset(rule)
        process.go()
        is_done = process.said() == "committed"
        status = process.ended()
        assert status == (0 if is_done else -signal.SIGKILL)
        is_spoiled = rule.met > at
        store_proxy.reset()
        expected.update([f"rival-{at}"])
        found = committed(reread(s3_address))
        assert found in (expected, expected + Counter([f"w-{at}"]))
        assert not is_done or found[f"w-{at}"] == 1
        opened(s3_address).commit(batch("w", at))  # another process tries the batch again
        expected.update([f"w-{at}"])
        assert committed(reread(s3_address)) == expected
        if not is_spoiled:
            break
    assert at >= 4
    assert not is_spoiled


@pytest.mark.slow
def test_writers_that_are_killed_and_started_again_lose_and_double_nothing(
    s3_address: StoreAddress, store_proxy: StoreProxy, store_server: StoreServer
) -> None:
    new_log(s3_address)
    names, batches = ["a", "b", "c"], 25

    def started(name: str) -> WriterProcess:
        known = reread(s3_address).log.writers.get(name)
        first = 0 if known is None else known.batch_id + 1
        process = WriterProcess(s3_address, name, range(first, batches), store_server)
        process.go()
        return process

    running = {name: started(name) for name in names}
    kills = 0
    while running:
        name, process = next(iter(running.items()))
        del running[name]
        if kills < 6:
            time.sleep(0.1)
            process.kill()
            process.ended()
            kills += 1
            running[name] = started(name)
        else:
            assert process.ended() == 0
    assert kills == 6
    assert committed(reread(s3_address)) == {f"{n}-{b}": 1 for n in names for b in range(batches)}


def test_a_snapshot_that_fails_costs_no_commit(
    s3_address: StoreAddress, store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 2)
    log = new_log(s3_address)
    store_proxy.reset(Rule(Fault.REFUSED_500, "PUT", ".snapshot"))
    log.commit(batch("w", 0))
    for number in range(1, 4):
        log.commit(batch("w", number))
    assert committed(reread(s3_address)) == {f"w-{number}": 1 for number in range(4)}
    names = [entry.name for entry in ObjectClient(s3_address).list("log")]
    assert len([name for name in names if name.endswith(".snapshot")]) == 1
