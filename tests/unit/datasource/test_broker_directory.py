"""A broker's log directories as the source's address: planned, read and streamed as they move."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafkalog.datasource import latest_ends
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import DataLossError, InvalidInputError
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import COMMIT, at_times, joined, marker
from tests.unit.datasource.logs import broker_directory, rows, source
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import BrokerRoot

ALL = ReadAllAvailable()


def batch(address: Any, **options: str) -> list[tuple[int, int]]:
    data_source = source(address, **options)
    reader = data_source.reader(data_source.schema())
    return sorted((row["partition"], row["offset"]) for row in rows(reader, reader.partitions()))


def stream(address: Any, **options: str) -> KafkaLogStreamReader:
    data_source = source(address, **options)
    return data_source.streamReader(data_source.schema())


def test_a_batch_reads_the_partitions_that_are_here(tmp_path: Path) -> None:
    root = broker_directory(tmp_path / "log")
    expected = [(0, offset) for offset in range(100)] + [(2, offset) for offset in range(30)]
    assert batch(root.path) == expected
    assert batch(root.path, minPartitions="5") == expected
    assert batch(root.path, view="latest") != []
    assert batch(root.path, startingOffsets='{"t":{"0":95,"2":-2}}') == expected[95:]
    with pytest.raises(InvalidInputError):
        batch(root.path, startingOffsets='{"t":{"0":95,"1":-2,"2":-2}}')


def test_several_directories_are_one_address(tmp_path: Path) -> None:
    first, second = broker_directory(tmp_path / "a"), BrokerRoot(tmp_path / "b")
    second.partition("t-1", (0,), 10)
    assert len(batch(f"{first.path},file://{second.path}")) == 140
    assert len(batch(f"file:{first.path} , {second.path}")) == 140


def test_a_comma_in_a_name_begins_no_list(tmp_path: Path) -> None:
    root = broker_directory(tmp_path / "a,b")
    assert len(batch(root.path)) == 130


def test_a_stream_follows_a_live_brokers_checkpoints(tmp_path: Path) -> None:
    root = broker_directory(tmp_path / "log")
    with root.alive():
        reader = stream(root.path, startingOffsets="earliest")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        assert end == {"t": {"0": 40, "2": 10}}
        assert len(rows(reader, reader.partitions(start, end))) == 50
        assert reader.latestOffset(end, ALL) == end
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 65, "t-2": 10})
        later = reader.latestOffset(end, ALL)
        assert later == {"t": {"0": 65, "2": 10}}
        found = rows(reader, reader.partitions(end, later))
        assert [row["offset"] for row in found] == list(range(40, 65))
    last = reader.latestOffset(later, ALL)
    assert last == {"t": {"0": 100, "2": 30}}
    with root.alive():  # started again, its checkpoint lags behind
        assert reader.latestOffset(last, ALL) == last
        assert len(rows(reader, reader.partitions(later, last))) == 55


def transactions(path: Path) -> BrokerRoot:
    """A committed transaction of offsets 0 to 9, whose marker lies above another, open one."""
    root = BrokerRoot(path)
    partition = root.partition("t-0", (0,), 0)
    batches = [
        at_times(0, (0,) * 10, producer_id=1, transactional=True),
        at_times(10, (0,) * 2, producer_id=2, transactional=True),
        marker(12, COMMIT, 1),
    ]
    (partition / f"{0:020}.log").write_bytes(joined(batches))
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 13})
    return root


COMMITTED = {"kafka.isolation.level": "read_committed"}


@pytest.mark.parametrize("view", [{}, {"view": "latest"}])
def test_a_stream_knows_the_markers_above_its_end_when_a_broker_starts_again(
    tmp_path: Path, view: dict[str, str]
) -> None:
    root = transactions(tmp_path / "log")
    with root.alive():
        reader = stream(root.path, startingOffsets="earliest", **COMMITTED, **view)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        assert end == {"t": {"0": 10}}
        planned = reader.partitions(start, end)
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 4})
        assert len(rows(reader, planned)) == (3 if view else 10)
        assert len(rows(reader, reader.partitions(start, end))) == (3 if view else 10)


def test_a_batch_knows_the_markers_above_its_end_when_a_broker_starts_again(tmp_path: Path) -> None:
    root = transactions(tmp_path / "log")
    with root.alive():
        data_source = source(root.path, minPartitions="2", **COMMITTED)
        reader = data_source.reader(data_source.schema())
        planned = reader.partitions()
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 4})
        assert len(planned) == 2 and len(rows(reader, planned)) == 10


def waits_by(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None] | None) -> None:
    """Who waits for a broker does so by this; a thread of py4j sleeps as before."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(latest_ends, "time", clock)


def set_back(root: BrokerRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a start: the checkpoint is an old one, and moves while somebody waits for it."""
    later = iter([4, 13])
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 4})

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": next(later)})

    waits_by(monkeypatch, sleep)


def test_a_query_that_starts_with_its_broker_waits_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = transactions(tmp_path / "log")
    set_back(root, monkeypatch)
    with root.alive():
        reader = stream(root.path, startingOffsets="earliest", **COMMITTED)
        planned = reader.partitions({"t": {"0": 0}}, {"t": {"0": 10}})
        assert len(rows(reader, planned)) == 10


@pytest.fixture(params=["read_committed", "read_uncommitted"])
def isolation(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"kafka.isolation.level": request.param}


def times(path: Path) -> BrokerRoot:
    """Offset n has the timestamp 1000 + n; the last record is of a transaction."""
    root = BrokerRoot(path)
    batches = [at_times(offset, (1000 + offset,)) for offset in range(11)]
    batches += [
        at_times(11, (1011,), producer_id=1, transactional=True),
        marker(12, COMMIT, 1, timestamp=1012),
    ]
    log = root.partition("t-0", (0,), 0) / f"{0:020}.log"
    log.write_bytes(joined(batches))
    return root


def since_1006(root: BrokerRoot, strategy: str, isolation: dict[str, str]) -> KafkaLogStreamReader:
    options = {"startingOffsetsByTimestampStrategy": strategy, **isolation}
    return stream(root.path, startingTimestamp="1006", **options)


@pytest.mark.parametrize("moves", ["while it waits", "before it waits"])
@pytest.mark.parametrize("strategy", ["error", "latest"])
def test_a_first_batch_from_a_time_on_that_comes_again_with_its_broker_is_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    isolation: dict[str, str],
    strategy: str,
    moves: str,
) -> None:
    root = times(tmp_path / "log")
    reader = since_1006(root, strategy, isolation)  # the broker was killed: it is read to its end
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    assert (start, end) == ({"t": {"0": 6}}, {"t": {"0": 13}})
    set_back(root, monkeypatch)
    with root.alive():
        again = since_1006(root, strategy, isolation)
        start = again.initialOffset()
        assert start == {"t": {"0": -1}}, "the broker tells no record that is as young"
        if moves == "before it waits":
            root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 13})
        for _ in range(2):
            found = rows(again, again.partitions(start, end))
            assert [row["offset"] for row in found] == list(range(6, 12))
        assert again.latestOffset(end, ALL) == end


@pytest.mark.parametrize("strategy", ["error", "latest"])
def test_a_first_batch_from_a_time_on_is_not_passed_over_for_a_broker_that_never_comes_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: dict[str, str], strategy: str
) -> None:
    root = times(tmp_path / "log")
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 4})
    monkeypatch.setattr(latest_ends, "_WAIT_S", 0.1)
    with root.alive():
        reader = since_1006(root, strategy, isolation)
        start = reader.initialOffset()
        with pytest.raises(DataLossError, match=r"up to the offset 13.*available are \[0, 4\)"):
            reader.partitions(start, {"t": {"0": 13}})


def test_a_partition_of_which_nothing_is_to_be_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = transactions(tmp_path / "log")
    root.partition("t-1", (0,), 30)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 13, "t-1": 30})
    waits_by(monkeypatch, None)
    with root.alive():
        reader = stream(root.path, startingOffsets="earliest", **COMMITTED)
        planned = reader.partitions({"t": {"0": 12, "1": 0}}, {"t": {"0": 12, "1": 30}})
        assert len(rows(reader, planned)) == 30


def test_a_broker_that_does_not_come_so_far_is_waited_for_no_longer_than_by_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = transactions(tmp_path / "log")
    monkeypatch.setattr(latest_ends, "_WAIT_S", 0.1)
    with root.alive():
        reader = stream(root.path, startingOffsets="earliest", **COMMITTED)
        planned = reader.partitions({"t": {"0": 0}}, {"t": {"0": 12}})
        with pytest.raises(InvalidInputError, match="still open from offset 10 on"):
            rows(reader, planned)


def test_nobody_waits_for_a_broker_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = transactions(tmp_path / "log")
    waits_by(monkeypatch, None)
    reader = stream(root.path, startingOffsets="earliest", **COMMITTED)
    planned = reader.partitions({"t": {"0": 0}}, {"t": {"0": 12}})
    with pytest.raises(InvalidInputError, match="still open from offset 10 on"):
        rows(reader, planned)


def test_a_sink_refuses_a_brokers_directory(tmp_path: Path) -> None:
    from kafkalog.storage_engine.metadata.address import log_directory

    with pytest.raises(InvalidInputError, match="can only be read"):
        log_directory({"path": f"{tmp_path}/a,{tmp_path}/b"})


def test_a_topic_whose_id_a_broker_writes_late_is_not_one_that_was_created_again(
    tmp_path: Path,
) -> None:
    root = BrokerRoot(tmp_path / "log")
    directory = root.partition("t-0", topic_id=None)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 100})
    reader = stream(root.path, startingOffsets="earliest")
    assert reader.latestOffset({"t": {"0": 0}}, ALL) == {"t": {"0": 100}}
    metadata = f"version: 0\ntopic_id: {broker_root.TOPIC_ID}"
    (directory / layout.PARTITION_METADATA).write_text(metadata)
    time.sleep(0.02)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 100})
    assert reader.latestOffset({"t": {"0": 100}}, ALL) == {"t": {"0": 100}}
