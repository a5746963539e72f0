"""The collector of a log in an object store: what it deletes, when, and what it never breaks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import CommitInDoubtError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.object_store import collector, object_log, regroup, store_state
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.collector import (
    COMMITS_KEPT_MS,
    DELETE_DELAY_MS,
    Collected,
    collect,
    cut_commit_log,
    delete_dropped,
    sweep,
    unnamed,
)
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import stored_names
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, memory_address
from tests.unit.storage_engine.test_regroup import contents, fill, stored

DAY_MS = 86_400_000
OLD_MS = STAGED_RETENTION_MS + DAY_MS


def now_ms(log: ObjectLog) -> int:
    """Return the time of the store, by its newest object."""
    return max(each.modified_ms for each in log.client.list(""))


@pytest.fixture
def address() -> StoreAddress:
    address = memory_address()
    CommitLog.create(WithoutProbe(address))
    return address


@pytest.fixture
def log(address: StoreAddress) -> ObjectLog:
    log = ObjectLog(address)
    log.create_topic("t", 3)
    return log


def stage(log: ObjectLog) -> StagedMessage:
    """Do as a task: write an object."""
    writer = StagedWriter(log, log.state(), now_ms=lambda: 0)
    writer.append("t", pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"]}))
    return writer.finish()


def regrouped(log: ObjectLog) -> int:
    """Regroup all; return the time of it."""
    at_ms = now_ms(log)
    regroup.regroup(log, regroup.fresh_objects(log.store_state()), now_ms=at_ms)
    return at_ms


def check_whole(log: ObjectLog) -> None:
    """Check that no object is missing that the log names, and that there is no other."""
    state = log.store_state()
    there = stored(log)
    live = {each for name, one in state.objects.items() for each in stored_names(name, one)}
    assert live <= there
    assert not unnamed(state, there)


# --- dropped objects -----------------------------------------------------------------------------


def test_a_dropped_object_is_deleted_after_an_hour_and_then_forgotten(log: ObjectLog) -> None:
    fill(log, "t", 3)
    before, old = contents(log), stored(log)
    at_ms = regrouped(log)
    assert delete_dropped(log, now_ms=at_ms + DELETE_DELAY_MS - 1) == 0
    assert old < stored(log)
    assert delete_dropped(log, now_ms=at_ms + DELETE_DELAY_MS) == 6
    assert not old & stored(log) and not log.store_state().dropped
    assert contents(log) == before
    check_whole(log)
    assert delete_dropped(log, now_ms=at_ms + DELETE_DELAY_MS) == 0


def test_the_delay_is_that_of_the_topic_and_of_a_mixed_object_the_longest(log: ObjectLog) -> None:
    log.create_topic("u", config={"cleanup.policy": "delete", "file.delete.delay.ms": "1000"})
    fill(log, "t", 3, commits=1)
    fill(log, "u", 1, commits=1)
    at_ms = regrouped(log)
    log.delete_records("u", 0, -1, now_ms=at_ms)
    assert len(log.store_state().dropped) == 3
    assert delete_dropped(log, now_ms=at_ms + 1000) == 1
    assert {layout.is_stored_segment(name) for name in log.store_state().dropped} == {False}
    log.alter_topic("t", {"file.delete.delay.ms": "2000"})
    assert delete_dropped(log, now_ms=at_ms + 1999) == 0
    assert delete_dropped(log, now_ms=at_ms + 2000) == 2


def test_a_segment_object_goes_with_its_indexes(log: ObjectLog) -> None:
    fill(log, "t", 3)
    at_ms = regrouped(log)
    log.delete_topic("t", now_ms=at_ms)
    assert delete_dropped(log, now_ms=at_ms + DELETE_DELAY_MS) == 6 + 3
    assert not stored(log)


def test_two_collectors_forget_an_object_once(log: ObjectLog) -> None:
    fill(log, "t", 3)
    at_ms = regrouped(log) + DELETE_DELAY_MS
    other = ObjectLog(log.address)
    other.store_state()
    assert delete_dropped(log, now_ms=at_ms) == 6
    assert other.known_state.dropped
    number = log.state().number
    assert delete_dropped(other, now_ms=at_ms) == 0
    assert log.state().number == number


def test_a_late_retry_of_a_commit_whose_object_is_forgotten_changes_nothing(
    log: ObjectLog,
) -> None:
    """Without a writer only the object itself says that the commit was made."""
    message = stage(log)
    stalled = ObjectLog(log.address)
    log.commit([message], now_ms=0)
    at_ms = regrouped(log) + DELETE_DELAY_MS
    assert delete_dropped(log, now_ms=at_ms) == 1
    before = contents(log)
    assert stalled.commit([message], now_ms=at_ms).skipped
    assert contents(log) == before
    check_whole(log)


def test_a_slow_batch_is_committed_although_younger_objects_are_forgotten(log: ObjectLog) -> None:
    slow = stage(log)
    fill(log, "t", 3, commits=2)
    at_ms = regrouped(log) + DELETE_DELAY_MS
    assert delete_dropped(log, now_ms=at_ms) == 2
    assert log.store_state().forgotten >= layout.seen_by_stored(slow.files[0].name)
    assert log.commit([slow], now_ms=at_ms).rows == 1
    check_whole(log)


# --- orphans -------------------------------------------------------------------------------------


def test_a_sweep_deletes_orphans_of_every_folder(log: ObjectLog) -> None:
    fill(log, "t", 3)
    at_ms = regrouped(log)
    delete_dropped(log, now_ms=at_ms + DELETE_DELAY_MS)
    number = log.state().number
    orphan = layout.stored_segment(number, "A" * 22, 0, 0, "r")
    for name in (orphan, layout.stored_side(orphan), f"data/{number}/x.mixed"):
        log.client.put_unique(name, b"x")
    log.client.put_unique(layout.stored_claim("t-0", 1), b"")
    log.client.put_unique("probe/0/1", b"")
    log.client.put_unique("data/notes.txt", b"of the user")
    assert sweep(log, now_ms=now_ms(log) + STAGED_RETENTION_MS - 60_000) == 0
    assert sweep(log, now_ms=now_ms(log) + OLD_MS) == 5
    assert log.store_state().swept == number
    assert log.client.get("data/notes.txt") is not None
    log.client.delete(["data/notes.txt"])
    check_whole(log)


def test_a_committer_that_was_stopped_during_a_sweep_is_refused(log: ObjectLog) -> None:
    """It may be stopped at any of its requests: its object is named, or it is refused."""
    for stop in range(1, 20):
        message = stage(log)
        patch = pytest.MonkeyPatch()
        with patch.context() as patched:
            patched.setattr(object_log, "ObjectClient", Stopping)
            patched.setattr(object_log, "CommitLog", Impatient)
            stalled = ObjectLog(log.address)
        assert isinstance(stalled.client, Stopping)
        stalled.client.stop(stop, lambda: sweep(log, now_ms=now_ms(log) + OLD_MS))
        try:
            result = stalled.commit([message], now_ms=0)
        except StorageError as fault:
            assert "Run the batch again" in str(fault)
            assert message.files[0].name not in log.store_state().objects
        else:
            assert result.rows == 1
        check_whole_if_swept(log)
        contents(log)
        if not stalled.client.is_stopped:
            return
    raise AssertionError("the committer sends more requests")


def check_whole_if_swept(log: ObjectLog) -> None:
    sweep(log, now_ms=now_ms(log) + OLD_MS)
    check_whole(log)


class Stopping(ObjectClient):
    """A client whose process is stopped before its k-th request, while others work."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address)
        self._left = 0
        self._meanwhile: Callable[[], Any] = lambda: None
        self.is_stopped = False

    def stop(self, before: int, meanwhile: Callable[[], Any]) -> None:
        """Stop before a request, counted from here: the first one is 1."""
        self._left, self._meanwhile = before, meanwhile

    def _ask(self, kind: str, name: str, act: Callable[[], Any], *, requests: int = 1) -> Any:
        self._left -= 1
        if self._left == 0:
            self.is_stopped = True
            self._meanwhile()
        return super()._ask(kind, name, act, requests=requests)


# --- the commit log ------------------------------------------------------------------------------


@pytest.fixture
def _short_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a snapshot be due after every fifth commit."""
    for module in (store_state, collector):
        monkeypatch.setattr(module, "SNAPSHOT_COMMITS", 5)
    yield


def numbers(log: ObjectLog) -> tuple[list[int], list[int]]:
    """Return the numbers of the commits, and of the snapshots, that are there."""
    parsed = [layout.parse_stored_name(each.name) for each in log.client.list("log")]
    found = sorted(each for each in parsed if each is not None)
    return [n for n, is_snapshot in found if not is_snapshot], [n for n, is_ in found if is_]


@pytest.mark.usefixtures("_short_log")
def test_commits_behind_the_last_snapshot_but_one_are_deleted(log: ObjectLog) -> None:
    fill(log, "t", 3, commits=17)
    assert numbers(log) == ([*range(1, 19)], [5, 10, 15])
    assert cut_commit_log(log, now_ms=now_ms(log) + COMMITS_KEPT_MS - 60_000) == 0
    before = contents(log)
    assert cut_commit_log(log, now_ms=now_ms(log) + 2 * COMMITS_KEPT_MS) == 11
    assert numbers(log) == ([*range(11, 19)], [10, 15])
    assert log.boundary() == 10
    assert contents(ObjectLog(log.address)) == before == contents(log)
    at_ms = now_ms(log) + 2 * COMMITS_KEPT_MS
    counts = Counter(log.client.counts)
    assert cut_commit_log(log, now_ms=at_ms) == 0
    # The boundary; the commits 15 and 20; the rest of the log, and its newest objects.
    assert Counter(log.client.counts) - counts == {"GET": 1, "HEAD": 2, "LIST": 2}
    log.append("t", [(b"k", b"v")])
    assert ObjectLog(log.address).state().number == 19


@pytest.mark.usefixtures("_short_log")
def test_a_log_without_two_snapshots_keeps_all_commits(log: ObjectLog) -> None:
    fill(log, "t", 3, commits=7)
    assert cut_commit_log(log, now_ms=now_ms(log) + 2 * COMMITS_KEPT_MS) == 0
    assert numbers(log) == ([*range(1, 9)], [5])


@pytest.mark.usefixtures("_short_log")
def test_a_writer_that_was_stopped_while_commits_were_deleted_goes_on(log: ObjectLog) -> None:
    stalled = ObjectLog(log.address)
    stalled.state()
    fill(log, "t", 3, commits=17)
    cut_commit_log(log, now_ms=now_ms(log) + 2 * COMMITS_KEPT_MS)
    with pytest.raises(CommitInDoubtError, match="the collector passed it"):
        stalled.append("t", [(b"k", b"v")])
    stalled.append("t", [(b"k", b"v")])
    assert stalled.state().number == 19
    assert sum(end for _, end in log.offsets("t").values()) == 17 * 40 + 1


# --- all of it -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_short_log")
@pytest.mark.parametrize(
    "spoil",
    [
        Spoil.KILLED_AFTER,
        pytest.param(Spoil.KILLED_BEFORE, marks=pytest.mark.slow),
        pytest.param(Spoil.FAILED, marks=pytest.mark.slow),
    ],
)
def test_a_collection_that_is_killed_at_any_request_is_finished_by_the_next(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_FORGOTTEN_MAX", 3)
    requests = 0
    while True:
        requests += 1
        address = memory_address()
        CommitLog.create(WithoutProbe(address))
        log = ObjectLog(address)
        log.create_topic("t", 2)
        fill(log, "t", 2, commits=5, count=4)
        at_ms = regrouped(log) + OLD_MS
        fill(log, "t", 2, commits=6, count=4)
        stage(log)
        before = contents(log)
        with monkeypatch.context() as patched:
            patched.setattr(object_log, "ObjectClient", SpoiledClient)
            patched.setattr(object_log, "CommitLog", Impatient)
            dying = ObjectLog(address)
        assert isinstance(dying.client, SpoiledClient)
        dying.client.spoil({requests: spoil})
        with contextlib.suppress(Killed, StorageError):
            collect(dying, now_ms=at_ms)
        assert contents(ObjectLog(address)) == before
        collect(log, now_ms=at_ms)
        check_whole(log)
        boundary = log.boundary()
        commits, snapshots = numbers(log)
        assert boundary > 0 and snapshots[0] == boundary and len(snapshots) > 1
        assert commits == [*range(boundary + 1, log.state().number + 1)]
        assert not log.store_state().dropped
        assert contents(log) == before
        if not dying.client.is_spoiled:
            break
    assert requests > 12


def test_a_log_with_nothing_to_collect_costs_nine_requests(log: ObjectLog) -> None:
    fill(log, "t", 3)
    log.store_state()
    at_ms = now_ms(log)
    before = Counter(log.client.counts)
    assert collect(log, now_ms=at_ms) == Collected(0, 0, 0)
    # The state, twice; claims, probes, data, segments; boundary, a commit, the rest of the log.
    assert Counter(log.client.counts) - before == {"GET": 3, "HEAD": 1, "LIST": 5}
