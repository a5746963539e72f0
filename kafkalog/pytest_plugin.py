"""A pytest plugin: topics for tests of Spark jobs, with no broker and no Docker.

    def test_the_job_counts(kafkalog_topic, spark):
        orders = kafkalog_topic("orders", [("a", "1"), ("b", "2"), ("a", "3")])
        frame = spark.read.format("kafkalog").options(**orders.options).load()
        assert frame.count() == 3

pytest finds the plugin if kafkalog is installed. The log is imported only when a test uses one of
the fixtures. The test itself provides `spark`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.log import KafkaLog
    from kafkalog.storage_engine.log.results import CommitResult

__all__ = ["MakeTopic", "Topic", "kafkalog_log", "kafkalog_topic"]

MakeTopic: TypeAlias = "Callable[..., Topic]"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of a test's log."""

    log: KafkaLog
    name: str

    @property
    def path(self) -> str:
        """The log's directory, for the option `path`."""
        return str(self.log.root)

    @property
    def options(self) -> dict[str, str]:
        """The options with which `spark.read` and `spark.readStream` read the topic."""
        return {"path": self.path, "subscribe": self.name}

    def append(self, records: Any, *, now_ms: int | None = None) -> CommitResult:
        """Append tuples, dicts or an Arrow table in one commit, like `KafkaLog.append`.

        The value None is a tombstone. `now_ms` is the time of records without a timestamp.
        """
        return self.log.append(self.name, records, now_ms=now_ms)

    def records(self) -> list[dict[str, Any]]:
        """Return all committed records in the order of their offsets, partition by partition."""
        return [
            row
            for partition in sorted(self.log.offsets(self.name))
            for batch in self.log.read(self.name, partition, include_headers=True)
            for row in batch.to_pylist()
        ]

    def table(self) -> dict[bytes, bytes]:
        """Return the latest value of each key without deleted keys, like `view=latest`."""
        return {
            row["key"]: row["value"]
            for batch in self.log.latest(self.name)
            for row in batch.select(["key", "value"]).to_pylist()
        }

    def clean(self, *, now_ms: int | None = None) -> list[CleanerStats]:
        """Compact the topic at once, its active segment too; `now_ms` moves delete horizons."""
        return self.log.clean(self.name, force=True, now_ms=now_ms)


@pytest.fixture
def kafkalog_log(tmp_path: Path) -> Iterator[KafkaLog]:
    """Yield an empty log in a temporary directory, closed after the test."""
    import kafkalog

    with kafkalog.open(tmp_path / "kafkalog") as log:
        yield log


@pytest.fixture
def kafkalog_topic(kafkalog_log: KafkaLog) -> MakeTopic:
    """Return a function that makes topics of the test's log: `kafkalog_topic(name, records, ...)`.

    Each call creates a topic and appends the records, if there are any. `partitions` and `config`
    are those of `create_topic`. Default names are `topic`, `topic-2` and so on. A topic is
    compacted, unless its first records lack keys or `config` says otherwise.
    """

    def make(
        name: str | None = None,
        records: Any = None,
        *,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> Topic:
        if name is None:
            count = len(kafkalog_log.topics())
            name = f"topic-{count + 1}" if count else "topic"
        if isinstance(records, Iterator):
            records = [*records]
        policy = {} if _have_keys(records) else {"cleanup.policy": "delete"}
        kafkalog_log.create_topic(name, partitions, {**policy, **(config or {})})
        topic = Topic(kafkalog_log, name)
        if records is not None:
            topic.append(records)
        return topic

    return make


def _have_keys(records: Any) -> bool:
    """Return whether a compacted topic takes the records, since none lacks a key."""
    from kafkalog.storage_engine.records.record_batches import record_batches

    batches = [] if records is None else record_batches(records)
    return all("key" in each.schema.names and not each["key"].null_count for each in batches)
