"""`store_requests` finds what is planted, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.store_state import StoreState
from tests.torture.spoiled_requests import FAULTS, Fault, short_patience
from tests.torture.store_requests import NEW, SAME, Bench, Case, Pair, cases

CREATE = 3
"""The request of `commit` that decides: the ones before write the objects of two tasks."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with short_patience():
        yield Bench()


def tried(bench: Bench, text: str) -> str:
    return bench.try_case(Case.parse(text)) or ""


@pytest.mark.parametrize("fault", FAULTS["PUT"])
def test_a_commit_is_there_once_whatever_becomes_of_its_create(bench: Bench, fault: Fault) -> None:
    who = (SAME, NEW)[len(fault) % 2]
    assert tried(bench, f"commit:{CREATE}:{fault}:{who}") == ""


@pytest.mark.parametrize(
    "case",
    [
        "clean:9:killed-after:new",
        "commit+collect:3:stopped:same",
        "read:1:404:new",
        "erase:84:404:same",
        "erase:96:404:new",
        "alter+alter:2:stopped:same",
    ],
)
def test_work_goes_on_after_a_death_a_stop_and_an_object_that_is_not_found(
    bench: Bench, case: str
) -> None:
    assert tried(bench, case) == ""


@pytest.mark.parametrize("n", range(112, 120))
def test_an_erasure_goes_on_when_a_cleaner_replaces_what_it_is_about_to_clean(
    bench: Bench, n: int
) -> None:
    assert tried(bench, f"erase+clean:{n}:stopped:new") == ""


def test_each_request_of_an_operation_is_spoiled_in_each_way(bench: Bench) -> None:
    kinds, _ = bench.requests("commit")
    found = cases(bench, Pair("commit"), 1)
    assert kinds[CREATE - 1 :] == ["PUT", "GET", "PUT"]
    assert [(case.n, case.fault) for case in found] == [
        (n, fault) for n, kind in enumerate(kinds, 1) for fault in FAULTS[kind]
    ]
    stopped = [
        case.n for case in cases(bench, Pair("commit", "clean"), 1) if case.fault == "stopped"
    ]
    assert sorted(stopped) == [*range(1, len(kinds) + 1)]


def test_a_request_that_an_operation_does_not_send_is_not_a_try(bench: Bench) -> None:
    assert tried(bench, "commit:99:lost:new") == "nothing was spoiled"


def test_a_batch_that_lands_twice_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_log, "is_new", lambda *given, **more: True)
    assert "d-0 has" in tried(bench, f"commit:{CREATE}:killed-after:new")


def test_an_object_that_is_committed_after_a_sweep_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreState, "check_unswept", lambda self, change: None)
    assert "missing" in tried(bench, f"commit+collect:{CREATE}:stopped:same")


def test_a_process_that_the_collector_has_passed_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(log: CommitLog, base: StoreState, state: StoreState, boundary: int = 0) -> StoreState:
        log._state = state
        return state

    monkeypatch.setattr(CommitLog, "_take", take)
    assert tried(bench, "alter+pass_by:2:stopped:same") != ""
