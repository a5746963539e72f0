"""What can be wrong with a store, or with a log in it: a sentence says it, and nothing is lost."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import object_log, store_state
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, memory_address

EVERY = 1 << 20
WITH_DELETE = {"cleanup.policy": "delete"}


class Hasty(WithoutProbe):
    """A client that soon gives up."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address, patience_s=0.5)


def new_log(address: StoreAddress) -> ObjectLog:
    """Create a log with a topic of one partition and a row, `row`."""
    assert CommitLog.create(WithoutProbe(address))
    log = ObjectLog(address)
    log.create_topic("t", 1, WITH_DELETE)
    append(log, "row")
    return log


def append(log: ObjectLog, value: str) -> None:
    log.append("t", [(b"k", value.encode())])


def values(log: ObjectLog) -> Sequence[str]:
    """Return the rows as a process that opens the log now sees them."""
    found = ObjectLog(log.address, read_only=True).read("t", 0, columns=["value"])
    return [value.decode() for rows in found for value in rows["value"].to_pylist()]


def said(address: StoreAddress, act: Callable[[], object]) -> str:
    """Return what the error of an act says: its place, one problem, then what to do."""
    with pytest.raises(KafkaLogError) as failed:
        act()
    text = str(failed.value)
    assert re.fullmatch(rf"[^\n]*{re.escape(str(address))}[^\n]*: [^\n]+", text), text
    assert failed.value.__cause__ is None or isinstance(failed.value, StorageError)
    return text


# --- a store that refuses ------------------------------------------------------------------------


def opens_and_reads(log: ObjectLog) -> object:
    return values(log)


def appends(log: ObjectLog) -> None:
    append(log, "refused")


def polls(log: ObjectLog) -> object:
    return log.state()


LIST_ADVICE = "Allow this identity to list, read, write and delete objects"
REFUSALS: Mapping[str, tuple[Rule, Sequence[Callable[[ObjectLog], object]], str]] = {
    "no permission to list": (
        Rule(Fault.REFUSED_403, "LIST", times=EVERY),
        [opens_and_reads],
        f"403 AccessDenied to LIST. {LIST_ADVICE}",
    ),
    "no permission to list, so that a missing object is forbidden": (
        Rule(Fault.REFUSED_403, "GET", ".commit", times=EVERY),
        [polls, appends],
        "A store also answers 403 for a missing object if the identity may not list.",
    ),
    "no permission to write": (
        Rule(Fault.REFUSED_403, "PUT", times=EVERY),
        [appends],
        f"403 AccessDenied to PUT. {LIST_ADVICE}",
    ),
    "no permission to write a commit": (
        Rule(Fault.REFUSED_403, "PUT", ".commit", times=EVERY),
        [appends],
        f"403 AccessDenied to PUT. {LIST_ADVICE}",
    ),
    "no permission to read": (
        Rule(Fault.REFUSED_403, "GET", "/data/", times=EVERY),
        [opens_and_reads],
        f"403 AccessDenied to GET. {LIST_ADVICE}",
    ),
    "a clock that is an hour off": (
        Rule(Fault.REFUSED_403, times=EVERY, code="RequestTimeTooSkewed"),
        [polls, appends, opens_and_reads],
        "403 RequestTimeTooSkewed to GET. Set the clock of this host.",
    ),
    "a store that is overloaded for long": (
        Rule(Fault.REFUSED_503, times=EVERY),
        [polls, appends, opens_and_reads],
        "503 SlowDown to GET. Send fewer requests, and try again.",
    ),
}


@pytest.mark.parametrize("problem", REFUSALS)
def test_what_a_store_refuses_is_one_sentence_and_nothing_is_lost(
    problem: str,
    s3_address: StoreAddress,
    store_proxy: StoreProxy,
    store_server: StoreServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", Hasty)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    log = new_log(s3_address)
    rule, acts, expected = REFUSALS[problem]
    for act in acts:
        store_proxy.reset(dataclasses.replace(rule))
        text = said(s3_address, lambda act=act: act(log))  # type: ignore[misc]
        assert expected in text
        assert store_server.secret not in text and store_server.access_key not in text
        store_proxy.reset()
    assert values(log) == ["row"]
    append(log, "again")
    assert values(log) == ["row", "again"]


def test_a_commit_waits_for_a_store_that_is_overloaded_for_a_while(
    s3_address: StoreAddress, store_proxy: StoreProxy
) -> None:
    log = new_log(s3_address)
    store_proxy.reset(Rule(Fault.REFUSED_503, times=6))
    append(log, "again")
    assert store_proxy.counts.total() > 6
    assert values(log) == ["row", "again"]


def test_a_bucket_that_is_missing_is_said_by_every_verb(s3_address: StoreAddress) -> None:
    wrong = dataclasses.replace(s3_address, bucket="other")
    for act in (ObjectLog, lambda address: ObjectLog(address, read_only=True)):
        text = said(wrong, lambda act=act: act(wrong))  # type: ignore[misc]
        assert "404 NoSuchBucket to GET. Create the bucket, or correct the address." in text


# --- objects that are not as they were written ---------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda data: None, "the object is missing"),
        (lambda data: data[:40], "found the end"),
        (lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:], "expected"),
    ],
    ids=["missing", "short", "changed"],
)
def test_a_data_object_that_was_tampered_with_is_named_and_costs_no_other_row(
    spoil: Callable[[bytes], bytes | None], expected: str
) -> None:
    log = new_log(memory_address())
    (name,) = log.store_state().objects
    whole = log.client.get(name)
    assert whole is not None
    spoilt = spoil(whole.data)
    log.client.delete([name])
    if spoilt is not None:
        log.client.put_unique(name, spoilt)
    text = said(log.address, lambda: values(log))
    assert name in text and expected in text
    append(log, "again")
    log.client.put_unique(name, whole.data)
    assert values(log) == ["row", "again"]


MAGICS = {
    layout.STORED_LOG: layout.STORED_LOG_MAGIC,
    layout.STORED_BOUNDARY: layout.STORED_BOUNDARY_MAGIC,
    layout.stored_snapshot(2): layout.STORED_SNAPSHOT_MAGIC,
    layout.stored_commit(3): layout.STORED_COMMIT_MAGIC,
}


@pytest.mark.parametrize("name", MAGICS)
def test_a_log_of_a_later_release_is_refused_by_any_of_its_objects(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_state, "SNAPSHOT_COMMITS", 2)
    log = new_log(memory_address())
    append(log, "again")
    found = log.client.get(name)
    assert found is not None
    with monkeypatch.context() as later:
        later.setattr(layout, "STORED_VERSION", 2)
        number = NumberedObject.decode(name, MAGICS[name], _of_version(found.data, 2))
        log.client.put_unique(name, number.encode())
    before = Counter(entry.name for entry in log.client.list(""))
    for act in (lambda: ObjectLog(log.address), lambda: values(log)):
        text = said(log.address, act)
        assert "(expected version 1, found 2). Install the newest release." in text
    assert Counter(entry.name for entry in log.client.list("")) == before
    log.client.put_unique(name, found.data)
    assert values(log) == ["row", "again"]


def _of_version(data: bytes, version: int) -> bytes:
    """Return an object with another version in its header."""
    header = layout.STORED_HEADER
    magic, _, *more = header.unpack_from(data)
    return header.pack(magic, version, *more) + data[header.size :]
