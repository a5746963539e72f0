"""Writes of Spark into a log in an object store: exactly once, in few requests, without secrets."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError
from kafkalog.sink.shared_log import shared_log
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import requests_sent, shared_client
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer
from tests.unit.sink.spark_write import SparkWrite
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, memory_address

ROWS = [{"key": f"k{number}", "value": f"v{number}"} for number in range(6)]


@pytest.fixture
def address() -> StoreAddress:
    address = memory_address()
    CommitLog.create(WithoutProbe(address))
    return address


@pytest.fixture
def write(address: StoreAddress) -> SparkWrite:
    return SparkWrite(str(address))  # type: ignore[arg-type]


def end_of(address: StoreAddress, topic: str = "t") -> int:
    return sum(end for _, end in ObjectLog(address, read_only=True).offsets(topic).values())


def data_objects(address: StoreAddress) -> int:
    return len(list(ObjectLog(address, read_only=True).client.list("data")))


def counted(address: StoreAddress, act: Callable[[], Any]) -> Mapping[str, int]:
    """Return the requests of this process: of the driver's log, and of tasks."""
    clients = [shared_log(address).client, shared_client(address)]
    before = [Counter(client.counts) for client in clients]
    act()
    after = [Counter(client.counts) for client in clients]
    return sum((now - then for now, then in zip(after, before, strict=True)), Counter())


def test_micro_batches_land_once(address: StoreAddress, write: SparkWrite) -> None:
    write.micro_batch([ROWS[:3], ROWS[3:]], 0)
    write.micro_batch([ROWS], 1)
    assert end_of(address) == 12
    write.micro_batch([ROWS], 1)
    assert (end_of(address), data_objects(address)) == (12, 3)
    with pytest.raises(CommitConflictError, match="older than the log"):
        write.micro_batch([ROWS], 0)
    assert (end_of(address), data_objects(address)) == (12, 3)


def test_a_query_whose_log_was_replaced_fails_once_and_then_writes_to_the_other_log(
    address: StoreAddress, write: SparkWrite
) -> None:
    write.micro_batch([ROWS], 0)
    client = ObjectLog(address).client
    client.delete([entry.name for entry in client.list("")])
    CommitLog.create(WithoutProbe(address))
    with pytest.raises(InvalidInputError, match="deleted, and created again"):
        write.micro_batch([ROWS], 1)
    write.micro_batch([ROWS], 1)
    assert end_of(address) == 6


def test_nothing_is_visible_before_the_commit_and_an_abort_deletes_it(
    address: StoreAddress, write: SparkWrite
) -> None:
    messages = [write.attempt(ROWS[:3]), write.attempt(ROWS[3:], partition=1)]
    assert (end_of(address), data_objects(address)) == (0, 2)
    write.abort(messages)
    assert (end_of(address), data_objects(address)) == (0, 0)
    write.micro_batch([ROWS], 0)
    write.abort(messages)
    assert end_of(address) == 6


def test_a_failed_commit_is_aborted_and_the_batch_comes_again(
    address: StoreAddress, write: SparkWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("no")

    messages = [write.attempt(ROWS)]
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no"):
        patch.setattr(ObjectLog, "commit", fail)
        write.commit(messages)
    assert (end_of(address), data_objects(address)) == (0, 0)
    write.micro_batch([ROWS])
    assert (end_of(address), data_objects(address)) == (6, 1)


def test_a_task_is_a_put_and_a_commit_a_put_and_a_get(
    address: StoreAddress, write: SparkWrite
) -> None:
    write.micro_batch([ROWS], 0)
    writer = write.writer()
    messages: list[Any] = []

    def task() -> None:
        messages.append(write.attempt(ROWS, batch_id=1, partition=len(messages), writer=writer))

    for _ in range(2):
        assert counted(address, task) == {"PUT": 1}
    assert counted(address, lambda: writer.commit(messages, 1)) == {"GET": 1, "PUT": 1}
    assert end_of(address) == 18


def test_rows_name_their_topics_and_the_commit_creates_them(
    address: StoreAddress, write: SparkWrite
) -> None:
    write.options = {"numPartitions": "3"}
    write.names = ("topic", "key", "value")
    rows = [{"topic": topic, "key": "k", "value": "v"} for topic in ("a", "b", "a")]
    write.micro_batch([rows[:2], rows[2:]])
    log = ObjectLog(address)
    assert {name: len(log.describe(name).partitions) for name in log.topics()} == {"a": 3, "b": 3}
    assert (end_of(address, "a"), end_of(address, "b")) == (2, 1)


def test_a_batch_write_is_once_by_its_version(address: StoreAddress, write: SparkWrite) -> None:
    write.options = {"topic": "t", "txnAppId": "job", "txnVersion": "3"}
    for _ in range(2):
        write.micro_batch([ROWS])
    assert (end_of(address), data_objects(address)) == (6, 1)


def test_options_of_a_store_are_taken_and_others_refused(address: StoreAddress) -> None:
    with pytest.raises(InvalidInputError, match=r"'store\.region': path '/log' names no object"):
        SparkWrite("/log", {"topic": "t", "store.region": "x"}).writer()  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="only s3:// has regions"):
        SparkWrite(str(address), {"topic": "t", "store.region": "x"}).writer()  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"'store\.secret' (is|of) "):
        SparkWrite(str(address), {"topic": "t", "store.secret": "x"}).writer()  # type: ignore[arg-type]


@pytest.fixture
def write_on_s3(s3_address: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> SparkWrite:
    monkeypatch.setattr(object_log, "ObjectClient", WithoutProbe)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    options = {
        "topic": "t",
        "store.endpoint": s3_address.endpoint or "",
        "store.region": "us-east-1",
        "store.allow_http": "true",
    }
    return SparkWrite(str(s3_address), options)  # type: ignore[arg-type]


def test_on_s3_a_micro_batch_lands_once_after_any_fault_of_its_commit(
    s3_address: StoreAddress, write_on_s3: SparkWrite, store_proxy: StoreProxy
) -> None:
    write_on_s3.micro_batch([ROWS], 0)
    for batch_id, fault in enumerate(
        (Fault.ANSWER_LOST, Fault.REQUEST_LOST, Fault.DONE_BUT_500), 1
    ):
        messages = [write_on_s3.attempt(ROWS, batch_id=batch_id)]
        store_proxy.reset(Rule(fault, "PUT", ".commit"))
        write_on_s3.commit(messages, batch_id)
        store_proxy.reset()
        assert end_of(s3_address) == 6 * (batch_id + 1)
    assert data_objects(s3_address) == 4


def test_no_secret_is_in_what_spark_gets(
    s3_address: StoreAddress,
    write_on_s3: SparkWrite,
    store_server: StoreServer,
    store_proxy: StoreProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    writer = write_on_s3.writer()
    message = write_on_s3.attempt(ROWS, writer=writer)
    store_proxy.reset(Rule(Fault.REFUSED_409, "PUT", ".commit", times=99))
    with pytest.raises(StorageError) as fault:
        shared_log(s3_address).commit([message.staged])  # type: ignore[list-item]
    seen = [
        pickle.dumps(each)
        for each in (writer, message, shared_log(s3_address), str(fault.value), caplog.text)
    ]
    assert all(store_server.secret.encode() not in each for each in seen)


def test_a_commit_logs_the_requests_of_the_driver_and_of_the_tasks(
    address: StoreAddress, write: SparkWrite, caplog: pytest.LogCaptureFixture
) -> None:
    write.micro_batch([ROWS], 0)
    caplog.set_level(logging.INFO, "kafkalog.sink")
    before = requests_sent(address)
    write.micro_batch([ROWS[:3], ROWS[3:]], 1)
    sent = requests_sent(address) - before
    said = caplog.messages[-1]
    assert sent == {"GET": 4, "PUT": 3}  # a writer polls: two have planned, a third one commits
    assert said == (
        f"{address}: batch 1 of t: 6 rows; requests of the driver: GET 3, PUT 1; of 2 tasks: PUT 2"
    )
    write.micro_batch([ROWS], 1)
    assert "batch 1 of t: committed already; " in caplog.messages[-1]
