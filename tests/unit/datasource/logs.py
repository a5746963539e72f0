"""Logs for the source's tests, and what a read of them gives."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import InputPartition

from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_builder import LogBuilder
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import BrokerRoot

MANY = 1000
NOW_MS = 1_700_000_000_000
Pair = tuple[bytes | None, bytes | None]


def append(root: Path, topic: str, pairs: Iterable[Pair]) -> None:
    """Append pairs in one commit; the topic is created when it is missing."""
    LogBuilder(root).topic(topic, policy="delete", exist_ok=True).append(*pairs).close()


def append_compacted(root: Path, *pairs: tuple[str | None, str | None]) -> None:
    """Append pairs of strings to the compacted topic `t` of two partitions."""
    LogBuilder(root).topic("t", 2, policy="compact", exist_ok=True).append(*pairs).close()


def append_to(root: Path, topic: str, counts: Mapping[int, int]) -> None:
    """Append so many records to each partition of a topic, in one commit."""
    numbers = [partition for partition, count in counts.items() for _ in range(count)]
    pairs = [(f"{row}", "v") for row in range(len(numbers))]
    log = LogBuilder(root).topic(topic, max(counts) + 1, exist_ok=True)
    log.append(*pairs, partition=numbers).close()


def numbered(count: int, start: int = 0) -> list[Pair]:
    """Pairs with keys and values of their own."""
    return [(f"k{i}".encode(), f"v{i}".encode()) for i in range(start, start + count)]


def source(root: Path, **options: str) -> KafkaLogDataSource:
    """The source of topic `t`, unless the options select others; of a new log, if need be."""
    if isinstance(root, Path) and root.is_dir() and not any(root.iterdir()):
        DirectoryLog(root).close()
    strategy = {} if {"subscribePattern", "assign"} & options.keys() else {"subscribe": "t"}
    return KafkaLogDataSource(options={"path": str(root), **strategy, **options})


def rows(reader: Any, partitions: Iterable[InputPartition]) -> list[dict[str, Any]]:
    """What the tasks of these partitions give, in order."""
    return [
        row
        for partition in partitions
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def broker_directory(path: Path) -> BrokerRoot:
    """The directory of a broker that was shut down, with two partitions of topic `t`."""
    root = BrokerRoot(path)
    root.partition("t-0")
    root.partition("t-2", (0,), 30)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 40, "t-2": 10})
    root.shut_down()
    return root


def read_batch(root: Path, **options: str) -> list[dict[str, Any]]:
    """What a batch read gives, planned and read as Spark does it."""
    data_source = source(root, **options)
    reader = data_source.reader(data_source.schema())
    return rows(reader, reader.partitions())


def places(found: list[dict[str, Any]] | None) -> list[tuple[str, int, int]]:
    """Topic, partition and offset of each row."""
    return [(row["topic"], row["partition"], row["offset"]) for row in found or []]


def create_many_partitions(root: Path) -> None:
    """Make a topic of a thousand partitions; three records in every hundredth."""
    LogBuilder(root).topic("t", MANY).close()
    append_to(root, "t", dict.fromkeys(range(0, MANY, 100), 3) | {MANY - 1: 3})
