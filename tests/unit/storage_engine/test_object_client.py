"""The client of an object store, on a store in memory."""

from __future__ import annotations

import copy
import pickle
import secrets
import subprocess
import sys
from typing import Any

import pytest
from obstore.store import MemoryStore

from kafkalog.errors import CorruptLogError, InvalidInputError, StorageError
from kafkalog.storage_engine.object_store import failure
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.failure import (
    ObjectMissingError,
    OverloadedError,
    PermanentError,
    RefusedError,
)
from tests import ROOT

SECRET = "s3cr3tvalue"


@pytest.fixture
def client() -> ObjectClient:
    return ObjectClient(StoreAddress.parse(f"memory://{secrets.token_hex(8)}/a/b"))


def test_an_object_is_created_once(client: ObjectClient) -> None:
    assert client.create("x", b"first") is Outcome.DONE
    assert client.create("x", b"second") is Outcome.EXISTS
    found = client.get("x")
    assert found is not None
    assert found.data == b"first"


def test_an_object_is_replaced_while_it_has_its_tag(client: ObjectClient) -> None:
    client.create("x", b"1")
    first = client.get("x")
    assert first is not None
    assert client.replace("x", b"2", first.etag) is Outcome.DONE
    assert client.replace("x", b"3", first.etag) is Outcome.EXISTS
    assert client.replace("missing", b"3", first.etag) is Outcome.EXISTS
    second = client.get("x")
    assert second is not None
    assert second.data == b"2"


def test_a_missing_object_reads_as_none_and_a_range_of_it_is_an_error(client: ObjectClient) -> None:
    assert client.get("x") is None
    assert client.head("x") is None
    with pytest.raises(ObjectMissingError, match=r"memory://.*/a/b/x: the object is missing"):
        client.fetch("x", 0, 1)
    client.delete(["x"])


def test_a_range_is_as_long_as_it_was_asked_for(client: ObjectClient) -> None:
    client.put_unique("x", b"abcdef")
    assert bytes(client.fetch("x", 2, 3)) == b"cde"
    for position, size in [(4, 3), (6, 1), (9, 1)]:
        with pytest.raises(CorruptLogError, match=f"at least {position + size} bytes, found the"):
            client.fetch("x", position, size)


def test_a_piece_is_gone_once_the_next_one_is_asked_for(client: ObjectClient) -> None:
    """So that a thread that fetches an object has one piece in memory."""
    client.put_unique("x", b"data")
    pieces = client.pieces("x", 4)
    piece = next(pieces)
    assert bytes(piece) == b"data"
    assert next(pieces, None) is None
    with pytest.raises(ValueError, match="released"):
        bytes(piece)


def test_objects_are_listed_by_name_below_the_prefix(client: ObjectClient) -> None:
    beside = ObjectClient(StoreAddress("memory", client.address.bucket, "a"))
    beside.put_unique("other", b"")
    for name in ("log/3", "log/1", "log/2", "logs/1", "data/x"):
        client.put_unique(name, name.encode())
    assert [entry.name for entry in client.list("log")] == ["log/1", "log/2", "log/3"]
    assert [entry.name for entry in client.list("log", after="log/1")] == ["log/2", "log/3"]
    assert [entry.name for entry in client.newest("log", 2)] == ["log/1", "log/2"]
    assert client.newest("nothing", 2) == []
    assert [entry.size for entry in client.list("log")] == [5, 5, 5]
    client.delete(["log/1", "log/3", "log/9"])
    assert [entry.name for entry in client.list("")] == ["data/x", "log/2", "logs/1"]


def test_pages_are_listed_as_they_are_reached(client: ObjectClient) -> None:
    for number in range(1001):
        client.put_unique(f"log/{number:04}", b"")
    listing = client.list("log")
    assert next(listing).name == "log/0000"
    assert client.counts["LIST"] == 1
    assert sum(1 for _ in listing) == 1000
    assert client.counts["LIST"] == 2


def test_requests_are_counted_by_kind(client: ObjectClient) -> None:
    client.create("x", b"abcdef")
    client.get("x")
    client.head("x")
    client.fetch("x", 0, 1)
    client.newest("", 1)
    client.delete(["x", "y"])
    assert client.counts == {"PUT": 1, "GET": 2, "HEAD": 1, "LIST": 1, "DELETE": 1}


def test_clients_of_one_name_share_the_memory_of_the_process(client: ObjectClient) -> None:
    client.create("x", b"1")
    assert ObjectClient(client.address).get("x") == client.get("x")
    other = StoreAddress("memory", client.address.bucket + "-", client.address.prefix)
    assert ObjectClient(other).get("x") is None


def test_a_client_is_never_pickled_or_copied(client: ObjectClient) -> None:
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(StorageError, match="never copied or pickled"):
            act(client)


_FORKS = """
import os, sys
from kafkalog.errors import StorageError
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient

address = StoreAddress.parse("memory://x")
if sys.argv[1] == "used":
    client = ObjectClient(address)
    client.create("x", b"")
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    if sys.argv[1] == "unused":
        client = ObjectClient(address)
        client.create("x", b"")
    client.get("x")
    print("used")
except StorageError as refused:
    print(refused)
try:
    ObjectClient(address)
    print("made")
except StorageError as refused:
    print(refused)
"""


def forked(state: str) -> list[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS, state]
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    return result.stdout.splitlines()


def test_a_process_forked_from_a_user_of_a_store_is_refused() -> None:
    assert ["was forked from" in line for line in forked("used")] == [True, True]


def test_a_process_may_fork_before_its_first_use_of_a_store() -> None:
    assert forked("unused") == ["used", "made"]


# --- a store that can hold a log -----------------------------------------------------------------


class WithoutConditions(ObjectClient):
    """Every creator wins."""

    def create(self, name: str, data: bytes) -> Outcome:
        self.put_unique(name, data)
        return Outcome.DONE


class WithoutTags(ObjectClient):
    """Every replacement wins."""

    def replace(self, name: str, data: bytes, etag: str) -> Outcome:
        self.put_unique(name, data)
        return Outcome.DONE


def test_a_probe_finds_no_fault_in_a_good_store_and_leaves_nothing(client: ObjectClient) -> None:
    client.probe("probe/1")
    assert list(client.list("")) == []


@pytest.mark.parametrize(
    ("broken", "fault"), [(WithoutConditions, "creators of one"), (WithoutTags, "tag has changed")]
)
def test_a_store_that_ignores_conditions_is_refused(
    client: ObjectClient, broken: type[ObjectClient], fault: str
) -> None:
    with pytest.raises(PermanentError, match=fault):
        broken(client.address).probe("probe/1")
    assert list(client.list("")) == []


def test_a_store_that_lists_out_of_order_is_refused(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = client._obstore.list

    def backwards(*arguments: Any, **options: Any) -> Any:
        return iter([[*page][::-1] for page in listed(*arguments, **options)])

    client.put_unique("log/1", b"")
    client.put_unique("log/2", b"")
    monkeypatch.setattr(client._obstore, "list", backwards)
    with pytest.raises(PermanentError, match="out of order"):
        list(client.list("log"))


# --- credentials and errors ----------------------------------------------------------------------


def test_an_address_at_which_nobody_answers_is_one_sentence_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    options = {"store.endpoint": "http://127.0.0.1:1", "store.allow_http": "true"}
    address = StoreAddress.parse("s3://bucket", {**options, "store.region": "x"})
    client = ObjectClient(address, patience_s=0.2)
    assert client.create("x", b"") is Outcome.UNKNOWN
    for act in (
        lambda: client.get("x"),
        lambda: client.put_unique("x", b""),
        lambda: client.fetch("x", 0, 1),
        lambda: client.newest("x", 1),
        lambda: client.delete(["x"]),
    ):
        with pytest.raises(StorageError, match="nobody answers") as failed:
            act()
        text = f"{failed.value!r} {client!r} {address!r} {address}"
        assert SECRET not in text
        assert "AKIA" not in text
        assert "\n" not in str(failed.value)
        assert failed.value.__context__ is None


def named_credentials() -> dict[str, Any]:
    return {"access_key_id": "A", "secret_access_key": SECRET, "expires_at": None}


class NamedCredentials:
    def __call__(self) -> dict[str, Any]:
        return named_credentials()


@pytest.mark.parametrize("name", ["named_credentials", "NamedCredentials"])
def test_an_option_names_the_provider_of_credentials(name: str) -> None:
    options = {"store.endpoint": "http://127.0.0.1:1", "store.allow_http": "true"}
    options |= {"store.region": "x", "store.credentials": f"{__name__}:{name}"}
    client = ObjectClient(StoreAddress.parse("s3://bucket", options), patience_s=0.1)
    with pytest.raises(StorageError, match="nobody answers"):
        client.get("x")


@pytest.mark.parametrize("name", ["no.such.module:x", f"{__name__}:nothing"])
def test_a_provider_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="there is no"):
        ObjectClient(StoreAddress.parse("s3://bucket", {"store.credentials": name}))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidInputError, match="pip install obstore"):
        ObjectClient(StoreAddress.parse("memory://x"))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("status code: 503: <Code>SlowDown</Code>", OverloadedError, "503 SlowDown"),
        ("status code: 500: <Code>InternalError</Code>", StorageError, "500 InternalError"),
        ("status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", PermanentError, "clock"),
        ("status code: 403 Forbidden: ", PermanentError, "may not list"),
        ("status code: 404: <Code>NoSuchBucket</Code>", PermanentError, "Create the bucket"),
        ("PUT http://169.254.169.254/latest in 1ms - status code: 403", PermanentError, "no cred"),
        ("source: TimedOut", StorageError, "did not answer in time"),
        ("something else", StorageError, "the connection broke"),
    ],
)
def test_a_failure_says_what_to_do_and_repeats_no_text(
    text: str, kind: type[StorageError], said: str
) -> None:
    found = failure.described("GET", "s3://b/x", ValueError(f"{text} https://h?sig={SECRET}"))
    assert type(found) is kind
    assert said in str(found)
    assert SECRET not in str(found)


def test_a_missing_bucket_differs_from_a_missing_object() -> None:
    text = "status code: 404 Not Found: <Code>{}</Code>"
    missing = failure.described("GET", "x", FileNotFoundError(text.format("NoSuchKey")))
    assert type(missing) is ObjectMissingError
    bucket = failure.described("GET", "x", FileNotFoundError(text.format("NoSuchBucket")))
    assert type(bucket) is PermanentError


def test_a_conflict_is_one_of_requests_and_not_final() -> None:
    from obstore.exceptions import AlreadyExistsError

    found = failure.described("PUT", "x", AlreadyExistsError("status code: 409 Conflict"))
    assert type(found) is RefusedError


def test_obstore_shortens_a_range_silently() -> None:
    """It is the reason for the check of lengths: if this fails, the check has less to do."""
    import obstore

    store = MemoryStore()
    obstore.put(store, "x", b"ab")
    assert len(obstore.get_range(store, "x", start=0, length=9)) == 2
