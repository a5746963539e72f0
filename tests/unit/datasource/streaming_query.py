"""Drives a stream reader as Spark does, without Spark: its order of calls, and its checkpoint.

Offsets pass through JSON text, are compared as text, and each run has a reader of its own, which
reads through a pickled copy.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable

from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from tests.unit.datasource.logs import rows, source

Row = dict[str, Any]


@dataclass
class StreamingQuery:
    """A query over `root`; `planned` and `committed` are its checkpoint."""

    root: Path
    options: dict[str, str]
    planned: list[str] = field(default_factory=list)
    committed: int = 0
    now_ms: int = 1_700_000_000_000
    limits: str = "default"
    reader: KafkaLogStreamReader | None = None

    def start(self, *, available_now: bool = False) -> None:
        """Begin a run of the query: what it knew before is gone but for the checkpoint."""
        data_source = source(self.root, **self.options)
        schema = data_source.schema()
        data_source.streamReader(schema)
        self.reader = KafkaLogStreamReader(dict(data_source.options), schema, lambda: self.now_ms)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()

    def trigger(self, *, once: bool = False) -> list[Row] | None:
        """Run a micro-batch to its end; None when there is none. Spark: MicroBatchExecution."""
        if not self.plan(once=once):
            return None
        return self.run_planned()

    def plan(self, *, once: bool = False) -> bool:
        """Construct the next batch and record it, unless one is recorded that was not committed."""
        reader = self._reader()
        limit = reader.getDefaultReadLimit()
        if len(self.planned) > self.committed:
            return True
        end = json.dumps(reader.latestOffset(self._start(), ReadAllAvailable() if once else limit))
        reader.reportLatestOffset()
        if self.planned and end == self.planned[-1]:
            return False
        self.planned.append(end)
        return True

    def run_planned(self) -> list[Row]:
        """Run and commit the batch that was recorded last."""
        reader = self._reader()
        planned = reader.partitions(self._start(), json.loads(self.planned[self.committed]))
        found = rows(self._copy(), pickle.loads(pickle.dumps(planned)))
        if self.committed:
            reader.commit(json.loads(self.planned[self.committed - 1]))
        self.committed += 1
        return found

    def drain(self) -> list[Row]:
        """Run micro-batches until there is nothing new."""
        found: list[Row] = []
        while (batch := self.trigger()) is not None:
            found += batch
        return found

    def _start(self) -> Any:
        if self.committed:
            return json.loads(self.planned[self.committed - 1])
        return json.loads(json.dumps(self._reader().initialOffset()))

    def _reader(self) -> KafkaLogStreamReader:
        if self.reader is None:
            self.start()
        assert self.reader is not None
        return self.reader

    def _copy(self) -> KafkaLogStreamReader:
        """What the tasks read with: another instance, that was sent."""
        data_source = source(self.root, **self.options)
        copy: KafkaLogStreamReader = pickle.loads(
            pickle.dumps(data_source.streamReader(data_source.schema()))
        )
        return copy
