"""The commit log of a log in an object store, on a store in memory."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kafkalog.errors import CommitInDoubtError, CorruptLogError, InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import DeletedTopic
from kafkalog.storage_engine.object_store import store_state
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.commit_log import CHECK_AFTER_S, CommitLog
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from kafkalog.storage_engine.object_store.store_state import (
    Cleaned,
    DroppedObject,
    Extent,
    StoreChange,
    StoreState,
    stored_names,
)
from tests.unit.storage_engine.store_log import (
    PATIENCE_S,
    TOPIC_ID,
    WithoutProbe,
    batch,
    collect,
    committed,
    memory_address,
    new_log,
    reread,
)


@pytest.fixture
def address() -> StoreAddress:
    return memory_address()


@pytest.fixture
def log(address: StoreAddress) -> CommitLog:
    return new_log(address)


def opened(address: StoreAddress) -> tuple[CommitLog, ObjectClient]:
    client = ObjectClient(address)
    return CommitLog(client, patience_s=PATIENCE_S), client


def counted(client: ObjectClient, act: Any) -> Counter[str]:
    before = Counter(client.counts)
    act()
    return Counter(client.counts) - before


def filled(log: CommitLog, count: int, writer: str = "w") -> None:
    known = log.state.log.writers.get(writer)
    first = 0 if known is None else known.batch_id + 1
    for batch_id in range(first, first + count):
        log.commit(batch(writer, batch_id))


# --- creating and opening ------------------------------------------------------------------------


def test_a_log_is_created_once_after_a_probe_that_leaves_nothing(address: StoreAddress) -> None:
    client = ObjectClient(address)
    assert CommitLog.create(client)
    assert not CommitLog.create(client)
    assert [entry.name for entry in client.list("")] == ["boundary", "kl-log"]
    assert reread(address) == StoreState()


def test_of_many_creators_one_creates_the_log(address: StoreAddress) -> None:
    made: list[bool] = []
    threads = [
        threading.Thread(target=lambda: made.append(CommitLog.create(WithoutProbe(address))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]


def test_nothing_is_opened_without_a_log(address: StoreAddress) -> None:
    with pytest.raises(InvalidInputError, match=r"there is no log .* belongs to the process"):
        CommitLog(ObjectClient(address))


def test_a_log_opens_by_its_newest_snapshot_and_the_commits_after_it(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 10)
    filled(log, 23)
    found, client = opened(address)
    assert found.state == log.state
    # The mark, a list, the snapshot after commit 20, commits 21 to 24, and the boundary.
    assert client.counts == {"GET": 1 + 1 + 4 + 1, "LIST": 1}


def test_a_snapshot_is_due_after_so_many_bytes_too(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(ObjectClient(address).get(layout.stored_commit(1)).data)  # type: ignore[union-attr]
    monkeypatch.setattr(store_state, "SNAPSHOT_BYTES", 2 * size)
    filled(log, 6)
    names = [entry.name for entry in ObjectClient(address).list("log")]
    snapshots = [parsed[0] for name in names if (parsed := layout.parse_stored_name(name))[1]]  # type: ignore[index]
    assert snapshots
    assert reread(address).objects == log.state.objects


def test_a_missing_snapshot_costs_requests_and_no_commit(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 10)
    filled(log, 23)
    ObjectClient(address).delete([layout.stored_snapshot(20)])
    assert reread(address) == log.state


def test_a_snapshot_holds_all_of_a_state(log: CommitLog) -> None:
    filled(log, 3)
    dropped = min(log.state.objects)
    name = layout.stored_segment(log.state.number, TOPIC_ID, 0, 0, "r")

    def prepare(state: StoreState) -> Mapping[str, Any]:
        change = StoreChange()
        change.drop(dropped)
        change.add(name, 30, [Extent(TOPIC_ID, 0, 0, 30, 0, 9, 0, -1)], side_size=8)
        change.clean(TOPIC_ID, 0, Cleaned(9, 6, {"kl-note": "{}"}))
        change.swept = 1
        return change.record(7)

    state = log.commit(prepare)
    assert state.dropped == {dropped: DroppedObject(state.number, 7)}
    assert state.cleaned_of(TOPIC_ID, 0) == Cleaned(9, 6, {"kl-note": "{}"})
    assert state.cleaned_of(TOPIC_ID, 1) is None
    content = json.loads(json.dumps(state.snapshot()))
    again = StoreState.of_snapshot(state.number, content)
    assert (again.log, again.objects) == (state.log, state.objects)
    assert again.dropped == state.dropped
    assert (again.swept, again.cleaned) == (state.swept, state.cleaned)


def test_a_snapshot_of_an_early_release_is_read(log: CommitLog) -> None:
    """It has no times of objects, and nothing of cleanings."""
    filled(log, 3)
    content = log.state.snapshot()
    del content["cleaned"]
    objects = {name: values[:3] for name, values in content["objects"].items()}
    content |= {"objects": objects, "dead": {"data/1/gone.mixed": 2}, "time_ms": 5}
    again = StoreState.of_snapshot(log.state.number, json.loads(json.dumps(content)))
    assert again.dropped == {"data/1/gone.mixed": DroppedObject(2, 5)}
    assert again.objects == {
        name: dataclasses.replace(each, added_ms=5) for name, each in log.state.objects.items()
    }


def test_a_segment_object_is_dropped_with_its_indexes_and_then_forgotten(log: CommitLog) -> None:
    name = layout.stored_segment(1, TOPIC_ID, 0, 0, "r")

    def act(work: Callable[[StoreChange], None]) -> StoreState:
        change = StoreChange()
        work(change)
        return log.commit(lambda state: change.record(7))

    extent = Extent(TOPIC_ID, 0, 0, 30, 0, 9, 0, -1)
    state = act(lambda change: change.add(name, 30, [extent], side_size=8))
    assert layout.is_stored_segment(name) and layout.seen_by_stored(name) == 1
    both = (name, name.replace(".log", ".side"))
    assert stored_names(name, state.objects[name]) == both
    assert not layout.is_stored_segment(both[1]) and layout.seen_by_stored(both[1]) == 1
    state = act(lambda change: change.drop(name))
    assert state.dropped == {name: DroppedObject(state.number, 7, 8)}
    assert stored_names(name, state.dropped[name]) == both
    assert not act(lambda change: change.forget_dropped(name)).dropped
    with pytest.raises(KeyError):
        act(lambda change: change.forget_dropped(name))


def test_what_a_cleaning_has_left_goes_with_the_topic(log: CommitLog) -> None:
    def clean(state: StoreState) -> Mapping[str, Any]:
        change = StoreChange()
        change.clean(TOPIC_ID, 1, Cleaned(9, 6, {}))
        return change.record(7)

    def delete(state: StoreState) -> Mapping[str, Any]:
        change = StoreChange()
        change.deleted(DeletedTopic("t", TOPIC_ID, 2, 0))
        return change.record(8)

    assert log.commit(clean).cleaned_of(TOPIC_ID, 1) is not None
    assert not log.commit(delete).cleaned


# --- polling -------------------------------------------------------------------------------------


def test_a_poll_without_news_is_one_request(address: StoreAddress, log: CommitLog) -> None:
    reader, client = opened(address)
    assert counted(client, reader.poll) == {"GET": 1}
    filled(log, 1)
    assert counted(client, reader.poll) == {"GET": 3}  # the commit, none after it, the boundary
    assert reader.state == log.state


def test_after_four_new_commits_the_rest_is_listed(address: StoreAddress, log: CommitLog) -> None:
    reader, client = opened(address)
    filled(log, 12)
    # The boundary is asked for beside the second, third and fourth commit.
    assert counted(client, reader.poll) == {"GET": 4 + 3 + 12 + 1, "LIST": 1}
    assert reader.state == log.state


def test_a_reader_that_the_collector_has_passed_opens_again(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    now = [0.0]
    reader = CommitLog(ObjectClient(address), patience_s=PATIENCE_S, elapsed=lambda: now[0])
    filled(log, 12)
    collect(address, 5)
    assert reader.poll().number == 1  # its next commit is missing, as if there were none
    now[0] = CHECK_AFTER_S + 1
    assert reader.poll() == log.state
    assert reread(address) == log.state


def test_a_reader_does_not_believe_a_commit_below_the_boundary(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    reader, client = opened(address)
    filled(log, 12)
    collect(address, 5)
    late = NumberedObject(layout.STORED_COMMIT_MAGIC, 2, log.log_id, {"time_ms": 9}).encode()
    assert client.create(layout.stored_commit(2), late) is Outcome.DONE
    assert reader.poll() == log.state


def test_commits_that_are_missing_above_the_boundary_are_damage(
    address: StoreAddress, log: CommitLog
) -> None:
    filled(log, 5)
    ObjectClient(address).delete([layout.stored_commit(3)])
    with pytest.raises(StorageError, match="are missing"):
        reread(address)


# --- committing ----------------------------------------------------------------------------------


def test_a_commit_is_one_put_and_one_get(address: StoreAddress, log: CommitLog) -> None:
    writer, client = opened(address)
    assert counted(client, lambda: writer.commit(batch("w", 0))) == {"PUT": 1, "GET": 1}
    assert counted(client, lambda: writer.commit(batch("w", 0))) == {}


def test_a_writer_that_is_second_moves_its_offsets_and_comes_next(
    address: StoreAddress, log: CommitLog
) -> None:
    other, client = opened(address)
    log.commit(batch("a", 0))
    # The other's commit is met, and read with three that may follow it; then the boundary.
    assert counted(client, lambda: other.commit(batch("b", 0))) == {"PUT": 2, "GET": 5}
    assert committed(other.state) == {"a-0": 1, "b-0": 1}
    assert log.poll() == other.state == reread(address)


class SlowClient(ObjectClient):
    """A client whose requests take as long as those to a server."""

    def _ask(self, kind: str, name: str, act: Callable[[], Any], *, requests: int = 1) -> Any:
        time.sleep(0.001)
        found = super()._ask(kind, name, act, requests=requests)
        time.sleep(0.001)
        return found


def test_a_writer_that_commits_without_a_pause_lets_others_commit(
    address: StoreAddress, log: CommitLog
) -> None:
    """It would always come first: the others read its last commit meanwhile."""
    made = dict.fromkeys(range(4), 0)

    def write(name: int) -> None:
        writer = CommitLog(SlowClient(address))
        while min(made.values()) < 5 and max(made.values()) < 2_000:
            writer.commit(batch(f"w{name}", made[name]))
            made[name] += 1

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(write, made))
    assert min(made.values()) >= 5


def test_concurrent_writers_lose_and_double_nothing(address: StoreAddress, log: CommitLog) -> None:
    def write(writer: str) -> None:
        own, _ = opened(address)
        filled(own, 12, writer)

    threads = [threading.Thread(target=write, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert committed(reread(address)) == {f"w{w}-{b}": 1 for w in range(4) for b in range(12)}


def test_an_error_of_the_checks_sends_nothing(address: StoreAddress, log: CommitLog) -> None:
    writer, client = opened(address)

    def refuse(state: StoreState) -> Mapping[str, Any]:
        raise InvalidInputError("no")

    def nonsense(state: StoreState) -> Mapping[str, Any]:
        return {"partitions": {"no such topic": {"0": []}}}

    with pytest.raises(InvalidInputError):
        writer.commit(refuse)
    with pytest.raises(KeyError):
        writer.commit(nonsense)
    assert client.counts["LIST"] == 1
    assert "PUT" not in client.counts


def test_an_object_that_is_older_than_a_sweep_is_refused(log: CommitLog) -> None:
    filled(log, 2)

    def sweep(state: StoreState) -> Mapping[str, Any]:
        change = StoreChange()
        change.swept = state.number
        return change.record(0)

    log.commit(sweep)
    with pytest.raises(StorageError, match="Run the batch again"):
        log.commit(batch("w", 9))


def test_a_committer_that_was_stopped_past_the_collector_is_fenced(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    stopped, _ = opened(address)
    filled(log, 12)
    collect(address, 5)
    with pytest.raises(CommitInDoubtError, match="the collector passed it"):
        stopped.commit(batch("late", 0))
    assert stopped.abort(lambda state: "late-0" in committed(state))
    stopped.commit(batch("late", 0))
    assert committed(reread(address)) == {**{f"w-{b}": 1 for b in range(12)}, "late-0": 1}


def test_an_abort_of_what_is_known_to_be_there_asks_nothing(
    address: StoreAddress, log: CommitLog
) -> None:
    writer, client = opened(address)
    writer.commit(batch("w", 0))
    assert counted(client, lambda: writer.abort(lambda state: "w-0" in committed(state))) == {}
    assert counted(client, lambda: writer.abort(lambda state: False)) == {"PUT": 1, "GET": 1}
    assert committed(reread(address)) == {"w-0": 1}


# --- formats -------------------------------------------------------------------------------------


def test_a_commit_has_these_bytes() -> None:
    """The checksum and the layout are computed here by another's means: a table, and slices."""
    made = NumberedObject(layout.STORED_COMMIT_MAGIC, 258, b"0123456789abcdef", {"a": 1}).encode()
    assert made[:8] == b"klcommit"
    assert made[8:12] == bytes([0, 0, 0, 1])
    assert made[16:24] == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert made[24:] == b'0123456789abcdef{"a":1}'
    assert int.from_bytes(made[12:16]) == plain_crc32c(made[16:])


def plain_crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def test_the_newest_commit_is_listed_first() -> None:
    names = [layout.stored_commit(number) for number in (1, 2, 9, 10, 10**12)]
    assert sorted(names, reverse=True) == names
    assert names[0] == "log/99999999999999999998.commit"
    assert layout.parse_stored_name(names[3]) == (10, False)
    assert layout.parse_stored_name(layout.stored_snapshot(7)) == (7, True)
    assert layout.parse_stored_name("log/x.commit") is None


def test_a_changed_bit_or_a_cut_of_a_commit_is_found() -> None:
    whole = NumberedObject(layout.STORED_COMMIT_MAGIC, 3, bytes(16), {"time_ms": 1}).encode()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        with pytest.raises((CorruptLogError, StorageError), match="expected"):
            NumberedObject.decode("s3://b/x", layout.STORED_COMMIT_MAGIC, bytes(changed))
        with pytest.raises(CorruptLogError, match="expected"):
            NumberedObject.decode("s3://b/x", layout.STORED_COMMIT_MAGIC, whole[:position])


def test_a_log_of_a_later_release_is_refused_and_not_read(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(layout, "STORED_VERSION", 2)
        data = NumberedObject(layout.STORED_COMMIT_MAGIC, 2, log.log_id, {}).encode()
    ObjectClient(address).create(layout.stored_commit(2), data)
    for act in (log.poll, lambda: reread(address), lambda: log.commit(batch("w", 0))):
        with pytest.raises(StorageError, match="Install the newest release"):
            act()


def test_a_commit_under_another_number_is_damage(address: StoreAddress, log: CommitLog) -> None:
    data = NumberedObject(layout.STORED_COMMIT_MAGIC, 9, log.log_id, {}).encode()
    ObjectClient(address).create(layout.stored_commit(2), data)
    with pytest.raises(CorruptLogError, match="commit 2"):
        log.poll()


# --- a log that replaces another -----------------------------------------------------------------


def replaced(address: StoreAddress, count: int) -> CommitLog:
    client = ObjectClient(address)
    client.delete([entry.name for entry in client.list("")])
    log = new_log(address)
    filled(log, count, "new")
    return log


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_a_writer_whose_log_was_replaced_says_so_and_leaves_the_other_log_as_it_is(
    address: StoreAddress, log: CommitLog, count: int
) -> None:
    filled(log, 3)
    other = replaced(address, count)
    assert not log.is_replaced
    with pytest.raises(InvalidInputError, match="deleted, and created again"):
        log.commit(batch("w", 3))
    assert log.is_replaced
    filled(other, 6, "new")
    assert reread(address) == other.state
    assert committed(other.state) == {f"new-{number}": 1 for number in range(count + 6)}


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_a_reader_whose_log_was_replaced_says_so_within_a_minute(
    address: StoreAddress, log: CommitLog, count: int
) -> None:
    filled(log, 3)
    now = [0.0]
    reader = CommitLog(ObjectClient(address), patience_s=PATIENCE_S, elapsed=lambda: now[0])
    replaced(address, count)
    now[0] = CHECK_AFTER_S + 1
    with pytest.raises(InvalidInputError, match="deleted, and created again"):
        reader.poll()
    assert CHECK_AFTER_S <= 60


def test_all_objects_of_a_commit_log_have_its_id(
    address: StoreAddress, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 5)
    filled(log, 6)
    client = ObjectClient(address)
    ids = {
        entry.name: client.get(entry.name).data[24 : 24 + layout.STORED_TOKEN_ID]  # type: ignore[union-attr]
        for entry in client.list("")
        if not entry.name.startswith("data")
    }
    assert len(ids) == 2 + 7 + 1
    assert {*ids.values()} == {log.log_id[: layout.STORED_TOKEN_ID]}
