"""A log on a server of Azure's blobs: commit, read, conditional writes, and the probe."""

from __future__ import annotations

import pytest

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.azure_server import _azure_server, azure_address, azure_proxy  # noqa: F401 - fixtures
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.unit.storage_engine.store_log import WithoutProbe


def test_every_operation_does_as_on_a_store_in_memory(azure_address: StoreAddress) -> None:  # noqa: F811
    client = ObjectClient(azure_address, patience_s=10.0)
    assert client.create("log/2", b"abcdef") is Outcome.DONE
    assert client.create("log/2", b"") is Outcome.EXISTS
    first = client.get("log/2")
    assert first is not None and first.data == b"abcdef"
    assert client.replace("log/2", b"uvwxyz", first.etag) is Outcome.DONE
    assert client.replace("log/2", b"", first.etag) is Outcome.EXISTS
    client.put_unique("log/1", b"1")
    assert [entry.name for entry in client.list("log")] == ["log/1", "log/2"]
    assert [entry.name for entry in client.list("log", after="log/1")] == ["log/2"]
    assert bytes(client.fetch("log/2", 1, 2)) == b"vw"
    assert (client.get("log/3"), client.head("log/3")) == (None, None)
    with pytest.raises(CorruptLogError):
        client.fetch("log/2", 4, 3)
    client.delete(["log/1", "log/2", "log/9"])
    assert list(client.list("log")) == []


def test_a_small_probe_finds_no_fault_and_leaves_nothing(azure_address: StoreAddress) -> None:  # noqa: F811
    client = ObjectClient(azure_address)
    client.probe("probe/x", creators=4, names=2, rounds=2)
    assert list(client.list("probe")) == []


def test_what_two_processes_commit_is_read(
    azure_address: StoreAddress,  # noqa: F811
    azure_proxy: StoreProxy,  # noqa: F811
) -> None:
    CommitLog.create(WithoutProbe(azure_address))
    logs = [ObjectLog(azure_address, create=False) for _ in range(2)]
    logs[0].create_topic("t")
    for number in range(4):
        if number == 3:  # the answer to the commit is lost: its token says that it is made
            azure_proxy.reset(Rule(Fault.ANSWER_LOST, "PUT", ".commit"))
        logs[number % 2].append("t", [(f"k{number}", "v")])
    for log in logs:
        found = [key for batch in log.read("t", 0) for key in batch.column("key").to_pylist()]
        assert found == [b"k0", b"k1", b"k2", b"k3"]
