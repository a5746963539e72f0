"""The same records in a log directory and in an object store, to compare what reads give."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.place import open_log
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.datasource.logs import NOW_MS

Row = dict[str, Any]


class TwoLogs:
    """Two logs in which the same is done."""

    def __init__(self, directory: Path, url: str | None = None, **options: str) -> None:
        self.directory = str(directory / "log")
        self.url = url or f"memory://{secrets.token_hex(8)}/log"
        self.options = options
        """The options `store.*` of the URL."""
        self.logs: Sequence[Log] = (
            open_log(self.directory),
            open_log(self.url, options=options),
        )
        self._written = 0

    def topic(self, name: str = "t", partitions: int = 3, **config: str) -> TwoLogs:
        """Create a topic, with the policy delete."""
        for log in self.logs:
            log.create_topic(name, partitions, {"cleanup.policy": "delete", **config})
        return self

    def append(self, count: int, topic: str = "t", partitions: int = 3, size: int = 20) -> TwoLogs:
        """Append records in one commit: to the partitions in turn, some keyless, some tombstones.

        Each is a millisecond younger than the one before. Some have headers.
        """
        first = NOW_MS + self._written
        return self.append_at([*range(first, first + count)], topic, partitions, size)

    def append_at(
        self, times: Sequence[int], topic: str = "t", partitions: int = 1, size: int = 20
    ) -> TwoLogs:
        """Append a record of each time (epoch ms) in one commit."""
        rows = self._rows(times, partitions, size)
        for log in self.logs:
            log.append(topic, rows, now_ms=NOW_MS)
        return self

    def commit(self, *counts: int, partitions: int = 3, **options: int) -> TwoLogs:
        """Commit a batch of tasks to topic `t`, each with so many records."""
        tables = [self._rows([NOW_MS] * count, partitions, 20) for count in counts]
        for log in self.logs:
            messages = []
            for task, rows in enumerate(tables):
                writer = StagedWriter(
                    log, log.state(), now_ms=lambda: NOW_MS, spark_partition=task, **options
                )
                writer.append("t", rows)
                messages.append(writer.finish())
            log.commit(messages, now_ms=NOW_MS)
        return self

    def _rows(self, times: Sequence[int], partitions: int, size: int) -> pa.RecordBatch:
        numbers = range(self._written, self._written + len(times))
        self._written += len(times)
        header = [("h", b"1"), ("h", None)]
        columns = {
            "key": [None if n % 11 == 0 else b"k%d" % (n % 7) for n in numbers],
            "value": [None if n % 13 == 0 else b"%0*d" % (size, n) for n in numbers],
            "partition": [n % partitions for n in numbers],
            "timestamp": times,
            "headers": [header if n % 5 == 0 else [] for n in numbers],
        }
        pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        kinds = {
            "key": pa.binary(),
            "value": pa.binary(),
            "partition": pa.int32(),
            "timestamp": pa.timestamp("ms", "UTC"),
            "headers": pairs,
        }
        columns["headers"] = [
            [{"key": key, "value": value} for key, value in row] for row in columns["headers"]
        ]
        return pa.RecordBatch.from_pydict(
            {name: pa.array(columns[name], kind) for name, kind in kinds.items()}
        )


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order of topic, partition and offset."""
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))
