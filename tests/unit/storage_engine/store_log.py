"""A log in an object store for tests: batches of a writer, what became of them, and a collector."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.commit_log import CommitLog, Prepare
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import Extent, StoreChange, StoreState

TOPIC_ID = "A" * 22
PATIENCE_S = 0.2


class WithoutProbe(ObjectClient):
    """A client of a store that is known to be sound."""

    def probe(self, name: str, **_: int) -> None:
        """Ask nothing."""


class Impatient(CommitLog):
    """A commit log that soon gives up on a store that does not answer."""

    def __init__(self, client: ObjectClient) -> None:
        super().__init__(client, patience_s=PATIENCE_S)


def memory_address() -> StoreAddress:
    return StoreAddress.parse(f"memory://{secrets.token_hex(8)}/log")


def new_object_log() -> ObjectLog:
    """Create a log without a topic."""
    address = memory_address()
    CommitLog.create(WithoutProbe(address))
    return ObjectLog(address)


def new_log(address: StoreAddress, partitions: int = 2) -> CommitLog:
    """Create a log; commit 1 creates topic `t`."""
    client = WithoutProbe(address)
    assert CommitLog.create(client)
    log = CommitLog(client, patience_s=PATIENCE_S)

    def prepare(state: StoreState) -> Mapping[str, Any]:
        change = StoreChange()
        change.topic("t", TOPIC_ID, partitions, {})
        return change.record(0)

    log.commit(prepare)
    return log


def batch(writer: str, batch_id: int, rows: int = 3, partition: int = 0) -> Prepare:
    """Return a batch that is committed once: one object, with one run of rows."""
    task = secrets.token_hex(4)

    def prepare(state: StoreState) -> Mapping[str, Any] | None:
        known = state.log.writers.get(writer)
        if known is not None and known.batch_id >= batch_id:
            return None
        before = state.log.topics["t"].partitions[partition]
        end = before.high_watermark + rows
        change = StoreChange()
        change.partition("t", partition, dataclasses.replace(before, high_watermark=end))
        change.writers[writer] = [batch_id, rows, 0]
        extent = Extent(TOPIC_ID, partition, 0, 10 * rows, before.high_watermark, end, 0, -1)
        change.add(f"data/1/{writer}-{batch_id}-{task}.mixed", 10 * rows, [extent])
        return change.record(0)

    return prepare


def committed(state: StoreState) -> Counter[str]:
    """Return how often each batch is in the log, as `writer-batch`; check its offsets.

    Extents of a partition follow each other without a gap, in the order of their commits.
    """
    ends: Counter[int] = Counter()
    for each in sorted(state.objects.values(), key=lambda each: each.added_at):
        for extent in each.extents:
            assert extent.base_offset == ends[extent.partition]
            ends[extent.partition] = extent.next_offset
    for number, partition in enumerate(state.log.topics["t"].partitions):
        assert partition.high_watermark == ends[number]
    return Counter(name.rpartition("/")[2].rpartition("-")[0] for name in state.objects)


def reread(address: StoreAddress) -> StoreState:
    """Return the state as a process sees it that opens the log now."""
    return CommitLog(ObjectClient(address), patience_s=PATIENCE_S).state


def collect(address: StoreAddress, to: int) -> None:
    """Do as the collector: move the boundary, then delete the commits up to it."""
    client = ObjectClient(address)
    found = client.get(layout.STORED_BOUNDARY)
    assert found is not None
    log_id = CommitLog.id_of(client)
    moved = NumberedObject(layout.STORED_BOUNDARY_MAGIC, to, log_id).encode()
    assert client.replace(layout.STORED_BOUNDARY, moved, found.etag) is Outcome.DONE
    client.delete([layout.stored_commit(number) for number in range(1, to + 1)])
