"""A log in an object store gives what a log directory gives; and the requests that this takes."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from kafkalog.datasource import stored_partition
from kafkalog.datasource.batch_reader import KafkaLogBatchReader
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.datasource.stored_partition import StoredPartition
from kafkalog.errors import (
    DataLossError,
    InvalidInputError,
    KafkaLogError,
    MomentPassedError,
    UnknownTopicError,
)
from kafkalog.storage_engine.object_store import client as client_module
from kafkalog.storage_engine.object_store import commit_log, mixed_object
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.polled_log import PolledLog
from kafkalog.storage_engine.object_store.store_state import StoreChange, StoreState
from tests.object_store_proxy import StoreProxy
from tests.unit.datasource.logs import NOW_MS, read_batch, rows, source
from tests.unit.datasource.streaming_query import StreamingQuery
from tests.unit.datasource.two_logs import TwoLogs, sorted_rows


@pytest.fixture
def two(tmp_path: Path) -> TwoLogs:
    return TwoLogs(tmp_path).topic()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests of all clients of this process, each as its kind."""
    found: list[str] = []
    ask = ObjectClient._ask

    def noted(self: ObjectClient, kind: str, name: str, act: Any, *, requests: int = 1) -> Any:
        found.extend([kind] * requests)
        return ask(self, kind, name, act, requests=requests)

    monkeypatch.setattr(ObjectClient, "_ask", noted)
    client_module.shared_client.cache_clear()
    yield found


def both(two: TwoLogs, **options: str) -> tuple[list[Any], list[Any]]:
    """What a batch read of each log gives, or the text of its error without its place."""
    found = []
    for place, more in ((two.directory, {}), (two.url, two.options)):
        try:
            found.append(sorted_rows(read_batch(place, **options, **more)))
        except KafkaLogError as error:
            found.append([type(error), str(error)])
    return found[0], found[1]


OPTIONS: list[dict[str, str]] = [
    {},
    {"includeHeaders": "true"},
    {"startingOffsets": '{"t":{"0":3,"1":0,"2":-2}}'},
    {"endingOffsets": '{"t":{"0":3,"1":-1,"2":5}}'},
    {"startingOffsets": '{"t":{"0":2,"1":2,"2":2}}', "endingOffsets": '{"t":{"0":2,"1":4,"2":9}}'},
    {"startingTimestamp": str(NOW_MS + 30)},
    {"startingTimestamp": str(NOW_MS + 30), "endingTimestamp": str(NOW_MS + 50)},
    {"startingTimestamp": str(NOW_MS + 10**6)},
    {
        "startingTimestamp": str(NOW_MS + 10**6),
        "startingOffsetsByTimestampStrategy": "latest",
    },
    {"startingOffsetsByTimestamp": f'{{"t":{{"0":{NOW_MS + 9},"1":-2,"2":-3}}}}'},
    {"endingOffsets": '{"t":{"0":300,"1":-1,"2":-1}}'},
    {"endingOffsets": '{"t":{"0":300,"1":-1,"2":-1}}', "failOnDataLoss": "false"},
    {"minPartitions": "7"},
    {"maxRecordsPerPartition": "4"},
    {"kafka.isolation.level": "read_uncommitted"},
    {"subscribePattern": "[tu]"},
    {"assign": '{"t":[0,2]}'},
    {"subscribe": "gone"},
    {"keys": '["k1", "k3"]'},
    {"keys": '["k1"]', "partitioner": "murmur2"},
    {"view": "latest"},
    {"view": "latest", "keys": '["k1", "no such key"]'},
    {"view": "latest", "endingOffsets": '{"t":{"0":3,"1":4,"2":5}}'},
    {"view": "latest", "endingOffsets": '{"t":{"0":3,"1":4,"2":5}}', "keys": '["k2"]'},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_batch_read_gives_the_records_of_a_directory(
    two: TwoLogs, options: dict[str, str]
) -> None:
    two.topic("u", 1)
    for count in (20, 1, 40, 3):
        two.append(count)
    two.append(5, "u", 1)

    ours, stored = both(two, **options)

    assert stored == ours
    assert ours or "startingOffsetsByTimestampStrategy" in options


def test_several_tasks_and_several_objects_of_each_are_read_in_their_order(
    two: TwoLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_object, "OBJECT_SIZE_MAX", 700)
    for _ in range(3):
        two.commit(20, 1, 35, 13, batch_size=150)
    assert len(two.logs[1].client.newest("data", 100)) > 12
    for options in (
        {"includeHeaders": "true"},
        {"view": "latest"},
        {"maxRecordsPerPartition": "5"},
    ):
        ours, stored = both(two, **options)
        assert stored == ours
        assert ours


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"startingOffsets": '{"t":{"0":1,"1":3,"2":5}}'},
        {"startingOffsets": '{"t":{"0":1,"1":3,"2":5}}', "failOnDataLoss": "false"},
        {"startingTimestamp": str(NOW_MS)},
        {"view": "latest"},
        {"view": "latest", "keys": '["k1", "k3"]'},
    ],
    ids=str,
)
def test_deleted_records_are_gone_as_in_a_directory(two: TwoLogs, options: dict[str, str]) -> None:
    for count in (20, 7, 40):
        two.append(count)
    for log in two.logs:
        for partition, before in ((0, 4), (1, 12), (2, -1)):
            log.delete_records("t", partition, before, now_ms=NOW_MS)
    ours, stored = both(two, **options)
    assert stored == ours
    assert ours


def test_a_stream_that_began_before_deleted_records_loses_them_as_in_a_directory(
    two: TwoLogs,
) -> None:
    two.append(20)
    found = []
    for place, log in zip((two.directory, two.url), two.logs, strict=True):
        for fail in ("true", "false"):
            options = {"startingOffsets": '{"t":{"0":1,"1":1,"2":1}}', "failOnDataLoss": fail}
            query = StreamingQuery(place, options)
            query.start()
            query.plan()
            log.delete_records("t", 1, 4, now_ms=NOW_MS)
            query.start()  # one that goes on plans from what it has seen as it chose the end
            if fail == "true":
                with pytest.raises(DataLossError) as fault:
                    query.run_planned()
                found.append(str(fault.value))
            else:
                found.append(sorted_rows(query.run_planned()))
    assert found[2:] == found[:2]
    assert len(found[1]) == 6 + 3 + 5


def test_an_empty_topic_is_read_as_empty(two: TwoLogs) -> None:
    assert both(two) == both(two, view="latest") == ([], [])


@pytest.mark.parametrize("options", [{"subscribe": "t"}, {"assign": '{"t":[0]}'}])
def test_the_load_says_that_there_is_no_log(options: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match=r"option path: memory://nobody/nothing: .*no log"):
        KafkaLogDataSource({"path": "memory://nobody/nothing", **options})


def test_a_load_sends_one_request(two: TwoLogs, asked: list[str]) -> None:
    source(two.url)
    assert asked == ["GET"]


def test_a_log_that_replaces_another_at_its_address_is_read(tmp_path: Path) -> None:
    old = TwoLogs(tmp_path / "old").topic()
    old.append(9)
    assert len(read_batch(old.url)) == 9
    client = old.logs[1].client
    client.delete([entry.name for entry in client.list("")])
    TwoLogs(tmp_path / "new", old.url).topic().append(4)
    assert len(read_batch(old.url)) == 4


def replace(two: TwoLogs, tmp_path: Path, count: int) -> None:
    """Delete the log, and create another one, with other records of the same topic."""
    client = two.logs[1].client
    client.delete([entry.name for entry in client.list("")])
    TwoLogs(tmp_path / "new", two.url).topic()
    with ObjectLog(two.url) as other:
        for _ in range(count):
            other.append("t", [(b"k", b"other")], now_ms=NOW_MS)


@pytest.mark.parametrize("count", [0, 3, 9])
def test_a_stream_of_a_log_that_another_replaces_fails_with_the_reason(
    two: TwoLogs, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "CHECK_AFTER_S", -1.0)
    for _ in range(4):
        two.append(3)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.drain()
    replace(two, tmp_path, count)
    with pytest.raises(InvalidInputError, match="the log was deleted, and created again"):
        query.drain()


@pytest.mark.parametrize("options", [{}, {"view": "latest"}], ids=str)
def test_a_read_whose_object_is_gone_says_to_load_again(
    two: TwoLogs, options: dict[str, str]
) -> None:
    two.append(6)
    reader, found = planned(two, **options)
    client = two.logs[1].client
    client.delete([entry.name for entry in client.list("data")])
    told = r"data/.*missing.* load the DataFrame, and run the action again\.$"
    with pytest.raises(MomentPassedError, match=told):
        rows(reader, found)


def test_a_read_whose_object_is_lost_ends_though_the_log_grows(
    two: TwoLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        two.append(6)
    reader, found = planned(two, endingOffsets='{"t":{"0":2,"1":2,"2":2}}')
    log = two.logs[1]
    client = log.client  # type: ignore[attr-defined]
    (first, *_) = log.store_state().objects  # type: ignore[attr-defined]
    client.delete([first])
    shared = PolledLog.shared

    def grown(address: Any) -> Any:
        two.append(3)
        return shared(address)

    monkeypatch.setattr(PolledLog, "shared", grown)
    with pytest.raises(MomentPassedError, match="the object is missing"):
        rows(reader, found)


def written_anew(log: ObjectLog, **partition: int) -> None:
    """Do as a regrouping: write all objects again under other names, and delete the old ones.

    `partition` are fields of partition t-0 that change with it, as after a cleaning.
    """
    old = log.store_state().objects
    names = {name: name.replace("data/", "data/1", 1) for name in old}
    for name, new in names.items():
        log.client.put_unique(new, log.client.get(name).data)  # type: ignore[union-attr]

    def prepare(state: StoreState) -> Any:
        change = StoreChange()
        for name, new in names.items():
            change.add(new, old[name].size, old[name].extents)
            change.drop(name)
        if partition:
            held = dataclasses.replace(state.log.topic("t").partitions[0], **partition)
            change.partition("t", 0, held)
        return change.record(NOW_MS)

    log._log.commit(prepare)
    log.client.delete(list(old))


def test_a_read_whose_objects_were_regrouped_reads_the_records_where_they_are(
    two: TwoLogs, asked: list[str]
) -> None:
    for _ in range(3):
        two.append(6)
    reader, found = planned(two)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.plan()
    written_anew(two.logs[1])
    expected = sorted_rows(read_batch(two.directory))
    assert sorted_rows(rows(reader, found)) == sorted_rows(query.run_planned()) == expected
    asked.clear()
    assert sorted_rows(rows(*planned(two))) == expected
    assert asked == ["GET"] * (3 + 3)  # nothing is asked for again: the plan knows


@pytest.mark.parametrize("columns", [None, ("value", "key")])
def test_a_read_goes_on_behind_what_it_has_yielded(
    two: TwoLogs, columns: Sequence[str] | None
) -> None:
    for _ in range(20):
        two.append(6, size=300)
    data_source = source(two.url, subscribe="t")
    schema = data_source.schema()
    if columns:
        schema = StructType([schema[name] for name in columns])
    reader = data_source.reader(schema)
    (task,) = reader.partitions()
    read = reader.read(task)
    first = next(read)
    written_anew(two.logs[1])
    second = next(read)
    written_anew(two.logs[1])
    assert 0 < first.num_rows + second.num_rows < 40
    found = pa.Table.from_batches([first, second, *read])
    expected = pa.Table.from_batches(
        [batch for each in range(3) for batch in two.logs[0].read("t", each)]
    )
    assert found.select(["key", "value"]) == expected.select(["key", "value"])


@pytest.mark.parametrize("cleaned", [{"swapped_at": 9}, {"first_dirty_offset": 2}], ids=str)
def test_a_batch_read_whose_objects_were_cleaned_is_of_a_moment_that_has_passed(
    two: TwoLogs, cleaned: dict[str, int]
) -> None:
    two.append(6)
    reader, found = planned(two)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.plan()
    written_anew(two.logs[1], **cleaned)
    with pytest.raises(MomentPassedError, match="run the action again"):
        rows(reader, found)
    assert len(query.run_planned()) == 6


@pytest.mark.parametrize(
    "options", [{}, {"minPartitions": "4"}, {"keys": '["k1"]'}, {"startingOffsets": "earliest"}]
)
def test_a_batch_read_that_is_planned_again_ends_where_it_was_planned(
    two: TwoLogs, options: dict[str, str]
) -> None:
    two.append(12)
    expected = sorted_rows(read_batch(two.directory, **options))
    reader, found = planned(two, **options)
    two.append(12)
    written_anew(two.logs[1])
    assert sorted_rows(rows(reader, found)) == expected


@pytest.mark.parametrize("fails", ["true", "false"])
@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_records_that_retention_takes_before_they_are_read_are_a_data_loss(
    tmp_path: Path, kind: str, fails: str
) -> None:
    two = TwoLogs(tmp_path).topic(partitions=1, **{"segment.bytes": "14"}).topic("u", 1)
    for _ in range(3):
        two.append(4, partitions=1)
        two.append(4, topic="u", partitions=1)
    options = {"subscribe": "t,u", "failOnDataLoss": fails}
    query = StreamingQuery(two.url, {"startingOffsets": "earliest", **options})
    reader, found = planned(two, **options)
    query.start()
    query.plan()
    written_anew(two.logs[1], log_start_offset=8, first_dirty_offset=8)

    def read() -> list[Any]:
        return rows(reader, found) if kind == "batch" else query.run_planned()

    if fails == "true":
        with pytest.raises(DataLossError, match="COULD_NOT_READ_OFFSET_RANGE"):
            read()
    else:
        places = [(row["topic"], row["offset"]) for row in read()]
        assert sorted(places) == [
            *(("t", offset) for offset in range(8, 12)),
            *(("u", offset) for offset in range(12)),
        ]


def test_a_view_whose_object_is_gone_is_not_planned_again(two: TwoLogs) -> None:
    two.append(6)
    reader, found = planned(two, view="latest")
    written_anew(two.logs[1])
    with pytest.raises(MomentPassedError, match="run the action again"):
        rows(reader, found)


def test_a_read_of_a_topic_that_was_created_again_meanwhile_is_a_data_loss(two: TwoLogs) -> None:
    two.append(6)
    reader, found = planned(two)
    log = two.logs[1]
    log.delete_topic("t", now_ms=NOW_MS)
    log.client.delete([entry.name for entry in log.client.list("data")])
    with pytest.raises(DataLossError, match=r"PARTITIONS_DELETED.*t-0 is gone"):
        rows(reader, found)
    log.create_topic("t", 3)
    with pytest.raises(DataLossError, match=r"PARTITIONS_DELETED.*'t' was deleted and created"):
        rows(reader, found)


def test_a_stream_whose_object_is_gone_says_to_start_again(two: TwoLogs) -> None:
    two.append(6)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.plan()
    client = two.logs[1].client
    client.delete([entry.name for entry in client.list("data")])
    with pytest.raises(MomentPassedError, match=r"data/.*missing.* start the query again"):
        query.run_planned()


def test_options_of_a_store_are_refused_for_a_directory(two: TwoLogs) -> None:
    with pytest.raises(InvalidInputError, match=r"store\.region.*names no object store"):
        source(two.directory, **{"store.region": "us-east-1"})


# --- tasks ---------------------------------------------------------------------------------------


def planned(two: TwoLogs, **options: str) -> tuple[KafkaLogBatchReader, list[StoredPartition]]:
    data_source = source(two.url, **options)
    reader = data_source.reader(data_source.schema())
    found = [pickle.loads(pickle.dumps(each)) for each in reader.partitions()]
    assert all(isinstance(each, StoredPartition) for each in found)
    return reader, found


def places(partitions: list[StoredPartition]) -> list[list[tuple[int, int, int]]]:
    return [
        [(each.range.partition.partition, *each.range.bounds) for each in one.ranges]
        for one in partitions
    ]


def test_small_neighbours_share_a_task(two: TwoLogs) -> None:
    two.append(9)
    _, found = planned(two)
    assert places(found) == [[(0, 0, 3), (1, 0, 3), (2, 0, 3)]]


def test_a_large_partition_is_split_between_extents(
    two: TwoLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        two.append(6, size=500)
    size = max(each.extents[0].extent.size for each in planned(two)[1][0].ranges)
    monkeypatch.setattr(stored_partition, "TASK_BYTES", size)
    monkeypatch.setattr(stored_partition, "SPLIT_BYTES", 2 * size)
    reader, found = planned(two)
    cuts = [(0, 4), (4, 8), (8, 12)]
    assert places(found) == [[(number, *cut)] for number in range(3) for cut in cuts]
    assert sorted_rows(rows(reader, found)) == sorted_rows(read_batch(two.directory))


def test_a_plan_is_of_one_moment(two: TwoLogs) -> None:
    two.append(6)
    reader, found = planned(two)
    two.append(6)
    assert len(rows(reader, found)) == 6


def test_options_that_split_a_read_split_it_as_in_spark(two: TwoLogs) -> None:
    two.append(30)
    assert len(planned(two, minPartitions="6")[1]) == 6
    assert len(planned(two, maxRecordsPerPartition="5")[1]) == 6


# --- requests ------------------------------------------------------------------------------------


def test_a_batch_read_opens_the_log_once_and_asks_once_for_each_object(
    two: TwoLogs, asked: list[str]
) -> None:
    for _ in range(40):
        two.append(12)
    asked.clear()
    reader, found = planned(two)
    # The mark at load; the mark, the commits, and the boundary.
    assert (asked.count("LIST"), asked.count("GET")) == (1, 1 + 1 + 41 + 1)
    asked.clear()
    assert len(rows(reader, found)) == 480
    assert asked == ["GET"] * 40
    asked.clear()
    planned(two)
    assert asked == ["GET"] * 3  # the mark at load; the mark, and a poll


def test_an_s3_store_gets_the_requests_that_are_counted(
    tmp_path: Path, s3_address: StoreAddress, store_proxy: StoreProxy, asked: list[str]
) -> None:
    options = {
        "store.endpoint": str(s3_address.endpoint),
        "store.region": "us-east-1",
        "store.allow_http": "true",
    }
    two = TwoLogs(tmp_path, str(s3_address), **options).topic()
    for _ in range(6):
        two.append(30)
    store_proxy.reset()
    asked.clear()
    found = read_batch(two.url, **options)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest", **options})
    query.start()
    assert (
        sorted_rows(query.drain()) == sorted_rows(found) == sorted_rows(read_batch(two.directory))
    )
    assert store_proxy.counts == Counter(asked)


def test_a_view_of_small_partitions_asks_once_for_each_object(
    two: TwoLogs, asked: list[str]
) -> None:
    for _ in range(5):
        two.append(12)
    reader, found = planned(two, view="latest")
    asked.clear()
    assert rows(reader, found)
    assert asked == ["GET"] * 5


def test_a_time_is_looked_up_in_the_extents_that_may_have_it(
    two: TwoLogs, asked: list[str]
) -> None:
    for _ in range(5):
        two.append(30)
    asked.clear()
    _, found = planned(two, startingTimestamp=str(NOW_MS + 100))
    opened = 1 + 1 + 6 + 1
    assert asked.count("GET") == opened + 3  # one for each partition, in the fourth object
    assert {start for (_, start, _) in places(found)[0]} == {33, 34}


# --- streams -------------------------------------------------------------------------------------


STREAMS: list[dict[str, str]] = [
    {"startingOffsets": "earliest"},
    {},
    {"startingOffsets": '{"t":{"0":3,"1":-1,"2":-2}}'},
    {"startingTimestamp": str(NOW_MS + 5)},
    {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"},
    {"startingOffsets": "earliest", "minOffsetsPerTrigger": "9"},
    {"startingOffsets": "earliest", "includeHeaders": "true", "minPartitions": "5"},
    {"view": "latest"},
    {"view": "latest", "maxOffsetsPerTrigger": "4"},
]


def in_order(batches: list[list[dict[str, Any]] | None]) -> list[list[dict[str, Any]]]:
    return [sorted_rows(batch or []) for batch in batches]


@pytest.mark.parametrize("options", STREAMS, ids=str)
def test_a_stream_gives_the_micro_batches_of_a_directory(
    two: TwoLogs, options: dict[str, str]
) -> None:
    two.append(13)
    queries = [StreamingQuery(place, dict(options)) for place in (two.directory, two.url)]
    found: list[list[Any]] = [[], []]
    for count in (7, 1, 30, 0):
        for query, batches in zip(queries, found, strict=True):
            query.start()
            batches += [query.trigger() for _ in range(6)]
        if count:
            two.append(count)
    assert in_order(found[1]) == in_order(found[0])
    assert any(found[0])


def test_a_stream_with_a_target_ends_at_it(two: TwoLogs) -> None:
    two.append(12)
    for place in (two.directory, two.url):
        query = StreamingQuery(place, {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5"})
        query.start(available_now=True)
        assert len(query.drain()) == 12


@pytest.mark.parametrize("is_available_now", [True, False])
def test_a_query_given_another_log_by_mistake_plans_nothing_and_goes_on_in_its_own(
    two: TwoLogs, tmp_path: Path, is_available_now: bool
) -> None:
    two.append(6)
    other = TwoLogs(tmp_path / "other").topic().append(3)
    for place, mistaken in ((two.directory, other.directory), (two.url, other.url)):
        query = StreamingQuery(place, {"startingOffsets": "earliest"})
        assert len(query.drain()) == 6
        planned = list(query.planned)
        query.root = mistaken
        query.start(available_now=is_available_now)
        with pytest.raises(DataLossError, match=r"t-0's offset was changed from 2 to 1.*\[0, 1\)"):
            query.trigger()
        assert query.planned == planned
        query.root = place
        query.start(available_now=is_available_now)
        assert query.drain() == []


def test_a_topic_that_is_deleted_is_a_data_loss(two: TwoLogs) -> None:
    two.append(6)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    assert len(query.trigger() or []) == 6
    two.logs[1].delete_topic("t", now_ms=NOW_MS)
    with pytest.raises(DataLossError, match="PARTITIONS_DELETED"):
        query.trigger()
    with pytest.raises(UnknownTopicError):
        read_batch(two.url)


def test_a_stream_asks_once_while_nothing_is_committed(two: TwoLogs, asked: list[str]) -> None:
    two.append(6)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.drain()
    asked.clear()
    assert query.trigger() is None
    assert asked == ["GET"]


def test_a_micro_batch_asks_little_for_its_plan_and_once_for_each_object(
    two: TwoLogs, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two.append(6)
    query = StreamingQuery(two.url, {"startingOffsets": "earliest"})
    query.start()
    query.drain()
    two.append(60)
    asked.clear()
    assert query.plan()
    assert asked == ["GET"] * 3  # the commit, none after it, the boundary
    asked.clear()
    assert len(query.run_planned()) == 60
    assert asked == ["GET"] * 2  # the mark, as for each load; the object


def test_options_for_a_store_are_part_of_the_plan_and_hold_no_secret(two: TwoLogs) -> None:
    options = SourceOptions.parse({"path": two.url, "subscribe": "t"})
    assert options.store is not None and str(options.store) == two.url
    assert options.directories == ()


@pytest.mark.parametrize("options", [{}, {"view": "latest"}], ids=str)
def test_a_topic_that_is_created_again_and_is_longer_is_a_data_loss_of_a_running_query(
    two: TwoLogs, options: dict[str, str]
) -> None:
    two.append(3)
    queries = [
        StreamingQuery(place, {"startingOffsets": "earliest", **options})
        for place in (two.directory, two.url)
    ]
    for query in queries:
        query.start()
        assert query.drain()
    for log in two.logs:
        log.delete_topic("t", now_ms=NOW_MS)
    two.topic()
    two.append(12)
    for query in queries:
        with pytest.raises(DataLossError, match="'t' was deleted and created again"):
            query.trigger()
