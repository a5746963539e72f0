"""Single records: gathered, committed many at a time, each once, whatever fails in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.errors import (
    CommitInDoubtError,
    InvalidInputError,
    KafkaLogError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.log import KafkaLog
from kafkalog.schema import HEADERS
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.records.murmur2 import partition_of
from kafkalog.storage_engine.writing import record_producer
from kafkalog.storage_engine.writing.sent_records import RecordMetadata
from tests.unit.conftest import DIRECTORY
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.faults import Acts, LyingPages
from tests.unit.storage_engine.test_adopt import broker_root, take

NEVER_MS = 2**31 - 1
WAIT_S = 60
"""How long a test waits for what is to come: not to be reached."""


in_a_directory = pytest.mark.parametrize("place", [DIRECTORY], indirect=True)


@pytest.fixture
def log(place: Path | str) -> Iterator[KafkaLog]:
    with kafkalog.open(place) as log:
        log.create_topic("t", 4)
        yield log


def rows(log: KafkaLog, topic: str = "t") -> list[dict[str, Any]]:
    return [
        row
        for partition in log.offsets(topic)
        for found in log.read(topic, partition, include_headers=True)
        for row in found.to_pylist()
    ]


def keys(log: KafkaLog) -> list[str]:
    return [row["key"].decode() for row in rows(log)]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what is to become true."""
    for _ in range(100 * WAIT_S):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not become true")


def commits(log: KafkaLog) -> int:
    return log._log.state().number


# --- what is written -----------------------------------------------------------------------------


def test_records_are_written_as_they_were_sent(log: KafkaLog) -> None:
    with log.producer("t") as producer:
        producer.send("apple", b"3")
        producer.send(b"apple", None)
        headers = {"by": "ann", "none": None}
        producer.send("pear", "7", headers=headers, timestamp=1_700_000_000_000, partition=3)
    first, second, third = sorted(rows(log), key=lambda row: (row["key"], row["offset"]))
    assert (first["key"], first["value"], first["headers"]) == (b"apple", b"3", None)
    assert (second["key"], second["value"]) == (b"apple", None)
    assert (third["value"], third["partition"]) == (b"7", 3)
    assert third["timestamp"].timestamp() == 1_700_000_000
    assert third["headers"] == [{"key": "by", "value": b"ann"}, {"key": "none", "value": None}]


def test_headers_are_sent_as_they_are_read(log: KafkaLog) -> None:
    headers = [{"key": "by", "value": b"ann"}, {"key": "by", "value": None}]
    with log.producer("t") as producer:
        producer.send("k", "v", headers=headers)
    assert [row["headers"] for row in rows(log)] == [headers]


def test_keys_go_where_an_append_sends_them(log: KafkaLog) -> None:
    pairs = [(f"k{n}", "v") for n in range(50)]
    log.append("t", pairs)
    before = [(row["partition"], row["key"]) for row in rows(log)]
    log.create_topic("u", 4)
    with log.producer("u") as producer:
        for key, value in pairs:
            producer.send(key, value)
    assert [(row["partition"], row["key"]) for row in rows(log, "u")] == before


def test_a_record_has_the_time_of_its_sending(log: KafkaLog) -> None:
    times = itertools.count(1_700_000_000_000)
    with record_producer.Producer(
        log._log, "t", batch_size=1 << 20, linger_ms=NEVER_MS, clock=times.__next__
    ) as producer:
        for number in range(5):
            producer.send("k", str(number))
    found = [int(row["timestamp"].timestamp() * 1000) for row in rows(log)]
    assert found == [1_700_000_000_000 + number for number in range(5)]


@pytest.mark.parametrize("type_", ["CreateTime", "LogAppendTime"])
def test_a_result_tells_where_its_record_is(log: KafkaLog, type_: str) -> None:
    log.alter_topic("t", {"message.timestamp.type": type_})
    with log.producer("t", batch_size=500) as producer:
        sent = {f"k{n}": producer.send(f"k{n}", "v") for n in range(100)}
        sent["given"] = producer.send("given", "v", partition=2, timestamp=1_700_000_000_000)
    told = {key: record.result(0) for key, record in sent.items()}
    found = {
        row["key"].decode(): RecordMetadata(
            "t", row["partition"], row["offset"], round(row["timestamp"].timestamp() * 1000)
        )
        for row in rows(log)
    }
    assert told == found
    assert all(record.done() for record in sent.values())


def test_keyless_records_of_a_commit_share_a_partition_and_commits_take_turns(
    log: KafkaLog,
) -> None:
    log.create_topic("events", 3, {"cleanup.policy": "delete"})
    with log.producer("events", linger_ms=NEVER_MS) as producer:
        chosen = []
        for _ in range(6):
            sent = [producer.send(None, "v") for _ in range(4)]
            producer.flush()
            (partition,) = {record.result().partition for record in sent}
            chosen.append(partition)
    assert chosen[:3] == chosen[3:]
    assert set(chosen) == {0, 1, 2}


# --- when it is written --------------------------------------------------------------------------


def test_many_records_are_one_commit(log: KafkaLog) -> None:
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        before = commits(log)
        for number in range(1000):
            producer.send(f"k{number}", "v")
        assert commits(log) == before
        producer.flush()
        assert commits(log) == before + 1
    assert len(rows(log)) == 1000


def test_nothing_is_committed_before_it_is_due(log: KafkaLog) -> None:
    producer = log.producer("t", linger_ms=NEVER_MS)
    sent = producer.send("k", "v")
    with pytest.raises(TimeoutError, match=r"topic 't': not committed within 0.2 s"):
        sent.result(0.2)
    assert not sent.done()
    assert rows(log) == []


@pytest.mark.parametrize("linger_ms", [0, 5, 50.5])
def test_a_lone_record_is_committed_with_no_other_after_it(log: KafkaLog, linger_ms: float) -> None:
    with log.producer("t", linger_ms=linger_ms) as producer:
        producer.send("k", "v").result(WAIT_S)
        assert keys(log) == ["k"]


def test_it_is_the_oldest_record_that_lingers(log: KafkaLog) -> None:
    with log.producer("t", linger_ms=200) as producer:
        first = producer.send("first", "v")

        def is_done() -> bool:
            producer.send("k", "v")
            return first.done()

        until(is_done)  # never, if each record began to wait anew


def test_a_full_commit_does_not_linger(log: KafkaLog) -> None:
    with log.producer("t", linger_ms=NEVER_MS, batch_size=1000) as producer:
        producer.send("first", "v" * 500)
        producer.send("second", "v" * 500).result(WAIT_S)
        late = producer.send("third", "v")
        assert not late.done()


def test_a_batch_size_of_0_commits_each_record_alone(log: KafkaLog) -> None:
    with log.producer("t", batch_size=0, linger_ms=NEVER_MS) as producer:
        before = commits(log)
        for number in range(5):
            producer.send(f"k{number}", "v")
        producer.flush()
        assert commits(log) == before + 5


def test_a_flush_of_nothing_commits_nothing(log: KafkaLog) -> None:
    before = commits(log)
    with log.producer("t") as producer:
        producer.flush()
    assert commits(log) == before


@in_a_directory
def test_a_sender_that_is_faster_than_the_disk_waits(log: KafkaLog) -> None:
    producer = log.producer("t", batch_size=2000, linger_ms=NEVER_MS)
    sent = []

    def send_all() -> None:
        for number in range(200):
            sent.append(producer.send("k", f"{number:04}" + "v" * 96))

    sender = threading.Thread(target=send_all)
    with directory_log_of(log).transaction():  # no commit gets past the lock
        sender.start()
        sender.join(0.5)
        assert sender.is_alive()
        assert len(sent) <= 2 * 2000 // 100
    sender.join(WAIT_S)
    producer.close()
    assert [int(row["value"][:4]) for row in rows(log)] == list(range(200))


@in_a_directory
def test_a_sender_that_waits_is_told_of_the_end(log: KafkaLog) -> None:
    producer = log.producer("t", batch_size=0)
    taken, raised = [], []

    def send_all() -> None:
        try:
            for number in range(100):
                taken.append(producer.send("k", str(number)))
        except InvalidInputError as fault:
            raised.append(str(fault))

    sender, closer = threading.Thread(target=send_all), threading.Thread(target=producer.close)
    with directory_log_of(log).transaction():
        sender.start()
        until(lambda: len(taken) == 2)
        closer.start()
        sender.join(WAIT_S)
        assert raised == ["the producer of topic 't' is closed: make another one"]
    closer.join(WAIT_S)
    assert [row["value"] for row in rows(log)] == [b"%d" % n for n in range(len(taken))]


def test_many_threads_send_each_in_its_order(log: KafkaLog) -> None:
    producer = log.producer("t", batch_size=3000)

    def send_all(thread: int) -> None:
        for number in range(300):
            producer.send(f"{thread}", str(number))

    threads = [threading.Thread(target=send_all, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    producer.close()
    for thread_key in map(b"%d".__mod__, range(8)):
        values = [int(row["value"]) for row in rows(log) if row["key"] == thread_key]
        assert values == list(range(300))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"key": None},
        {"value": b"v" * 3000},
        {"headers": [("h", b"v" * 3000)]},
        {"partition": 4},
        {"partition": -1},
        {"partition": 2**40},
        {"timestamp": -1},
        {"timestamp": 1_600_000_000_000},
        {"timestamp": 2**62},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_append_refuses_send_refuses_at_once_in_its_words(
    log: KafkaLog, fields: dict[str, Any]
) -> None:
    limits = {"max.message.bytes": "2000", "message.timestamp.before.max.ms": "86400000"}
    log.alter_topic("t", limits)
    record = {"key": b"k", "value": b"v", **fields}
    types = {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS}
    columns = {name: pa.array([one], types.get(name, pa.int64())) for name, one in record.items()}
    with pytest.raises(InvalidInputError) as of_append:
        log.append("t", pa.RecordBatch.from_pydict(columns), now_ms=1_700_000_000_000)
    clock = lambda: 1_700_000_000_000  # noqa: E731
    with record_producer.Producer(
        log._log, "t", batch_size=1 << 20, linger_ms=NEVER_MS, clock=clock
    ) as producer:
        producer.send("before", "v")
        with pytest.raises(InvalidInputError) as of_send:
            producer.send(**record)
        producer.send("after", "v")
    assert str(of_send.value) == str(of_append.value)
    assert sorted(keys(log)) == ["after", "before"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"key": 3}, "int is neither bytes nor text"),
        ({"value": 3.5}, "float is neither bytes nor text"),
        ({"value": "\ud800"}, "surrogates not allowed"),
        ({"headers": [("h", 3)]}, "int is neither bytes nor text"),
        ({"headers": {b"h": "v"}}, "a header's key is text, not bytes"),
        ({"key": {"key": "k", "value": "v"}}, 'dict is neither.* Give send."k1", "v1".'),
        ({"value": ("k", "v")}, "tuple is neither bytes nor text"),
        ({"value": memoryview(b"v")}, "memoryview is neither bytes nor text"),
        ({"headers": ["h"]}, "a header is a pair, not 'h': give"),
        ({"headers": ["ab"]}, "a header is a pair, not 'ab': give"),
        ({"headers": ("ab", "cd")}, "a header is a pair, not 'ab': give"),
        ({"headers": "ab"}, "str is not a list of headers: give"),
        ({"headers": b""}, "bytes is not a list of headers: give"),
        ({"headers": [{"by": "ann"}]}, "a header is a pair, not {'by': 'ann'}: give"),
        ({"headers": {"key": "by", "value": "ann"}}, "one header must be in a list"),
        ({"headers": 3}, "not iterable"),
        ({"timestamp": "now"}, "str is not a whole number"),
        ({"partition": 1.0}, "float is not a whole number"),
        ({"timestamp": 2**64}, "takes more than 64 bits"),
        ({"partition": -(2**64)}, "takes more than 64 bits"),
    ],
)
def test_another_type_is_refused_at_once(log: KafkaLog, fields: dict[str, Any], told: str) -> None:
    with (
        log.producer("t", linger_ms=NEVER_MS) as producer,
        pytest.raises(InvalidInputError, match=f"record: expected a key and a value.*{told}"),
    ):
        producer.send(**{"key": "k", "value": "v", **fields})


def test_a_large_record_that_compresses_is_taken(log: KafkaLog) -> None:
    log.alter_topic("t", {"max.message.bytes": "2000", "compression.type": "zstd"})
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        producer.send("small", "v")
        producer.send("large", "v" * 100_000)
        with pytest.raises(InvalidInputError, match=r"raise max.message.bytes"):
            producer.send("random", os.urandom(100_000))
    assert sorted(keys(log)) == ["large", "small"]


def test_a_partition_that_another_broker_has_takes_nothing(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config={"t": {"cleanup.policy": "delete"}})
    with kafkalog.open(root) as log:
        with log.producer("t", linger_ms=NEVER_MS) as producer:
            with pytest.raises(InvalidInputError, match=r"t-1: .* another broker has it"):
                producer.send("k", "v", partition=1)
            for number in range(20):
                if partition_of(b"%d" % number, 3) != 1:
                    producer.send(b"%d" % number, "v")
                    continue
                with pytest.raises(InvalidInputError, match=r"t-1: .* another broker has it"):
                    producer.send(b"%d" % number, "v")
            producer.flush()
            sent = []
            for _ in range(2):
                sent.append(producer.send(None, "v"))
                producer.flush()
        assert {record.result().partition for record in sent} == {0, 2}


@pytest.mark.parametrize("size", [-1, 2**30 + 1, 1.5, "16384", None])
def test_a_batch_size_out_of_range_is_refused(log: KafkaLog, size: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"batch.size \(batch_size\): expected 0 to"):
        log.producer("t", batch_size=size)


@pytest.mark.parametrize("linger_ms", [-1, 2**31, float("nan"), "5", None])
def test_a_linger_out_of_range_is_refused(log: KafkaLog, linger_ms: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"linger.ms \(linger_ms\): expected 0 to"):
        log.producer("t", linger_ms=linger_ms)


@in_a_directory
def test_a_producer_needs_a_topic_that_can_be_written_to(log: KafkaLog, tmp_path: Path) -> None:
    with pytest.raises(UnknownTopicError, match="topic 'x' does not exist"):
        log.producer("x")
    with (
        kafkalog.open(log.root, read_only=True) as reader,
        pytest.raises(InvalidInputError, match="opened read-only"),
    ):
        reader.producer("t")
    made = BrokerRoot(tmp_path / "kafka-logs")
    made.partition("orders-0")
    with (
        kafkalog.open(made.path) as brokers,
        pytest.raises(InvalidInputError, match="is only read; to write to it"),
    ):
        brokers.producer("orders")
    log.close()
    with pytest.raises(InvalidInputError, match="the log is closed"):
        log.producer("t")


# --- the end -------------------------------------------------------------------------------------


def test_a_closed_producer_takes_nothing_and_closes_again(log: KafkaLog) -> None:
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        producer.send("k", "v")
    producer.close()
    for act in (lambda: producer.send("k", "v"), producer.flush):
        with pytest.raises(InvalidInputError, match="the producer of topic 't' is closed"):
            act()
    assert keys(log) == ["k"]


@in_a_directory
def test_who_closes_second_waits_for_the_end_too(log: KafkaLog) -> None:
    producer = log.producer("t", linger_ms=NEVER_MS)
    sent = producer.send("k", "v")
    closers = [threading.Thread(target=producer.close) for _ in range(2)]
    with directory_log_of(log).transaction():
        for closer in closers:
            closer.start()
        closers[1].join(0.2)
        assert all(closer.is_alive() for closer in closers)
    for closer in closers:
        closer.join(WAIT_S)
    assert sent.done()


def test_what_was_sent_is_written_also_after_an_error(log: KafkaLog) -> None:
    with pytest.raises(ZeroDivisionError), log.producer("t", linger_ms=NEVER_MS) as producer:
        producer.send("k", "v")
        raise ZeroDivisionError
    assert keys(log) == ["k"]


def test_a_log_closes_its_producers(place: Path | str) -> None:
    with kafkalog.open(place) as log:
        log.create_topic("t")
        producers = [log.producer("t", linger_ms=NEVER_MS) for _ in range(3)]
        for number, producer in enumerate(producers):
            producer.send(f"k{number}", "v")
    with pytest.raises(InvalidInputError, match="is closed"):
        producers[0].flush()
    assert sorted(keys(log)) == ["k0", "k1", "k2"]


def test_a_log_is_closed_also_where_a_producer_cannot_be(place: Path | str) -> None:
    log = kafkalog.open(place)
    for name in ("gone", "there"):
        log.create_topic(name)
        log.producer(name, linger_ms=NEVER_MS).send("k", "v")
    log.delete_topic("gone")
    with pytest.raises(UnknownTopicError) as fault:
        log.close()
    assert fault.value.__notes__ == [
        "topic 'gone': records that were sent and are not known to be written: 1"
    ]
    assert len(rows(log, "there")) == 1
    with pytest.raises(InvalidInputError, match="the log is closed"):
        log.append("there", [("k", "v")])


def test_the_log_knows_a_producer_as_a_writer_until_it_is_closed(log: KafkaLog) -> None:
    with log.producer("t") as producer:
        producer.send("k", "v")
        producer.flush()
        (name,) = log._log.state().writers
        assert name.startswith("producer-")
        assert name.endswith(" t")
    assert log._log.state().writers == {}


def test_a_producer_cannot_be_pickled(log: KafkaLog) -> None:
    with (
        log.producer("t") as producer,
        pytest.raises(InvalidInputError, match="open the log and make a producer in the"),
    ):
        pickle.dumps(producer)


FORKED = """
import os, sys, kafkalog
with kafkalog.open(sys.argv[1]) as log:
    log.create_topic("t")
    with log.producer("t", linger_ms=2**31 - 1) as producer:
        sent = producer.send("parent", "v")
        child = os.fork()
        if child == 0:
            for act in (lambda: producer.send("child", "v"), producer.flush, sent.result):
                try:
                    act()
                    os._exit(1)
                except kafkalog.errors.InvalidInputError as fault:
                    assert "belongs to the parent process" in str(fault)
            producer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert log.offsets("t") == {0: (0, 0)}
"""


@pytest.mark.slow
def test_a_forked_process_leaves_its_parents_records_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True, timeout=WAIT_S)
    with kafkalog.open(tmp_path) as log:
        assert keys(log) == ["parent"]


FORGOTTEN = """
import sys, kafkalog
log = kafkalog.open(sys.argv[1])
log.create_topic("t")
log.producer("t", linger_ms=2**31 - 1).send("k", "v")
"""


@pytest.mark.slow
def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(tmp_path)], check=True, timeout=WAIT_S)
    with kafkalog.open(tmp_path) as log:
        assert keys(log) == ["k"]


# --- what fails ----------------------------------------------------------------------------------


def fill_the_disk(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(files, "write_at", refuse)


@in_a_directory
def test_while_commits_fail_everybody_is_told_and_nothing_is_lost(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_producer, "_RETRY_S", 3600.0)
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        first = producer.send("first", "v")
        with monkeypatch.context() as patch:
            fill_the_disk(patch)
            acts: list[Callable[[], object]] = [
                producer.flush,
                first.result,
                lambda: producer.send("refused", "v"),
                producer.flush,
            ]
            for act in acts:
                with pytest.raises(StorageError, match="No space left on device"):
                    act()
            assert not first.done()
        producer.flush()
        producer.send("second", "v")
    assert sorted(keys(log)) == ["first", "second"]


@in_a_directory
def test_a_failed_commit_is_tried_again_with_nobody_asking(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_producer, "_RETRY_S", 0.05)
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        sent = [producer.send("k", str(number)) for number in range(3)]
        with monkeypatch.context() as patch:
            fill_the_disk(patch)
            with pytest.raises(StorageError, match="No space left"):
                producer.flush()
        until(sent[0].done)
        assert [one.result().offset for one in sent] == [0, 1, 2]
        producer.send("k", "3")
    assert [row["value"] for row in rows(log)] == [b"0", b"1", b"2", b"3"]
    assert "topic 't': a commit failed, and is tried again (records: 3): " in caplog.text


@in_a_directory
def test_a_commit_that_only_seemed_to_fail_is_not_made_twice(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_producer, "_RETRY_S", 3600.0)
    with log.producer("t", linger_ms=NEVER_MS) as producer:
        sent = producer.send("k", "0")
        with monkeypatch.context() as patch:
            LyingPages(patch, errno.EIO, lambda name: name == layout.COMMIT)
            with pytest.raises(CommitInDoubtError):
                producer.flush()
            producer.flush()
        assert sent.result(0).offset == -1  # nobody was told
        producer.send("k", "1")
    assert [row["value"] for row in rows(log)] == [b"0", b"1"]


@in_a_directory
def test_a_close_learns_what_became_of_a_commit_in_doubt(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = log.producer("t", linger_ms=NEVER_MS)
    sent = producer.send("k", "0")
    with monkeypatch.context() as patch:
        LyingPages(patch, errno.EIO, lambda name: name == layout.COMMIT)
        producer.close()
    assert sent.done()
    assert [row["value"] for row in rows(log)] == [b"0"]


def test_a_record_that_was_taken_in_time_is_written_however_late(log: KafkaLog) -> None:
    limits = {"message.timestamp.before.max.ms": "1000", "message.timestamp.after.max.ms": "1000"}
    log.alter_topic("t", limits)
    times = iter([10_000, 20_000, 3_600_000, 3_600_000])
    with record_producer.Producer(
        log._log, "t", batch_size=1 << 20, linger_ms=NEVER_MS, clock=lambda: next(times)
    ) as producer:
        producer.send("early", "v", timestamp=9_000)
        producer.send("late", "v", timestamp=21_000)
        producer.flush()
    assert sorted(keys(log)) == ["early", "late"]


@pytest.mark.parametrize("after", [False, True], ids=["instead", "behind"])
def test_whichever_act_of_a_commit_fails_each_record_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    monkeypatch.setattr(record_producer, "_RETRY_S", 3600.0)
    failed = 0
    for number in itertools.count(1):
        with kafkalog.open(tmp_path / str(number)) as log:
            log.create_topic("t")
            with log.producer("t", linger_ms=NEVER_MS) as producer:
                for name in "ab":
                    producer.send("k", name)
                with monkeypatch.context() as patch:
                    acts = Acts(patch, number, OSError(errno.EIO, "refused"), after=after)
                    try:
                        producer.flush()
                    except KafkaLogError:
                        failed += 1
                producer.flush()
                producer.send("k", "c")
            assert [row["value"] for row in rows(log)] == [b"a", b"b", b"c"], number
        if not acts.fired:
            break
    assert failed > 3


@in_a_directory
def test_a_close_that_fails_says_how_much_is_not_written(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = log.producer("t", linger_ms=NEVER_MS)
    sent = [producer.send("k", "v") for _ in range(3)]
    text = "topic 't': records that were sent and are not known to be written: 3"
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        with pytest.raises(StorageError, match="No space left") as fault:
            producer.close()
    assert fault.value.__notes__ == [text]
    assert text in caplog.text
    with pytest.raises(StorageError, match="No space left"):
        sent[0].result()
    assert rows(log) == []


def test_a_topic_that_changes_its_mind_keeps_what_was_sent_waiting(log: KafkaLog) -> None:
    log.create_topic("events", 1, {"cleanup.policy": "delete"})
    with log.producer("events", linger_ms=NEVER_MS) as producer:
        producer.send(None, "v")
        log.alter_topic("events", {"cleanup.policy": "compact"})
        with pytest.raises(InvalidInputError, match="rows have a null key"):
            producer.flush()
        log.alter_topic("events", {"cleanup.policy": "delete"})
        producer.flush()
        log.alter_topic("events", {"cleanup.policy": "compact"})
        producer.send("k", "v")  # which is fine with both
        producer.flush()
        with pytest.raises(InvalidInputError, match="rows have a null key"):
            producer.send(None, "v")
    assert len(rows(log, "events")) == 2


KILLED = """
import sys, kafkalog
log = kafkalog.open(sys.argv[1])
with log.producer("t", batch_size=5000) as producer:
    for number in range(10**9):
        sent = producer.send(f"{number}", "v" * 20)
        if number % 500 == 0:
            sent.result()
            print(number, flush=True)
"""


@pytest.mark.slow
@in_a_directory
def test_a_kill_leaves_whole_commits_and_all_that_was_acknowledged(log: KafkaLog) -> None:
    command = [sys.executable, "-c", KILLED, str(log.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    process.stdout.close()
    numbers = sorted(map(int, keys(log)))
    assert numbers == list(range(len(numbers)))
    assert numbers[-1] >= acknowledged[-1]


def test_a_sent_record_is_a_future_of_asyncio(log: KafkaLog) -> None:
    async def send() -> RecordMetadata:
        sent = producer.send("k", "v", partition=0)
        assert not sent.cancel()
        return await asyncio.wrap_future(sent)

    with log.producer("t") as producer:
        assert asyncio.run(send()).offset == 0
        several = [producer.send("k", str(number), partition=0) for number in range(3)]
        done, _ = concurrent.futures.wait(several, WAIT_S)
        assert sorted(each.result().offset for each in done) == [1, 2, 3]
        assert [each.exception() for each in several] == [None] * 3


def test_who_waits_for_a_record_that_is_given_up_gets_the_error(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = log.producer("t", linger_ms=NEVER_MS)
    sent = producer.send("k", "v")
    found: list[BaseException | None] = []
    sent.add_done_callback(lambda each: found.append(each.exception()))

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(log._log, "commit", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        producer.close()
    assert [str(fault) for fault in found] == ["the disk is full"]
    assert sent.done()
