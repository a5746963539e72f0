"""A commit whose k-th request fails, or whose process dies there: it is whole, and there once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kafkalog.errors import CommitInDoubtError, StorageError
from kafkalog.storage_engine.object_store import store_state
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.store_state import StoreState
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import (
    PATIENCE_S,
    batch,
    committed,
    memory_address,
    new_log,
    reread,
)

REQUESTS = 20
"""More than any commit of these tests sends."""


def has_batch(state: StoreState) -> bool:
    """Return whether the batch of the cases is in the log."""
    return "w-1" in committed(state)


class Case:
    """A log with one batch, and a process that will commit the next, perhaps after a rival."""

    def __init__(self, plan: Mapping[int, Spoil], *, has_rival: bool) -> None:
        self.address = memory_address()
        log = new_log(self.address)
        log.commit(batch("w", 0))
        self.client = SpoiledClient(self.address)
        self.log = CommitLog(self.client, patience_s=PATIENCE_S)
        self.others = {"w-0": 1}
        if has_rival:
            log.commit(batch("rival", 0))
            self.others["rival-0"] = 1
        self.client.spoil(plan)

    def attempt(self) -> bool | None:
        """Commit; return whether the process says so, or None if it died."""
        try:
            self.log.commit(batch("w", 1))
        except Killed:
            return None
        except StorageError:
            return False
        finally:
            self.client.spoil({})
        return True

    def restarted(self) -> CommitLog:
        return CommitLog(SpoiledClient(self.address), patience_s=PATIENCE_S)

    def check(self, is_there: bool) -> None:
        """Compare the log with what has to be in it."""
        expected = {**self.others, **({"w-1": 1} if is_there else {})}
        assert committed(reread(self.address)) == expected


def cases(spoil: Spoil, *, has_rival: bool) -> Iterator[Case]:
    """Yield a case for each request of a commit."""
    for at in range(1, REQUESTS):
        case = Case({at: spoil}, has_rival=has_rival)
        yield case
        if not case.client.is_spoiled:
            assert at > 2
            return
    pytest.fail("a commit sends more requests than the test spoils")


@pytest.mark.parametrize("has_rival", [False, True])
@pytest.mark.parametrize("spoil", Spoil)
@pytest.mark.parametrize("who", ["the same process", "another process"])
def test_a_batch_that_is_tried_again_is_there_once(
    spoil: Spoil, has_rival: bool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 3)  # the snapshot's request is spoiled too
    for case in cases(spoil, has_rival=has_rival):
        said = case.attempt()
        if said:
            case.check(True)
        is_another = said is None or who == "another process"
        log = case.restarted() if is_another else case.log
        log.commit(batch("w", 1))
        case.client.late()
        log.commit(batch("w", 1))
        case.check(True)
        case.others["w-2"] = 1
        log.commit(batch("w", 2))
        case.check(True)


@pytest.mark.parametrize("has_rival", [False, True])
@pytest.mark.parametrize("spoil", Spoil)
def test_a_process_never_says_that_a_lost_batch_is_committed(spoil: Spoil, has_rival: bool) -> None:
    """It says "committed" only if it is, and a refusal without doubt only if it is not."""
    for case in cases(spoil, has_rival=has_rival):
        try:
            case.log.commit(batch("w", 1))
            case.check(True)
        except (Killed, CommitInDoubtError):
            is_there = "w-1" in committed(reread(case.address))
            case.check(is_there)


@pytest.mark.parametrize("has_rival", [False, True])
@pytest.mark.parametrize("spoil", Spoil)
@pytest.mark.parametrize("who", ["the same process", "another process"])
def test_an_aborted_batch_lands_before_the_abort_or_never(
    spoil: Spoil, has_rival: bool, who: str
) -> None:
    for case in cases(spoil, has_rival=has_rival):
        said = case.attempt()
        if said:
            case.check(True)
            continue
        is_another = said is None or who == "another process"
        log = case.restarted() if is_another else case.log
        has_landed = not log.abort(has_batch)
        case.check(has_landed)
        case.client.late()
        case.check(has_landed)
        assert committed(log.poll()) == committed(reread(case.address))


@pytest.mark.parametrize(
    "fill",
    [lambda log: log.abort(has_batch), lambda log: log.commit(batch("rival", 0))],
    ids=["an abort", "the next commit"],
)
def test_a_lost_create_cannot_land_once_its_number_is_filled(
    fill: Callable[[CommitLog], object],
) -> None:
    """Its process gives up while the create is still under way, and every look fails."""
    plan = {1: Spoil.LANDS_LATE, 2: Spoil.FAILED}
    case = Case(plan, has_rival=False)
    assert case.attempt() is False
    case.check(False)
    fill(case.log)
    case.client.late()
    assert "w-1" not in committed(reread(case.address))


def test_an_abort_knows_each_create_that_was_sent_for_a_number() -> None:
    plan = {1: Spoil.LANDS_LATE, 2: Spoil.FAILED}
    case = Case(plan, has_rival=False)
    assert case.attempt() is False
    land = case.client.late
    case.client.spoil(plan)
    assert case.attempt() is False
    land()
    assert not case.log.abort(has_batch)
    case.check(True)


@pytest.mark.parametrize("spoil", [Spoil.ANSWER_LOST, Spoil.REFUSED, Spoil.FAILED])
def test_a_batch_without_a_writer_is_there_once_though_its_answer_is_lost(spoil: Spoil) -> None:
    """The token alone says whose a commit is."""
    case = Case({1: spoil}, has_rival=True)
    names = (f"nobody-{number}" for number in itertools.count())

    def prepare(state: StoreState) -> Mapping[str, Any] | None:
        return batch(next(names), 0)(state)

    case.log.commit(prepare)
    assert sum(committed(reread(case.address)).values()) == len(case.others) + 1


@pytest.mark.slow
def test_two_faults_in_one_commit_lose_and_double_nothing() -> None:
    passing = [Spoil.FAILED, Spoil.ANSWER_LOST, Spoil.REFUSED, Spoil.STALE_404]
    for places in itertools.combinations(range(1, 7), 2):
        for spoils in itertools.product(passing, passing):
            case = Case(dict(zip(places, spoils, strict=True)), has_rival=True)
            if case.attempt():
                case.check(True)
            case.restarted().commit(batch("w", 1))
            case.check(True)
