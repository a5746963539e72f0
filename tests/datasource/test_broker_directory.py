"""A broker's log directories as the source's address: planned, read and streamed as they move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import InvalidInputError
from tests.datasource.logs import rows, source
from tests.storage_engine import broker_root
from tests.storage_engine.broker_root import BrokerRoot

ALL = ReadAllAvailable()


def stopped(path: Path) -> BrokerRoot:
    root = BrokerRoot(path)
    root.partition("t-0")
    root.partition("t-2", (0,), 30)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 40, "t-2": 10})
    root.shut_down()
    return root


def batch(address: Any, **options: str) -> list[tuple[int, int]]:
    data_source = source(address, **options)
    reader = data_source.reader(data_source.schema())
    return sorted((row["partition"], row["offset"]) for row in rows(reader, reader.partitions()))


def stream(address: Any, **options: str) -> KafkaLogStreamReader:
    data_source = source(address, **options)
    return data_source.streamReader(data_source.schema())


def test_a_batch_reads_the_partitions_that_are_here(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    expected = [(0, offset) for offset in range(100)] + [(2, offset) for offset in range(30)]
    assert batch(root.path) == expected
    assert batch(root.path, minPartitions="5") == expected
    assert batch(root.path, view="latest") != []
    assert batch(root.path, startingOffsets='{"t":{"0":95,"2":-2}}') == expected[95:]
    with pytest.raises(InvalidInputError):
        batch(root.path, startingOffsets='{"t":{"0":95,"1":-2,"2":-2}}')


def test_several_directories_are_one_address(tmp_path: Path) -> None:
    first, second = stopped(tmp_path / "a"), BrokerRoot(tmp_path / "b")
    second.partition("t-1", (0,), 10)
    assert len(batch(f"{first.path},file://{second.path}")) == 140
    assert len(batch(f"file:{first.path} , {second.path}")) == 140


def test_a_comma_in_a_name_begins_no_list(tmp_path: Path) -> None:
    root = stopped(tmp_path / "a,b")
    assert len(batch(root.path)) == 130


def test_a_stream_follows_a_live_brokers_checkpoints(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
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


def test_a_sink_refuses_a_brokers_directory(tmp_path: Path) -> None:
    from kafkalog.storage_engine.address import log_directory

    with pytest.raises(InvalidInputError, match="can only be read"):
        log_directory({"path": f"{tmp_path}/a,{tmp_path}/b"})


@pytest.mark.spark
@pytest.mark.slow
def test_spark_streams_from_a_live_broker(spark: Any, tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    seen: list[list[tuple[int, int]]] = []

    def run() -> None:
        query = (
            spark.readStream.format("kafkalog")
            .options(subscribe="t", startingOffsets="earliest")
            .load(str(root.path))
            .writeStream.foreachBatch(
                lambda frame, _: seen.append(
                    sorted((row.partition, row.offset) for row in frame.collect())
                )
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    with root.alive():
        run()
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 100, "t-2": 10})
        run()
    run()
    records = [record for batch in seen for record in batch]
    assert sorted(records) == [(0, n) for n in range(100)] + [(2, n) for n in range(30)]
    assert len([batch for batch in seen if batch]) == 3
