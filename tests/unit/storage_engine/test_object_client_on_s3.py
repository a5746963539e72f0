"""The client of an object store on a server that speaks S3, behind a proxy that spoils requests."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.failure import ObjectMissingError, PermanentError
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer

PASSING = [
    *(Fault.REFUSED_500, Fault.REFUSED_503, Fault.DONE_BUT_500),
    *(Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.CUT_BODY),
]


@pytest.fixture
def client(s3_address: StoreAddress) -> ObjectClient:
    return ObjectClient(s3_address, patience_s=10.0)


def test_every_operation_does_as_on_a_store_in_memory(
    client: ObjectClient, store_proxy: StoreProxy
) -> None:
    assert client.create("log/2", b"abcdef") is Outcome.DONE
    assert client.create("log/2", b"") is Outcome.EXISTS
    first = client.get("log/2")
    assert first is not None
    assert first.data == b"abcdef"
    assert client.replace("log/2", b"uvwxyz", first.etag) is Outcome.DONE
    assert client.replace("log/2", b"", first.etag) is Outcome.EXISTS
    client.put_unique("log/1", b"")
    assert [entry.name for entry in client.list("log")] == ["log/1", "log/2"]
    assert [entry.name for entry in client.newest("log", 1)] == ["log/1"]
    head = client.head("log/2")
    assert head is not None
    assert (head.name, head.size) == ("log/2", 6)
    assert bytes(client.fetch("log/2", 1, 2)) == b"vw"
    assert (client.get("log/3"), client.head("log/3")) == (None, None)
    with pytest.raises(ObjectMissingError):
        client.fetch("log/3", 0, 1)
    for position, size in [(4, 3), (6, 1), (9, 1)]:
        with pytest.raises(CorruptLogError, match="found the end"):
            client.fetch("log/2", position, size)
    assert client.first_bytes("log/1", 5) == b""
    client.delete(["log/1", "log/2", "log/9"])
    assert list(client.list("log")) == []
    assert client.counts == store_proxy.counts


def test_a_listing_of_several_pages_is_as_many_requests(
    client: ObjectClient, store_proxy: StoreProxy
) -> None:
    names = [f"log/{number:04}" for number in range(1050)]
    threads = [
        threading.Thread(target=lambda part=names[start::8]: [*map(put, part)])
        for start in range(8)
    ]

    def put(name: str) -> None:
        client.put_unique(name, b"")

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store_proxy.reset()
    assert len(client.newest("log", 2000)) == 1000
    assert store_proxy.counts == {"LIST": 1}
    assert [entry.name for entry in client.list("log")] == names
    assert store_proxy.counts == {"LIST": 3}
    assert client.counts["LIST"] == 3


def test_the_server_lets_one_creator_win(client: ObjectClient) -> None:
    client.probe("probe/x")
    assert list(client.list("probe")) == []


@pytest.mark.parametrize("fault", PASSING)
def test_reads_and_writes_of_ones_own_objects_are_repeated(
    client: ObjectClient, store_proxy: StoreProxy, fault: Fault
) -> None:
    body = bytes(range(256)) * 40
    client.put_unique("x", body)
    for kind, act, expected in [
        ("PUT", lambda: client.put_unique("y", body), None),
        ("GET", lambda: client.get("x").data, body),  # type: ignore[union-attr]
        ("GET", lambda: bytes(client.fetch("x", 10, 9000)), body[10:9010]),
        ("LIST", lambda: [entry.name for entry in client.list("")], ["x", "y"]),
    ]:
        store_proxy.reset(Rule(fault, kind))
        assert act() == expected
        assert store_proxy.counts[kind] == (1 if kind == "PUT" and fault is Fault.CUT_BODY else 2)


@pytest.mark.parametrize(
    ("fault", "outcome", "is_there"),
    [
        (Fault.REFUSED_412, Outcome.EXISTS, False),
        (Fault.REFUSED_409, Outcome.EXISTS, False),
        (Fault.REFUSED_500, Outcome.UNKNOWN, False),
        (Fault.REFUSED_503, Outcome.UNKNOWN, False),
        (Fault.REQUEST_LOST, Outcome.UNKNOWN, False),
        (Fault.ANSWER_LOST, Outcome.UNKNOWN, True),
        (Fault.DONE_BUT_500, Outcome.UNKNOWN, True),
    ],
)
@pytest.mark.parametrize("way", ["create", "replace"])
def test_a_conditional_write_is_sent_once_whatever_comes_back(
    client: ObjectClient,
    store_proxy: StoreProxy,
    fault: Fault,
    outcome: Outcome,
    is_there: bool,
    way: str,
) -> None:
    tag = ""
    if way == "replace":
        client.create("x", b"before")
        found = client.get("x")
        assert found is not None
        tag = found.etag
    store_proxy.reset(Rule(fault, "PUT"))
    if way == "create":
        assert client.create("x", b"1") is outcome
    else:
        assert client.replace("x", b"1", tag) is outcome
    assert store_proxy.counts["PUT"] == 1
    found = client.get("x")
    assert (found is not None and found.data == b"1") is is_there


def test_a_late_answer_is_waited_for_no_longer_than_the_timeout(
    s3_address: StoreAddress, store_proxy: StoreProxy
) -> None:
    client = ObjectClient(s3_address, patience_s=10.0, timeout_s=1.0)
    store_proxy.reset(Rule(Fault.LATE, seconds=2.5))
    began = time.monotonic()
    assert client.create("x", b"1") is Outcome.UNKNOWN
    assert time.monotonic() - began < 2.4
    store_proxy.reset(Rule(Fault.LATE, "GET", seconds=2.5))
    found = client.get("x")
    while found is None:  # the late PUT is still under way
        found = client.get("x")
    assert found.data == b"1"


def test_a_slow_line_takes_longer_than_the_timeout_and_a_silent_one_does_not(
    s3_address: StoreAddress, store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.object_store.client.SLOWEST_LINE", 256 << 10)
    client = ObjectClient(s3_address, patience_s=0.0, timeout_s=1.0)
    body = bytes(1 << 20)
    store_proxy.reset(Rule(Fault.SLOW_LINE, times=4, seconds=1.5))
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(client.put_unique, "x", body)
        assert client.create("y", body) is Outcome.DONE
        put.result()
        fetched = pool.submit(client.fetch, "x", 0, len(body))
        assert b"".join(map(bytes, client.pieces("y", len(body)))) == body
        assert bytes(fetched.result()) == body
    assert store_proxy.counts == {"PUT": 2, "GET": 2}
    store_proxy.reset(Rule(Fault.LATE, seconds=1.5))
    with pytest.raises(StorageError, match="the store did not answer in time"):
        client.fetch("x", 0, 1)


def test_a_store_that_fails_for_longer_than_the_patience_is_one_sentence(
    s3_address: StoreAddress, store_proxy: StoreProxy
) -> None:
    client = ObjectClient(s3_address, patience_s=0.5)
    store_proxy.reset(Rule(Fault.REFUSED_503, times=1000))
    with pytest.raises(StorageError, match=r"answered 503 SlowDown to GET\. Send fewer"):
        client.get("x")
    assert store_proxy.counts["GET"] > 1


def test_a_wrong_bucket_is_said(s3_address: StoreAddress) -> None:
    client = ObjectClient(dataclasses.replace(s3_address, bucket="other"))
    for act in (
        lambda: client.get("x"),
        lambda: client.create("x", b""),
        lambda: client.put_unique("x", b""),
        lambda: client.newest("log", 1),
    ):
        with pytest.raises(PermanentError, match="NoSuchBucket"):
            act()


def test_a_wrong_secret_is_refused_and_no_error_or_log_line_holds_one(
    s3_address: StoreAddress,
    store_server: StoreServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = "wr0ngs3cret"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    caplog.set_level(logging.DEBUG)
    client = ObjectClient(s3_address)
    for act in (
        lambda: client.get("x"),
        lambda: client.create("x", b""),
        lambda: client.newest("log", 1),
        lambda: client.delete(["x"]),
    ):
        with pytest.raises(PermanentError, match="403") as refused:
            act()
        text = f"{refused.value!r}{client!r}{vars(refused.value)}{caplog.text}"
        for secret in (wrong, store_server.secret, store_server.access_key):
            assert secret not in text


@pytest.mark.parametrize("fault", [Fault.REFUSED_412, Fault.REFUSED_409])
def test_a_refusal_of_a_read_proves_nothing_and_is_repeated(
    client: ObjectClient, store_proxy: StoreProxy, fault: Fault
) -> None:
    client.put_unique("x", b"abc")
    for kind, act, expected in [
        ("GET", lambda: client.get("x").data, b"abc"),  # type: ignore[union-attr]
        ("GET", lambda: bytes(client.fetch("x", 1, 2)), b"bc"),
        ("GET", lambda: client.first_bytes("x", 2), b"ab"),
        ("GET", lambda: b"".join(map(bytes, client.pieces("x", 3))), b"abc"),
        ("HEAD", lambda: client.head("x").size, 3),  # type: ignore[union-attr]
        ("LIST", lambda: [entry.name for entry in client.list("")], ["x"]),
    ]:
        store_proxy.reset(Rule(fault, kind))
        assert act() == expected
        assert store_proxy.counts[kind] == 2


def test_a_missing_object_whose_answer_is_cut_is_missing(
    client: ObjectClient, store_proxy: StoreProxy
) -> None:
    store_proxy.reset(Rule(Fault.CUT_BODY, "GET"))
    assert client.get("x") is None


def test_a_503_halves_the_reads_at_once_until_reads_succeed(
    client: ObjectClient, store_proxy: StoreProxy
) -> None:
    client.put_unique("x", bytes(1000))

    def fetched(reads: int) -> int:
        """Return the most requests that were under way at once."""
        store_proxy.delay_s = 0.02
        try:
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(lambda at: len(client.fetch("x", at, 9)), range(reads)))
        finally:
            store_proxy.delay_s = 0.0
        assert found == [9] * reads
        times = [
            (at, each)
            for began, ended, _ in store_proxy.spans
            for at, each in ((began, 1), (ended, -1))
        ]
        return max(accumulate(each for _, each in sorted(times)))

    assert fetched(16) > 4
    assert client.throttle.limit is None
    store_proxy.reset(Rule(Fault.REFUSED_503, "GET", times=8))
    fetched(8)
    limit = client.throttle.limit
    assert limit is not None and 1 <= limit <= 5
    store_proxy.reset()
    assert fetched(6) <= limit + 1
    while client.throttle.limit is not None:
        client.fetch("x", 0, 9)
        client.throttle._limit += 8  # thousands of reads make the rest
    assert fetched(16) > 4
