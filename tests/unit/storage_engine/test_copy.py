"""Copies of logs: local, store, local, equal batch by batch; a second copy takes only what is new.

`KAFKALOG_COPY_SEEDS` says how many random logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import (
    CorruptBatchError,
    InvalidInputError,
    KafkaLogError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.copying import copied_batches
from kafkalog.storage_engine.copying import copy as copies
from kafkalog.storage_engine.copying.copy import CopiedPartition, copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.reading import directory_snapshot
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.builders.batch_builder import ABORT, BatchBuilder, batch, joined, marker
from tests.builders.message_builder import message
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.copied_log import (
    CONFIG,
    NOW_MS,
    RandomBatches,
    batches,
    ends,
    fill,
    latest,
    producers,
    records,
)
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe, memory_address

SEEDS = int(os.environ.get("KAFKALOG_COPY_SEEDS", "6"))
DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", WithoutProbe)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DirectoryLog]:
    with DirectoryLog(tmp_path / "source") as log:
        log.create_topic("t", 1, {**CONFIG, "cleanup.policy": "compact,delete"}, now_ms=NOW_MS)
        yield log


@pytest.fixture
def store() -> ObjectLog:
    return ObjectLog(memory_address())


@pytest.fixture(params=["directory", "store"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    if request.param == "directory":
        return DirectoryLog(tmp_path / "copy")
    return ObjectLog(memory_address())


def add(
    log: DirectoryLog, first: int, count: int = 3, topic: str = "t", partition: int = 0
) -> None:
    log.append_raw(topic, partition, batch(first, count).data, now_ms=NOW_MS)


def copied(source: Log, destination: Log, now_ms: int = NOW_MS) -> CopiedPartition:
    (found,) = copy(source, destination, now_ms=now_ms)
    return found


def check_equal(source: Log, destination: Log, partition: int = 0) -> None:
    """A copy has the source's batches, records, ends and producers."""
    assert batches(destination, partition) == batches(source, partition)
    assert ends(destination, partition) == ends(source, partition)
    assert producers(destination, partition) == producers(source, partition)
    for level in ("read_committed", "read_uncommitted"):
        assert records(destination, level, partition) == records(source, level, partition)


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_log_that_is_copied_to_a_store_and_back_is_the_same(
    tmp_path: Path,
    source: DirectoryLog,
    store: ObjectLog,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", draw.choice([1, 5000, 1 << 26]))
    written = RandomBatches(draw, end=draw.choice([0, 0, 5, 1 << 40]))
    back = DirectoryLog(tmp_path / "back")
    now_ms = NOW_MS
    for _ in range(draw.randrange(1, 4)):
        fill(source, written, draw.choice([1, 5, 20]), now_ms)
        if draw.random() < 0.3:
            start, stable, _ = ends(source)
            source.delete_records("t", 0, draw.randrange(start, stable + 1), now_ms=now_ms)
        copy(source, store, now_ms=now_ms)
        copy(store, back, now_ms=now_ms)
        check_equal(source, store)
        check_equal(source, back)
        assert back.describe("t").topic_id == source.describe("t").topic_id
        assert back.describe("t").config == source.describe("t").config
        now_ms += 1000
    back.close()
    assert [str(each) for each in verify(back.root, deep=True)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_copies_of_a_log_that_is_cleaned_meanwhile_have_the_same_tables(
    tmp_path: Path,
    source: DirectoryLog,
    store: ObjectLog,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(1_000_000 + seed)
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", draw.choice([1, 5000, 1 << 26]))
    written = RandomBatches(draw)
    back = DirectoryLog(tmp_path / "back")
    now_ms = NOW_MS
    for _ in range(draw.randrange(2, 5)):
        for _ in range(draw.choice([1, 2])):
            fill(source, written, draw.choice([1, 5, 20]), now_ms)
            if draw.random() < 0.7:
                manager.clean(source, "t", force=True, now_ms=now_ms)
            now_ms += draw.choice([0, DAY_MS // 4])
        copy(source, store, now_ms=now_ms)
        copy(store, back, now_ms=now_ms)
        for log in (store, back):
            assert ends(log) == ends(source)
            assert latest(log) == latest(source)
            ours, theirs = (records(each, "read_committed") for each in (log, source))
            assert ours.keys() >= theirs.keys()
            assert {offset: ours[offset] for offset in theirs} == theirs
        fresh = ObjectLog(memory_address())
        copy(source, fresh, now_ms=now_ms)
        check_equal(source, fresh)
        now_ms += draw.choice([0, DAY_MS // 4])
    back.close()
    assert [str(each) for each in verify(back.root, deep=True)] == []


def test_every_partition_and_topic_is_copied_or_those_that_are_named(
    source: DirectoryLog, destination: Log
) -> None:
    source.create_topic("u", 3)
    for partition in range(3):
        add(source, 10 * partition, topic="u", partition=partition)
    copy(source, destination, ["t"], now_ms=NOW_MS)
    assert destination.topics() == ["t"]
    found = copy(source, destination, now_ms=NOW_MS)
    assert [(each.topic, each.partition, each.end_offset) for each in found] == [
        ("t", 0, 0),
        ("u", 0, 3),
        ("u", 1, 13),
        ("u", 2, 23),
    ]
    assert destination.offsets("u") == {0: (0, 3), 1: (0, 13), 2: (0, 23)}


def test_several_partitions_are_copied_in_one_commit(
    source: DirectoryLog, store: ObjectLog
) -> None:
    source.create_topic("u", 20)
    for partition in range(20):
        add(source, 0, topic="u", partition=partition)
    before = store.state().number
    copy(source, store, ["u"], now_ms=NOW_MS)
    assert store.state().number == before + 3  # the topic, the records, the time of the copy


def test_a_copy_of_a_log_that_begins_later_begins_there(
    source: DirectoryLog, destination: Log, tmp_path: Path
) -> None:
    for first in range(0, 300, 3):
        add(source, first)
    source.delete_records("t", 0, 250)
    source.apply_retention("t", now_ms=NOW_MS)
    copied(source, destination)
    check_equal(source, destination)
    if isinstance(destination, DirectoryLog):
        destination.close()
        bases = [path.name for path in destination.partition_directory("t", 0).glob("*.log")]
        assert layout.segment_file(0, layout.LOG) not in bases
        assert [str(each) for each in verify(destination.root, deep=True)] == []


def test_the_directory_of_a_dead_broker_is_copied(tmp_path: Path, destination: Log) -> None:
    broker = BrokerRoot(tmp_path / "broker")
    broker.partition("t-0", (10, 50), 100)
    broker.partition("t-2")
    broker.checkpoint("log-start-offset-checkpoint", {"t-0": 15})
    source = DirectoryLog(broker.path, read_only=True, create=False)
    copy(source, destination, now_ms=NOW_MS)
    for partition in (0, 2):
        check_equal(source, destination, partition)
    assert ends(destination) == (15, 100, 100)
    assert destination.describe("t").absent == {1}
    assert destination.describe("t").topic_id == source.describe("t").topic_id
    assert [each.bytes for each in copy(source, destination, now_ms=NOW_MS)] == [0, 0]


# --- going on ------------------------------------------------------------------------------------


def test_a_second_copy_takes_only_what_is_new(source: DirectoryLog, store: ObjectLog) -> None:
    for first in range(0, 600, 30):
        add(source, first, 30)
    first_copy = copied(source, store)
    assert (first_copy.start_offset, first_copy.end_offset) == (0, 600)
    add(source, 600)
    before = Counter(store.client.counts)
    second = copied(source, store)
    requests = Counter(store.client.counts) - before
    assert (second.start_offset, second.end_offset) == (600, 603)
    assert second.bytes == len(batch(600, 3).data)
    assert requests["PUT"] == 4  # two objects, two commits
    assert requests["GET"] <= 10
    assert requests["LIST"] == 0
    before = Counter(store.client.counts)
    third = copied(source, store)
    requests = Counter(store.client.counts) - before
    assert third.bytes == 0
    assert (requests["PUT"], requests["LIST"]) == (1, 0)
    check_equal(source, store)


def test_an_open_transaction_is_copied_and_ends_with_a_later_copy(
    source: DirectoryLog, destination: Log
) -> None:
    add(source, 0)
    source.append_raw("t", 0, batch(3, 3, of=7).data, now_ms=NOW_MS)
    copied(source, destination)
    assert ends(destination) == (0, 3, 6)
    source.append_raw("t", 0, marker(6, ABORT, 7).data, now_ms=NOW_MS)
    copied(source, destination)
    check_equal(source, destination)
    assert sorted(records(destination, "read_committed")) == [0, 1, 2]


def test_no_commit_of_a_copy_is_stable_above_the_source(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source knows that a transaction is open, though its first records are deleted."""
    source.alter_topic("t", {"segment.bytes": "100"})
    source.append_raw("t", 0, batch(0, 4, of=1).data, now_ms=NOW_MS)
    for first in (4, 7, 10):
        add(source, first)
    source.delete_records("t", 0, 4)
    assert ends(source) == (4, 4, 13)
    for module in (copied_batches, copies):
        monkeypatch.setattr(module, "COMMIT_BYTES", 1)
    append, found = type(destination).append_copied, []

    def append_and_look(log: Log, *given: Any, **more: Any) -> int:
        rows = append(log, *given, **more)
        found.append(ends(log))
        return rows

    monkeypatch.setattr(type(destination), "append_copied", append_and_look)
    copied(source, destination)
    assert found == [(4, 4, 7), (4, 4, 10), (4, 4, 13)]


def test_a_transaction_that_is_open_in_a_store_holds_later_appends_back(
    source: DirectoryLog, store: ObjectLog
) -> None:
    source.append_raw("t", 0, joined([batch(0, 3), batch(3, 3, of=7)]), now_ms=NOW_MS)
    copied(source, store)
    store.append("t", [("a", "1")], now_ms=NOW_MS)
    assert ends(store) == (0, 3, 7)
    assert sorted(records(store, "read_committed")) == [0, 1, 2]


def test_producers_whose_batches_are_deleted_are_copied(
    source: DirectoryLog, store: ObjectLog, tmp_path: Path
) -> None:
    built = BatchBuilder(base_offset=0, producer=(5, 0, 0)).add(b"k", b"v", timestamp=NOW_MS)
    source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
    add(source, 1)
    source.delete_records("t", 0, 4)
    for first in range(4, 300, 3):
        add(source, first)
    source.apply_retention("t", now_ms=NOW_MS)
    back = DirectoryLog(tmp_path / "back")
    copied(source, store)
    copied(store, back)
    assert producers(back) == producers(store) == producers(source)
    assert [*producers(back)] == [5]


def test_a_batch_of_merged_records_is_cut_where_the_copy_goes_on(
    source: DirectoryLog, destination: Log
) -> None:
    for first in range(20):
        source.append("t", [(f"k{first}", f"v{first}")], now_ms=NOW_MS)
    copied(source, destination)
    for first in range(20, 40):
        source.append("t", [(f"k{first}", f"v{first}")], now_ms=NOW_MS)
    manager.clean(source, "t", force=True, now_ms=NOW_MS)
    assert len(batches(source)) == 1
    copied(source, destination)
    assert records(destination, "read_committed") == records(source, "read_committed")
    assert ends(destination) == ends(source)


def test_a_log_start_that_rises_is_copied(source: DirectoryLog, destination: Log) -> None:
    for first in range(0, 30, 3):
        add(source, first)
    copied(source, destination)
    source.delete_records("t", 0, 7)
    assert copied(source, destination).bytes == 0
    assert ends(destination) == (7, 30, 30)


def test_a_copy_that_the_log_start_has_passed_goes_on_behind_a_gap(
    source: DirectoryLog, destination: Log
) -> None:
    add(source, 0)
    copied(source, destination)
    for first in range(3, 300, 3):
        add(source, first)
    source.delete_records("t", 0, 200)
    source.apply_retention("t", now_ms=NOW_MS)
    copied(source, destination)
    assert ends(destination) == ends(source)
    assert records(destination, "read_committed") == records(source, "read_committed")


def test_records_that_a_cleaning_took_at_the_end_leave_a_gap(
    source: DirectoryLog, destination: Log
) -> None:
    source.append("t", [("a", "1"), ("b", None)], now_ms=NOW_MS)
    for _ in range(2):
        manager.clean(source, "t", force=True, now_ms=NOW_MS)
        source.append("t", [("b", None)], now_ms=NOW_MS)
        manager.clean(source, "t", force=True, now_ms=NOW_MS + 2 * DAY_MS)
    copied(source, destination)
    assert ends(destination) == ends(source)
    assert records(destination, "read_committed") == records(source, "read_committed")
    source.append("t", [("c", "3")], now_ms=NOW_MS)
    copied(source, destination)
    assert records(destination, "read_committed") == records(source, "read_committed")


def test_a_store_that_was_cleaned_goes_on_and_keeps_its_producers(
    source: DirectoryLog, store: ObjectLog, tmp_path: Path
) -> None:
    written = RandomBatches(random.Random(5))
    fill(source, written, 20, NOW_MS)
    copied(source, store)
    manager.clean(store, "t", force=True, now_ms=NOW_MS)
    assert producers(store) == producers(source)
    fill(source, written, 5, NOW_MS)
    copied(source, store)
    assert producers(store) == producers(source)
    assert latest(store) == latest(source)
    back = DirectoryLog(tmp_path / "back")
    copied(store, back)
    check_equal(store, back)


# --- refusals ------------------------------------------------------------------------------------


def refusal(source: Log, destination: Log, now_ms: int = NOW_MS) -> str:
    before = destination.state().number
    with pytest.raises(InvalidInputError) as caught:
        copy(source, destination, now_ms=now_ms)
    assert destination.state().number == before
    return str(caught.value)


def test_a_topic_of_another_id_is_refused(source: DirectoryLog, destination: Log) -> None:
    destination.create_topic("t", 1)
    assert "expected the topic id" in refusal(source, destination)


def test_another_number_of_partitions_is_refused(source: DirectoryLog, destination: Log) -> None:
    copied(source, destination)
    more = DirectoryLog(source.root.with_name("more"))
    known = source.describe("t")
    twice = dataclasses.replace(known, partitions=[*known.partitions, *known.partitions])
    with more.transaction() as transaction:
        transaction.copy_topic(twice, {0: 0, 1: 0})
        transaction.publish(NOW_MS)
    assert "expected 2, found 1" in refusal(more, destination)


def test_a_destination_that_ends_above_the_source_is_refused(
    source: DirectoryLog, destination: Log
) -> None:
    copied(source, destination)
    destination.append("t", [("own", "record")], now_ms=NOW_MS)
    assert "expected at most 0, found 1" in refusal(source, destination)


def test_a_destination_with_records_of_its_own_is_refused(
    source: DirectoryLog, destination: Log
) -> None:
    add(source, 0)
    copied(source, destination)
    destination.append("t", [("own", "record")], now_ms=NOW_MS)
    add(source, 3, 5)
    assert "another record at offset 3" in refusal(source, destination)


def test_a_source_that_may_have_lost_deletions_since_the_last_copy_is_refused(
    source: DirectoryLog, destination: Log
) -> None:
    source.append("t", [("a", "1"), ("b", "2")], now_ms=NOW_MS)
    copied(source, destination)
    source.append("t", [("a", None), ("c", "3")], now_ms=NOW_MS)
    manager.clean(source, "t", force=True, now_ms=NOW_MS)
    copied(source, destination, NOW_MS + 2 * DAY_MS)
    assert latest(destination) == latest(source)
    source.append("t", [("c", None), ("d", "4")], now_ms=NOW_MS)
    manager.clean(source, "t", force=True, now_ms=NOW_MS)
    manager.clean(source, "t", force=True, now_ms=NOW_MS + DAY_MS)
    assert "deletions may be missing" in refusal(source, destination, NOW_MS)


def test_deletions_that_went_before_their_retention_was_raised_are_missed(
    source: DirectoryLog, destination: Log
) -> None:
    source.alter_topic("t", {"delete.retention.ms": "0"})
    source.append("t", [("a", "1"), ("b", "2")], now_ms=NOW_MS)
    copied(source, destination)
    source.append("t", [("a", None), ("c", "3")], now_ms=NOW_MS)
    for later_ms in (1, 2):
        manager.clean(source, "t", force=True, now_ms=NOW_MS + later_ms)
    source.alter_topic("t", {"delete.retention.ms": str(DAY_MS)})
    assert "deletions up to 3 are gone" in refusal(source, destination, NOW_MS + 3)


def test_records_of_times_beyond_the_calendar_are_compared(
    source: DirectoryLog, destination: Log
) -> None:
    for first in range(0, 30, 10):
        data = batch(first, 10, timestamp=1000 * NOW_MS).data
        source.append_raw("t", 0, data, now_ms=NOW_MS)
        manager.clean(source, "t", force=True, now_ms=NOW_MS)
        copied(source, destination)
    assert ends(destination) == ends(source) == (0, 30, 30)


def test_messages_of_old_formats_are_refused(tmp_path: Path, destination: Log) -> None:
    broker = BrokerRoot(tmp_path / "broker")
    directory = broker.partition("t-0", (0,), 0)
    (directory / layout.segment_file(0, layout.LOG)).write_bytes(message(1, 0, b"k", b"v"))
    with pytest.raises(InvalidInputError, match="v0 or v1"):
        copy(DirectoryLog(broker.path, read_only=True, create=False), destination, now_ms=NOW_MS)


def test_an_unknown_topic_and_the_log_itself_are_refused(
    source: DirectoryLog, destination: Log
) -> None:
    with pytest.raises(UnknownTopicError):
        copy(source, destination, ["nothing"], now_ms=NOW_MS)
    with pytest.raises(InvalidInputError, match="to itself"):
        copy(destination, destination, now_ms=NOW_MS)


def damage(log: DirectoryLog, topic: str) -> None:
    path = log.partition_directory(topic, 0) / layout.segment_file(0, layout.LOG)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_batch_is_not_copied(source: DirectoryLog, destination: Log) -> None:
    add(source, 0)
    damage(source, "t")
    with pytest.raises(CorruptBatchError):
        copy(source, destination, now_ms=NOW_MS)
    assert ends(destination) == (0, 0, 0)


def test_topics_that_cannot_be_copied_leave_the_others_to_be_copied(
    source: DirectoryLog, destination: Log
) -> None:
    for topic in ("damaged", "other", "z"):
        source.create_topic(topic, 1, {}, now_ms=NOW_MS)
        appends(source, topic, "k")
    destination.create_topic("other", 1, {}, now_ms=NOW_MS)
    damage(source, "damaged")
    for new in (1, 0):
        refusals: dict[str, KafkaLogError] = {}
        found = copy(source, destination, now_ms=NOW_MS + 1 - new, refusals=refusals)
        assert {name: type(fault) for name, fault in refusals.items()} == {
            "damaged": CorruptBatchError,
            "other": InvalidInputError,
        }
        added = {each.topic: each.end_offset - each.start_offset for each in found}
        assert added == {"damaged": 0, "t": 0, "z": new}
    noted = {name: each.batch_id for name, each in destination.state().writers.items()}
    assert noted == {
        f"{copies.WRITER_ID} damaged": NOW_MS,
        f"{copies.WRITER_ID} t": NOW_MS + 1,
        f"{copies.WRITER_ID} z": NOW_MS + 1,
    }


def test_of_two_copies_at_once_one_is_told_to_copy_again(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(source, 0)
    append = destination.append_copied

    def race(*args: object, **options: object) -> int:
        monkeypatch.setattr(destination, "append_copied", append)
        copied(source, destination)
        return append(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(destination, "append_copied", race)
    with pytest.raises(StorageError, match="Copy again"):
        copied(source, destination)
    check_equal(source, destination)


# --- deaths --------------------------------------------------------------------------------------


def many(source: DirectoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a log whose copy takes several commits, with a gap, a transaction and producers."""
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", 300)
    source.append_raw("t", 0, joined([batch(0, 3), batch(7, 3, of=4), batch(20, 3)]), now_ms=NOW_MS)
    source.append("t", [("k", "v")], now_ms=NOW_MS)


@pytest.mark.parametrize("spoil", [Spoil.KILLED_BEFORE, Spoil.KILLED_AFTER, Spoil.FAILED])
def test_a_copy_that_dies_at_any_request_is_completed_by_the_next(
    source: DirectoryLog, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    many(source, monkeypatch)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    for number in range(1, 100):
        address = memory_address()
        Impatient.create(WithoutProbe(address))
        monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
        log = ObjectLog(address)
        client = log.client
        assert isinstance(client, SpoiledClient)
        client.spoil({number: spoil})
        with contextlib.suppress(Killed, StorageError):
            copy(source, log, now_ms=NOW_MS)
        again = ObjectLog(address)
        copy(source, again, now_ms=NOW_MS)
        check_equal(source, again)
        if not client.is_spoiled:
            assert number > 10
            return
    pytest.fail("the copy has no end")


def test_a_copy_that_dies_before_any_act_on_files_is_completed_by_the_next(
    source: DirectoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(source, monkeypatch)
    reader = DirectoryLog(source.root, read_only=True, create=False)
    n, is_reached = 0, True
    while is_reached:
        n += 1
        log = DirectoryLog(tmp_path / f"copy-{n}")

        def work(log: DirectoryLog = log) -> None:
            copy(reader, log, now_ms=NOW_MS)

        is_reached = each_act(work, n, Died())
        again = DirectoryLog(log.root)
        copy(reader, again, now_ms=NOW_MS)
        check_equal(reader, again)
        if n % 10 == 0 or not is_reached:
            again.close()
            assert [str(each) for each in verify(again.root, deep=True)] == []
    assert n > 30


def test_a_nights_backup_and_its_way_back_go_on_after_a_death_anywhere(
    source: DirectoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a topic that is refused, one that is gone, a rise of the log start, and a restore."""
    source.create_topic("gone", 1, {}, now_ms=NOW_MS)
    appends(source, "gone", "k")
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", 300)
    add(source, 0)
    first = ObjectLog(memory_address())
    first.create_topic("u", 1, {}, now_ms=NOW_MS)
    copy(source, first, now_ms=NOW_MS)
    source.delete_topic("gone", now_ms=NOW_MS)
    source.create_topic("u", 1, {}, now_ms=NOW_MS)
    appends(source, "u", "k")
    source.delete_records("t", 0, 2, now_ms=NOW_MS)
    source.append_raw("t", 0, joined([batch(7, 3, of=4), batch(20, 3)]), now_ms=NOW_MS)
    appends(source, "t", "k")
    reader = DirectoryLog(source.root, read_only=True, create=False)

    def night(origin: Log, log: Log) -> None:
        refusals: dict[str, KafkaLogError] = {}
        copy(origin, log, now_ms=NOW_MS, refusals=refusals)
        assert set(refusals) == ({"u"} if origin is reader else set())

    n, is_reached = 0, True
    while is_reached:
        n += 1
        backup = DirectoryLog(tmp_path / f"backup-{n}")
        copy(first, backup, now_ms=NOW_MS)
        is_reached = each_act(partial(night, reader, backup), n, Died())
        again = DirectoryLog(backup.root)
        night(reader, again)
        check_equal(reader, again)
        assert again.state().topics.keys() == {"t", "u", "gone"}
        restored = DirectoryLog(tmp_path / f"restored-{n}")
        if each_act(partial(night, again, restored), n, Died()):
            restored = DirectoryLog(restored.root)
        night(again, restored)
        check_equal(reader, restored)
        assert ends_of(restored, "gone") == 1
    assert n > 30


# --- what happens to the source meanwhile, and to the destination -------------------------------


def appends(log: DirectoryLog, topic: str, *keys: str) -> None:
    for key in keys:
        log.append(topic, [(key, "v")], now_ms=NOW_MS)


@pytest.mark.parametrize("merges", [True, False])
def test_a_partition_that_a_cleaner_passes_meanwhile_is_copied_up_to_its_end(
    source: DirectoryLog, destination: Log, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older records of its keys are gone. A merged batch may reach beyond the planned end."""
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", 1)
    monkeypatch.setattr("kafkalog.storage_engine.copying.copy.COMMIT_BYTES", 1)
    source.create_topic("z", 1, now_ms=NOW_MS)
    appends(source, "t", "a", "b")
    appends(source, "z", "k0", "k1", "k2", "k3")
    told: list[tuple[int, int]] = []

    def progress(done: int, of: int) -> None:
        if not told:
            appends(source, "z", "k0", "k1", "k9")
            config = CleanerConfig(merge_batches=merges)
            manager.clean(source, "z", force=True, now_ms=NOW_MS, config=config)
        told.append((done, of))

    found = copy(source, destination, now_ms=NOW_MS, progress=progress)
    assert told[-1][0] == told[-1][1] == 9
    assert [each.end_offset for each in found] == [2, 7]
    for log in (source, destination):
        rows = [row for rows in log.read("z", 0) for row in rows.to_pylist()]
        assert {row["key"]: row["offset"] for row in rows} == {
            b"k2": 2,
            b"k3": 3,
            b"k0": 4,
            b"k1": 5,
            b"k9": 6,
        }
    appends(source, "z", "k1")
    copy(source, destination, now_ms=NOW_MS)
    assert ends_of(destination, "z") == 8


def test_a_copy_during_which_deletions_were_cleaned_away_is_refused(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that they delete came with an earlier copy, more than the retention before."""
    monkeypatch.setattr("kafkalog.storage_engine.copying.copy.COMMIT_BYTES", 1)
    source.create_topic("z", 1, {"delete.retention.ms": "1000"}, now_ms=NOW_MS)
    appends(source, "z", "k0", "k1")
    copy(source, destination, now_ms=NOW_MS)
    appends(source, "t", "a", "b")
    source.append("z", [("k0", None), ("k2", "v")], now_ms=NOW_MS)

    def progress(done: int, of: int) -> None:
        for later_ms in (1, 2000):
            manager.clean(source, "z", force=True, now_ms=NOW_MS + later_ms)

    with pytest.raises(StorageError, match=r"z-0 was cleaned .* deletions may be missing"):
        copy(source, destination, now_ms=NOW_MS + 1000, progress=progress)
    assert ends_of(destination, "z") == 2
    with pytest.raises(InvalidInputError, match="deletions may be missing between"):
        copy(source, destination, now_ms=NOW_MS + 1000)


def test_a_first_copy_of_a_cleaned_log_needs_no_deletions(
    source: DirectoryLog, destination: Log
) -> None:
    source.alter_topic("t", {"delete.retention.ms": "0"})
    appends(source, "t", "a", "b")
    source.append("t", [("a", None), ("c", "v")], now_ms=NOW_MS)
    for later_ms in (1, 2):
        manager.clean(source, "t", force=True, now_ms=NOW_MS + later_ms)
    copied(source, destination)
    assert latest(destination) == latest(source)


def test_a_copy_ends_though_the_first_dirty_offset_lies_above_the_end(
    source: DirectoryLog, destination: Log
) -> None:
    appends(source, "t", "a", "b")
    with source.transaction() as transaction:
        transaction.change_partition("t", 0, first_dirty_offset=9)
        transaction.publish(NOW_MS)
    copied(source, destination)
    assert ends(destination) == (0, 2, 2)


def ends_of(log: Log, topic: str) -> int:
    return log.describe(topic).partitions[0].high_watermark


def delete_all_below(source: DirectoryLog, offset: int) -> None:
    source.delete_records("t", 0, offset, now_ms=NOW_MS)
    source.apply_retention("t", now_ms=NOW_MS)


def watch_commits(destination: Log, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each commit of a copy have one chunk; return where the log begins after each."""
    for module in (copied_batches, copies):
        monkeypatch.setattr(module, "COMMIT_BYTES", 1)
    append, found = destination.append_copied, []

    def append_and_look(*given: Any, **more: Any) -> int:
        rows = append(*given, **more)
        found.append(ends(destination)[0])
        return rows

    monkeypatch.setattr(destination, "append_copied", append_and_look)
    return found


def test_a_copy_takes_a_log_start_that_moved_while_it_read(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer record of a key is gone with it, and the copy has the older one."""
    source.alter_topic("t", {"segment.bytes": "100"})
    appends(source, "t", "k", "j")
    copied(source, destination)
    appends(source, "t", "k", *"jjjjjjjjj")
    create, found = copies._create, watch_commits(destination, monkeypatch)

    def meanwhile(*given: Any) -> None:
        delete_all_below(source, 6)
        create(*given)

    monkeypatch.setattr(copies, "_create", meanwhile)
    copied(source, destination)
    assert len(found) > 3
    assert {*found} == {6}
    assert latest(destination) == latest(source)


def test_a_copy_goes_on_behind_segments_that_went_before_it_opened_them(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_snapshot, "WINDOW", 2)
    source.alter_topic("t", {"segment.bytes": "100"})
    appends(source, "t", *"kjjjjjjjjjjj")
    found = watch_commits(destination, monkeypatch)
    copy(source, destination, now_ms=NOW_MS, progress=lambda *_: delete_all_below(source, 8))
    assert (found[0], found[-1]) == (0, 8)
    assert ends(destination) == ends(source)
    assert latest(destination) == latest(source)


def after_the_state(
    source: DirectoryLog, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let something happen right after a copy has read the source's state."""
    state = source.state

    def state_and_work() -> State:
        found = state()
        monkeypatch.setattr(source, "state", state)
        work()
        return found

    monkeypatch.setattr(source, "state", state_and_work)


@pytest.mark.parametrize("before", [4, 7, 12, 16])
def test_a_log_start_that_moves_while_a_copy_is_checked_is_taken(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    for _ in range(2):
        appends(source, "t", *"abcdabcd")
        manager.clean(source, "t", force=True, now_ms=NOW_MS)
        if not destination.topics():
            copied(source, destination)
    after_the_state(source, lambda: source.delete_records("t", 0, before), monkeypatch)
    copied(source, destination)
    assert ends(destination) == (before, 16, 16)
    assert latest(destination) == latest(source)


def test_a_first_copy_whose_end_the_log_start_passes_is_empty(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    appends(source, "t", "a", "b")

    def work() -> None:
        appends(source, "t", "c", "d")
        delete_all_below(source, 4)

    after_the_state(source, work, monkeypatch)
    assert copied(source, destination) == CopiedPartition("t", 0, 2, 2, 0)
    copied(source, destination)
    assert ends(destination) == (4, 4, 4)


def test_a_topic_that_is_created_again_meanwhile_is_not_mixed_with_the_one_before(
    source: DirectoryLog, destination: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.copying.copy.COMMIT_BYTES", 1)
    source.create_topic("z", 1, now_ms=NOW_MS)
    appends(source, "t", "a")
    appends(source, "z", "old")

    def progress(done: int, of: int) -> None:
        source.delete_topic("z", now_ms=NOW_MS)
        source.create_topic("z", 1, now_ms=NOW_MS)
        appends(source, "z", "new", "new")

    with pytest.raises(StorageError, match=r"'z' was deleted and created again .* Copy again"):
        copy(source, destination, now_ms=NOW_MS, progress=progress)
    assert ends_of(destination, "z") == 0


def test_a_deleted_topic_is_copied_again_once_nothing_of_it_is_left(
    source: DirectoryLog, store: ObjectLog
) -> None:
    appends(source, "t", "a")
    for _ in range(2):
        copied(source, store)
        assert [row["key"] for row in records(store, "read_committed").values()] == [b"a"]
        store.delete_topic("t", now_ms=NOW_MS)
    copied(source, store)
    assert not store.state().deleting


def test_a_deleted_topic_in_shared_objects_is_not_copied_again(
    source: DirectoryLog, store: ObjectLog
) -> None:
    appends(source, "t", "a")
    copied(source, store)
    store.create_topic("u", 1, now_ms=NOW_MS)
    rows = pa.RecordBatch.from_pydict(
        {"topic": ["t", "u"], "key": [b"b", b"b"], "value": [b"", b""]}
    )
    writer = StagedWriter(store, store.state(), now_ms=lambda: NOW_MS)
    for topic in ("t", "u"):
        writer.append(topic, rows.select(["key", "value"]))
    store.commit([writer.finish()], now_ms=NOW_MS)
    store.delete_topic("t", now_ms=NOW_MS)
    with pytest.raises(StorageError, match="its deletion here is not finished"):
        copied(source, store)


@pytest.mark.parametrize("deletes", ["source", "store"])
def test_a_store_forgets_an_open_transaction_whose_records_are_all_deleted(
    source: DirectoryLog, store: ObjectLog, deletes: str
) -> None:
    source.alter_topic("t", {"cleanup.policy": "delete"})
    data = BatchBuilder(base_offset=0, transactional=True, producer=(7, 0, 0), leader_epoch=0)
    for _ in range(3):
        data.add(b"a", b"v", timestamp=NOW_MS)
    source.append_raw("t", 0, data.build().data, now_ms=NOW_MS)
    copied(source, store)
    assert ends(store) == (0, 0, 3)
    assert producers(store)
    (source if deletes == "source" else store).delete_records("t", 0, -1, now_ms=NOW_MS)
    if deletes == "source":
        copied(source, store)
    store.append("t", [("k", "v"), ("l", "v")], now_ms=NOW_MS)
    assert ends(store) == (3, 5, 5)
    assert not producers(store)
    other = ObjectLog(memory_address())
    copied(store, other)
    check_equal(store, other)


def test_records_without_timestamps_are_as_old_as_their_object(
    source: DirectoryLog, store: ObjectLog
) -> None:
    source.alter_topic("t", {"cleanup.policy": "delete", "retention.ms": "1000"})
    for offset in range(3):
        built = BatchBuilder(base_offset=offset, leader_epoch=0).add(b"k", b"v", timestamp=-1)
        source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
    copied(source, store)
    assert not store.apply_retention("t", now_ms=NOW_MS + 1000)
    assert ends(store) == (0, 3, 3)
    store.apply_retention("t", now_ms=NOW_MS + 1001)
    assert ends(store) == (3, 3, 3)


def test_the_largest_timestamp_is_that_of_a_record_and_of_no_emptied_batch(
    tmp_path: Path, source: DirectoryLog, store: ObjectLog
) -> None:
    """The last batch of a producer stays, with its largest timestamp, if its record goes."""
    source.alter_topic("t", {"segment.bytes": "150"})
    for offset, (key, later_ms) in enumerate([(b"a", 90), (b"x", 1), (b"y", 50), (b"a", 20)]):
        producer = (1, 0, 0) if offset == 0 else (-1, -1, -1)
        built = BatchBuilder(base_offset=offset, leader_epoch=0, producer=producer)
        built.add(key, b"v" * 60, timestamp=NOW_MS + later_ms)
        source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
    copied(source, store)
    assert store.offset_for_time("t", -3) == {0: (0, NOW_MS + 90, 0)}
    manager.clean(store, "t", force=True, now_ms=NOW_MS)
    with DirectoryLog(tmp_path / "back") as back:
        copied(store, back)
        for log in (store, back):
            assert log.offset_for_time("t", -3) == {0: (2, NOW_MS + 50, 0)}


HOUR_MS = 3_600_000


def test_records_without_timestamps_wait_for_the_lag_from_when_their_object_was_added(
    source: DirectoryLog, store: ObjectLog
) -> None:
    config = {"cleanup.policy": "compact", "min.compaction.lag.ms": str(HOUR_MS)}
    source.alter_topic("t", {**config, "segment.bytes": "100", "min.cleanable.dirty.ratio": "0"})
    for offset in range(4):
        built = BatchBuilder(base_offset=offset, leader_epoch=0).add(b"k", b"v" * 40, timestamp=-1)
        source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
    copied(source, store)
    for force in (False, True):
        manager.clean(store, "t", force=force, now_ms=NOW_MS + HOUR_MS - 1)
        assert len(records(store, "read_committed")) == 4
    manager.clean(store, "t", now_ms=NOW_MS + HOUR_MS + 1)
    assert [*records(store, "read_committed")] == [3]


def test_a_segment_that_a_cleaning_emptied_keeps_no_record_behind_it_from_retention(
    source: DirectoryLog, store: ObjectLog
) -> None:
    config = {"retention.ms": str(HOUR_MS), "segment.bytes": "100"}
    source.alter_topic("t", {**config, "min.cleanable.dirty.ratio": "0"})
    for offset, key in enumerate([b"a", b"b", b"c", b"a", b"b", b"c"]):
        built = BatchBuilder(base_offset=offset, leader_epoch=0).add(
            key, b"v" * 40, timestamp=NOW_MS
        )
        source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
    copied(source, store)
    manager.clean(store, "t", force=True, now_ms=NOW_MS + HOUR_MS - 1)
    assert ends(store) == (0, 6, 6)
    store.apply_retention("t", now_ms=NOW_MS + HOUR_MS + 1)
    assert ends(store) == (6, 6, 6)


def test_a_cleaning_makes_records_without_timestamps_no_younger(
    source: DirectoryLog, store: ObjectLog
) -> None:
    config = {"retention.ms": str(HOUR_MS), "segment.bytes": "100"}
    source.alter_topic("t", {**config, "min.cleanable.dirty.ratio": "0"})
    for offset, key in enumerate([b"a", b"b", b"a", b"c"]):
        built = BatchBuilder(base_offset=offset, leader_epoch=0).add(key, b"v" * 40, timestamp=-1)
        source.append_raw("t", 0, built.build().data, now_ms=NOW_MS)
        now_ms = NOW_MS + offset * HOUR_MS // 4
        copied(source, store, now_ms)
        manager.clean(store, "t", force=True, now_ms=now_ms)
    assert [*records(store, "read_committed")] == [1, 2, 3]
    for offset in (2, 3, 4):
        store.apply_retention("t", now_ms=NOW_MS + HOUR_MS + (offset - 1) * HOUR_MS // 4 + 1)
        assert ends(store)[0] == offset
