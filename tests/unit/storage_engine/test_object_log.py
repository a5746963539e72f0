"""A log in an object store: topics, commits, their requests, and what is left after a failure."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.errors import (
    CommitConflictError,
    CommitInDoubtError,
    CorruptLogError,
    InvalidInputError,
    OffsetOutOfRangeError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.object_store import mixed_object, object_log, staged_objects
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import Extent
from kafkalog.storage_engine.writing import staging
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, memory_address

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
WITH_DELETE = {"cleanup.policy": "delete"}


@pytest.fixture
def address() -> StoreAddress:
    address = memory_address()
    CommitLog.create(WithoutProbe(address))
    return address


@pytest.fixture
def log(address: StoreAddress) -> ObjectLog:
    log = ObjectLog(address)
    log.create_topic("t", 2)
    return log


def counted(log: ObjectLog, act: Callable[[], Any]) -> Mapping[str, int]:
    before = Counter(log.client.counts)
    act()
    return Counter(log.client.counts) - before


def rows(first: int, count: int, size: int = 1) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k%d" % number for number in numbers], pa.binary()),
            "value": pa.array([bytes([number % 251]) * size for number in numbers], pa.binary()),
            "partition": pa.array([number % 2 for number in numbers], pa.int32()),
        }
    )


def stage(
    log: ObjectLog, batch_id: int = 0, task: int = 0, attempt: int = 0, **options: Any
) -> StagedMessage:
    """Do as a task: write ten rows."""
    writer = StagedWriter(
        log,
        log.state(),
        now_ms=lambda: NOW_MS,
        writer_slug=writer_slug("q", "t"),
        batch_id=batch_id,
        spark_partition=task,
        attempt=attempt,
        **options,
    )
    writer.append("t", rows(10 * task, 10))
    return writer.finish()


def data_objects(log: ObjectLog) -> list[str]:
    return [entry.name for entry in log.client.list("data")]


def extents(log: ObjectLog) -> list[tuple[str, Extent]]:
    """Return all extents with their objects, ascending by partition and offset."""
    found = [
        (name, extent)
        for name, each in log.store_state().objects.items()
        for extent in each.extents
    ]
    return sorted(found, key=lambda each: (each[1].partition, each[1].base_offset))


# --- opening and topics --------------------------------------------------------------------------


def test_a_missing_log_is_created_unless_it_may_not_be() -> None:
    address = memory_address()
    for options in ({"read_only": True}, {"create": False}):
        with pytest.raises(InvalidInputError, match="there is no log"):
            ObjectLog(address, **options)
    ObjectLog(address).create_topic("t")
    assert ObjectLog(address, create=False).topics() == ["t"]


def test_a_topic_is_created_altered_and_deleted_for_every_process(
    address: StoreAddress, log: ObjectLog
) -> None:
    other = ObjectLog(address)
    topic = log.describe("t")
    assert other.describe("t") == topic
    assert other.create_topic("t", 9, exist_ok=True) == topic
    with pytest.raises(InvalidInputError, match="'t' exists already"):
        other.create_topic("t")
    altered = other.alter_topic("t", {"segment.bytes": "1000"})
    assert altered == log.describe("t")
    assert altered.config == {"cleanup.policy": "compact", "segment.bytes": "1000"}
    log.delete_topic("t")
    with pytest.raises(UnknownTopicError):
        other.offsets("t")
    assert other.create_topic("t").topic_id != topic.topic_id


def test_a_log_that_is_read_only_or_closed_is_not_written(
    address: StoreAddress, log: ObjectLog
) -> None:
    with pytest.raises(InvalidInputError, match="opened read-only"):
        ObjectLog(address, read_only=True).append("t", [("k", "v")])
    with log:
        log.append("t", [("k", "v")])
    for act in (
        lambda: log.append("t", [("k", "v")]),
        lambda: log.create_topic("u"),
        lambda: log.abort([]),
        lambda: log.sweep_staged(now_ms=NOW_MS),
    ):
        with pytest.raises(InvalidInputError, match="is closed"):
            act()
    assert ObjectLog(address).topics() == ["t"]


def test_a_pickled_log_is_its_address(log: ObjectLog) -> None:
    log.append("t", [("k", "v")])
    again = pickle.loads(pickle.dumps(log))
    assert again.client is not log.client
    assert again.store_state() == log.store_state()


def test_a_change_upon_an_old_state_is_made_upon_the_newest(
    address: StoreAddress, log: ObjectLog
) -> None:
    """The topic is not in the state that the writer knows: it looks before it refuses."""
    other = ObjectLog(address)
    log.create_topic("later", 1, WITH_DELETE)
    other.alter_topic("later", {"retention.ms": "9"})
    assert log.describe("later").config["retention.ms"] == "9"


# --- requests ------------------------------------------------------------------------------------


def test_a_task_is_one_put_and_a_commit_of_tasks_is_one_put_and_one_get(log: ObjectLog) -> None:
    known = log.state()
    tasks: list[StagedMessage] = []

    def write(task: int) -> None:
        writer = StagedWriter(log, known, now_ms=lambda: NOW_MS, spark_partition=task)
        writer.append("t", rows(10 * task, 10))
        tasks.append(writer.finish())

    assert [counted(log, lambda task=task: write(task)) for task in range(3)] == [{"PUT": 1}] * 3
    assert counted(log, lambda: log.commit(tasks)) == {"PUT": 1, "GET": 1}
    assert log.offsets("t") == {0: (0, 15), 1: (0, 15)}


def test_an_append_is_a_poll_an_object_and_a_commit(log: ObjectLog) -> None:
    assert counted(log, lambda: log.append("t", [("k", "v")])) == {"GET": 1 + 1, "PUT": 1 + 1}
    assert counted(log, log.state) == {"GET": 1}
    assert counted(log, lambda: log.commit([])) == {}


def test_a_writer_that_comes_second_moves_its_offsets_and_no_data(
    address: StoreAddress, log: ObjectLog
) -> None:
    other = ObjectLog(address)
    mine, others = stage(log, task=0), stage(other, task=1)
    other.commit([others], now_ms=NOW_MS)
    assert counted(log, lambda: log.commit([mine], now_ms=NOW_MS)) == {"PUT": 2, "GET": 5}
    assert [(name, e.base_offset) for name, e in extents(log) if e.partition == 0] == [
        (others.files[0].name, 0),
        (mine.files[0].name, 5),
    ]


# --- mixed objects -------------------------------------------------------------------------------


def test_an_object_has_runs_by_topic_and_partition_and_a_footer(log: ObjectLog) -> None:
    log.create_topic("u", 2)
    writer = StagedWriter(log, log.state(), now_ms=lambda: NOW_MS, writer_slug="a" * 32)
    for topic in ("u", "t", "u"):
        writer.append(topic, rows(0, 4))
    message = writer.finish()
    (file,) = message.files
    data = log.client.get(file.name).data  # type: ignore[union-attr]
    assert len(data) == file.size
    ids = {name: log.describe(name).topic_id for name in ("t", "u")}
    expected = [
        [run.topic, ids[run.topic], run.partition, run.position, run.size, run.rows, NOW_MS]
        for run in message.runs
    ]
    assert footer_of("place", data) == expected
    places = sorted([topic_id, number] for topic_id in ids.values() for number in (0, 1))
    assert [each[1:3] for each in expected] == places
    assert [each[5] for each in expected if each[0] == "u"] == [4, 4]
    end = 0
    for run in message.runs:
        assert run.position == end
        end += run.size
    with pytest.raises(CorruptLogError, match="footer"):
        footer_of("place", data[:-30] + b"x" + data[-29:])
    with pytest.raises(CorruptLogError, match="kl-mixed"):
        footer_of("place", data[:-1])


@pytest.mark.parametrize("full", [700, 1 << 20])
def test_an_object_that_is_full_is_followed_by_the_next(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    """Whole batches go in, each run begins at offset 0, and the order of rows stays."""
    monkeypatch.setattr(staging, "_GATHER_SIZE_MIN", 1)
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_objects, "_FULL_SIZE", full)
    monkeypatch.setattr(mixed_object, "OBJECT_SIZE_MAX", 1000)
    writer = StagedWriter(log, log.state(), now_ms=lambda: NOW_MS, batch_size=300)
    for first in range(0, 60, 20):
        writer.append("t", rows(first, 20, size=40))
    message = writer.finish()
    assert len(message.files) > 2
    assert sum(run.rows for run in message.runs) == 60
    for number, file in enumerate(message.files):
        runs = [run for run in message.runs if run.file == number]
        assert 0 < sum(run.size for run in runs) <= 1000
        data = log.client.get(file.name).data  # type: ignore[union-attr]
        for run in runs:
            position, offset = run.position, 0
            while position < run.position + run.size:
                header = parse_header(data, position)
                assert header.base_offset == offset
                position, offset = position + header.size, offset + header.records_count
            assert (position, offset) == (run.position + run.size, run.rows)
    log.commit([message], now_ms=NOW_MS)
    ends = {0: 0, 1: 0}
    for _, extent in extents(log):
        assert extent.base_offset == ends[extent.partition]
        ends[extent.partition] = extent.next_offset
    assert ends == {0: 30, 1: 30}


def test_a_failed_task_deletes_its_objects(log: ObjectLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE_MIN", 1)
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_objects, "_FULL_SIZE", 1)
    writer = StagedWriter(log, log.state(), now_ms=lambda: NOW_MS)
    writer.append("t", rows(0, 10))
    writer.append("t", rows(0, 10))
    writer._wait()
    assert len(data_objects(log)) == 2
    writer.discard()
    assert data_objects(log) == []


# --- commits that come again ---------------------------------------------------------------------


def test_a_batch_that_comes_again_is_dropped_and_its_objects_are_deleted(log: ObjectLog) -> None:
    writer = Writer("q", "t", 7)
    first = stage(log, 7)
    assert not log.commit([first], writer=writer, now_ms=NOW_MS).skipped
    again = stage(log, 7, attempt=1)
    assert log.commit([again], writer=writer, now_ms=NOW_MS).skipped
    assert log.commit([first], writer=writer, now_ms=NOW_MS).skipped
    assert data_objects(log) == [first.files[0].name]
    assert log.offsets("t") == {0: (0, 5), 1: (0, 5)}


def test_an_older_batch_is_refused_unless_the_writer_is_reset(log: ObjectLog) -> None:
    log.commit([stage(log, 7)], writer=Writer("q", "t", 7), now_ms=NOW_MS)
    older = stage(log, 6)
    with pytest.raises(CommitConflictError, match="committed 7"):
        log.commit([older], writer=Writer("q", "t", 6), now_ms=NOW_MS)
    result = log.commit([older], writer=Writer("q", "t", 6), reset_writer=True, now_ms=NOW_MS)
    assert result.offsets == {("t", 0): (5, 10), ("t", 1): (5, 10)}


def test_a_message_without_a_writer_lands_once_too(log: ObjectLog) -> None:
    message = stage(log)
    log.commit([message], now_ms=NOW_MS)
    assert log.commit([message], now_ms=NOW_MS).skipped
    assert log.offsets("t") == {0: (0, 5), 1: (0, 5)}


def test_topics_of_rows_are_created_once_by_two_tasks(address: StoreAddress) -> None:
    log = ObjectLog(address)
    new = NewTopic(2, {"cleanup.policy": "compact"})
    tasks = [stage(log, task=task, new_topic=new) for task in range(2)]
    with pytest.raises(InvalidInputError, match="is not to be created"):
        log.commit(tasks, now_ms=NOW_MS)
    assert log.commit(tasks, create=new, now_ms=NOW_MS).rows == 20
    assert log.offsets("t") == {0: (0, 10), 1: (0, 10)}


def test_a_batch_for_a_topic_that_is_gone_is_refused(log: ObjectLog) -> None:
    message = stage(log)
    log.delete_topic("t")
    log.create_topic("t", 2)
    with pytest.raises(StorageError, match="was deleted or created again"):
        log.commit([message], now_ms=NOW_MS)


def test_a_row_without_a_key_is_refused_once_the_topic_is_compacted(
    address: StoreAddress, log: ObjectLog
) -> None:
    log.create_topic("d", 1, WITH_DELETE)
    other = ObjectLog(address)
    writer = StagedWriter(None, log.state(), now_ms=lambda: NOW_MS)
    writer.append("d", pa.RecordBatch.from_pydict({"value": pa.array([b"v"], pa.binary())}))
    message = writer.finish()
    other.alter_topic("d", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidInputError, match="was made compacted"):
        log.commit([message], now_ms=NOW_MS)
    assert data_objects(log) == []


def test_a_message_that_names_another_object_is_refused(log: ObjectLog) -> None:
    message = stage(log)
    (file,) = message.files
    for name in ("kl-log", "log/1.commit", "data/1/../../x"):
        wrong = StagedMessage(
            0, message.topic_ids, (type(file)(name, 1, 1),), message.runs, message.rows
        )
        with pytest.raises(InvalidInputError, match="is not an object of records"):
            log.commit([wrong])
        with pytest.raises(InvalidInputError, match="is not an object of records"):
            log.abort([wrong])


# --- failures ------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(
    address: StoreAddress, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> tuple[ObjectLog, SpoiledClient]:
    """Return a log whose client can be spoiled."""
    monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    found = ObjectLog(address, create=False)
    client = found.client
    assert isinstance(client, SpoiledClient)
    return found, client


LOST = (Fault.ANSWER_LOST, Fault.REQUEST_LOST, Fault.DONE_BUT_500)
ALL_FAIL = dict.fromkeys(range(2, 60), Spoil.FAILED)


@pytest.mark.parametrize("first", [Spoil.ANSWER_LOST, Spoil.FAILED, Spoil.LANDS_LATE])
def test_after_a_doubt_a_retry_lands_once(
    spoiled: tuple[ObjectLog, SpoiledClient], first: Spoil
) -> None:
    log, client = spoiled
    message, writer = stage(log, 3), Writer("q", "t", 3)
    client.spoil({1: first, **ALL_FAIL})
    with pytest.raises(CommitInDoubtError):
        log.commit([message], writer=writer, now_ms=NOW_MS)
    client.spoil({})
    result = log.commit([message], writer=writer, now_ms=NOW_MS)
    client.late()
    assert result.skipped == (first is Spoil.ANSWER_LOST)
    assert log.offsets("t") == {0: (0, 5), 1: (0, 5)}
    assert data_objects(log) == [message.files[0].name]


@pytest.mark.parametrize("is_another", [True, False], ids=["another process", "the same"])
@pytest.mark.parametrize("has_writer", [True, False])
@pytest.mark.parametrize("first", [Spoil.ANSWER_LOST, Spoil.FAILED, Spoil.LANDS_LATE])
def test_an_abort_after_a_doubt_keeps_what_has_landed_and_nothing_lands_later(
    address: StoreAddress,
    spoiled: tuple[ObjectLog, SpoiledClient],
    first: Spoil,
    has_writer: bool,
    is_another: bool,
) -> None:
    log, client = spoiled
    message = stage(log, 3)
    client.spoil({1: first, **ALL_FAIL})
    with pytest.raises(CommitInDoubtError):
        log.commit([message], writer=Writer("q", "t", 3) if has_writer else None, now_ms=NOW_MS)
    client.spoil({})
    aborting = ObjectLog(address) if is_another else log
    is_undone = aborting.abort([message, None], writer=Writer("q", "t", 3) if has_writer else None)
    client.late()
    assert is_undone == (first is not Spoil.ANSWER_LOST)
    end = 0 if is_undone else 5
    assert log.offsets("t") == {0: (0, end), 1: (0, end)}
    assert data_objects(log) == ([] if is_undone else [message.files[0].name])


def test_an_abort_keeps_what_is_committed(log: ObjectLog) -> None:
    message, writer = stage(log, 3), Writer("q", "t", 3)
    log.commit([message], writer=writer, now_ms=NOW_MS)
    assert not log.abort([message], writer=writer, now_ms=NOW_MS)
    assert not log.abort([message], now_ms=NOW_MS)
    other = stage(log, 3, attempt=1)
    assert not log.abort([other], writer=writer, now_ms=NOW_MS)
    assert log.abort([other], writer=Writer("q", "t", 4), now_ms=NOW_MS)
    assert data_objects(log) == [message.files[0].name]


REQUESTS = 20
"""More than a batch of these tests sends."""


@pytest.mark.parametrize("spoil", Spoil)
def test_a_batch_whose_kth_request_is_spoiled_is_there_once_with_its_objects(
    address: StoreAddress, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    """Two tasks, a commit, an abort after a failure, and then the batch again in a new process."""
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    calm = ObjectLog(address)
    calm.create_topic("t", 2)
    for at in range(1, REQUESTS):
        before = calm.offsets("t")
        with monkeypatch.context() as patch:
            patch.setattr(object_log, "ObjectClient", SpoiledClient)
            log = ObjectLog(address)
        client = log.client
        assert isinstance(client, SpoiledClient)
        client.spoil({at: spoil})
        with suppress(Killed):
            attempt(log, at)
        client.spoil({})
        attempt(ObjectLog(address), at)
        client.late()
        assert calm.offsets("t") == {n: (start, end + 10) for n, (start, end) in before.items()}
        check_objects(calm)
        if not client.is_spoiled:
            assert at > 6
            return
    pytest.fail("a batch sends more requests than the test spoils")


def attempt(log: ObjectLog, batch_id: int) -> None:
    """Do as Spark: run two tasks and commit them; abort when that fails."""
    writer = Writer("q", "t", batch_id)
    tasks: list[StagedMessage] = []
    try:
        for task in range(2):
            tasks.append(stage(log, batch_id, task))
        log.commit(tasks, writer=writer, now_ms=NOW_MS)
    except StorageError:
        with suppress(StorageError):
            log.abort(tasks, writer=writer, now_ms=NOW_MS)


def check_objects(log: ObjectLog) -> None:
    """Compare each object that a commit names with what it has."""
    for name, known in log.store_state().objects.items():
        data = log.client.get(name)
        assert data is not None
        assert len(data.data) == known.size
        assert [run[2:6] for run in footer_of(name, data.data)] == [
            [each.partition, each.position, each.size, each.next_offset - each.base_offset]
            for each in known.extents
        ]


# --- deleting ------------------------------------------------------------------------------------


def test_records_are_deleted_up_to_an_offset(log: ObjectLog) -> None:
    log.create_topic("d", 1, WITH_DELETE)
    log.append("d", [("k", "v")] * 4)
    log.append("d", [("k", "v")] * 4)
    first, second = (name for name, _ in extents(log))
    assert log.delete_records("d", 0, 5) == 5
    assert log.delete_records("d", 0, 2) == 5
    assert log.offsets("d") == {0: (5, 8)}
    assert (set(log.store_state().objects), set(log.store_state().dropped)) == ({second}, {first})
    for before in (9, -2):
        with pytest.raises(OffsetOutOfRangeError):
            log.delete_records("d", 0, before)
    with pytest.raises(InvalidInputError, match=r"cleanup\.policy has delete"):
        log.delete_records("t", 0, 0)
    assert log.delete_records("d", 0, -1) == 8
    assert not log.store_state().objects


def test_retention_by_time_and_by_size_takes_whole_segments(log: ObjectLog) -> None:
    daily = {**WITH_DELETE, "segment.ms": str(DAY_MS - 1)}
    log.create_topic("time", 1, {**daily, "retention.ms": str(2 * DAY_MS)})
    log.create_topic("size", 1, daily)
    for day in range(4):
        for topic in ("time", "size", "t"):
            log.append(topic, [("k", "v" * 50)] * 2, now_ms=NOW_MS + day * DAY_MS)
    before = log.offsets("t")
    topic_id = log.describe("size").topic_id
    size = sum(extent.size for _, extent in extents(log) if extent.topic_id == topic_id)
    log.alter_topic("size", {"retention.bytes": str(size // 4)})
    stats = log.apply_retention(now_ms=NOW_MS + 3 * DAY_MS + 1)
    assert [(each.topic, each.log_start_offset, each.segments) for each in stats] == [
        ("size", 6, 3),
        ("time", 4, 2),
    ]
    assert log.offsets("time") == {0: (4, 8)}
    assert log.offsets("t") == before
    assert len(log.store_state().dropped) == 5
    assert log.apply_retention("size", now_ms=NOW_MS + 3 * DAY_MS + 1) == []
    with pytest.raises(UnknownTopicError):
        log.apply_retention("no")


def test_an_object_goes_with_the_last_of_its_topics_and_then_the_topic_is_forgotten(
    log: ObjectLog,
) -> None:
    log.create_topic("u", 2)
    writer = StagedWriter(log, log.state(), now_ms=lambda: NOW_MS)
    for topic in ("t", "u"):
        writer.append(topic, rows(0, 4))
    log.commit([writer.finish()], now_ms=NOW_MS)
    log.delete_topic("t", now_ms=NOW_MS)
    assert len(log.store_state().objects) == 1
    assert len(log.state().deleting) == 1
    log.delete_topic("u", now_ms=NOW_MS)
    assert (len(log.store_state().objects), len(log.store_state().dropped)) == (0, 1)
    assert [deleted.name for deleted in log.state().deleting.values()] == ["u"]


def test_a_sweep_deletes_old_orphans_and_no_commit_can_name_them_later(
    address: StoreAddress, log: ObjectLog
) -> None:
    kept, orphan = stage(log, 1), stage(log, 2)
    log.commit([kept], now_ms=NOW_MS)
    modified = max(entry.modified_ms for entry in log.client.list("data"))
    assert log.sweep_staged(now_ms=modified + STAGED_RETENTION_MS) == 0
    young = stage(log, 3)
    number = log.store_state().number
    assert ObjectLog(address).sweep_staged(now_ms=modified + STAGED_RETENTION_MS + DAY_MS) == 2
    assert data_objects(log) == [kept.files[0].name]
    for message in (orphan, young):
        with pytest.raises(StorageError, match="Run the batch again"):
            log.commit([message], now_ms=NOW_MS)
    assert log.store_state().swept == number
    log.commit([stage(log, 4)], now_ms=NOW_MS)
    assert log.offsets("t") == {0: (0, 10), 1: (0, 10)}
    assert log.sweep_staged(now_ms=modified) == 0


# --- on S3 ---------------------------------------------------------------------------------------


def test_an_address_alone_opens_a_log_where_the_environment_says_the_rest(
    s3_address: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", WithoutProbe)
    assert s3_address.endpoint is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with kafkalog.open(str(s3_address)) as log:
        log.create_topic("t", 2)
        log.append("t", [("k1", "v"), ("k2", "v")])
    assert sum(end for _, end in ObjectLog(s3_address, read_only=True).offsets("t").values()) == 2


def test_writers_of_many_processes_lose_nothing_and_double_nothing_on_s3(
    s3_address: StoreAddress, store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a client and a state of its own, as a process has."""
    monkeypatch.setattr(object_log, "ObjectClient", WithoutProbe)
    ObjectLog(s3_address).create_topic("t", 2)
    store_proxy.reset(*(Rule(fault, "PUT", ".commit", after=5 * n) for n, fault in enumerate(LOST)))

    def write(name: str) -> None:
        own = ObjectLog(s3_address)
        for batch_id in range(6):
            writer = Writer(name, "t", batch_id)
            message = stage(own, batch_id)
            own.commit([message], writer=writer, now_ms=NOW_MS)
            assert own.commit([message], writer=writer, now_ms=NOW_MS).skipped

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(write, f"q{number}") for number in range(3)]:
            done.result()
    log = ObjectLog(s3_address)
    assert log.offsets("t") == {0: (0, 90), 1: (0, 90)}
    ends = {0: 0, 1: 0}
    for _, extent in extents(log):
        assert extent.base_offset == ends[extent.partition]
        ends[extent.partition] = extent.next_offset
    assert ends == {0: 90, 1: 90}
    assert len(data_objects(log)) == 18
