"""How far a query has brought a table; an upsert stores it with the rows, in one transaction."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kafkalog.sink.query import EndOffsets


@dataclass(frozen=True, slots=True)
class Position:
    """The last micro-batch of a query that a table holds."""

    batch_id: int
    end_offsets: EndOffsets
    """{topic: {partition: next offset}}; {} when the query reads no Kafka log."""
    time_ms: int
    """When it was applied."""
    bad_records: int = 0
    """Records that the query has left out so far; see `BadRecords`. Records that the table refuses
    count again in a micro-batch that Spark plans again."""
    other_ends: str | None = None
    """A digest of the ends of the query's sources that are no Kafka logs; None for none, and if
    Spark's plan of the micro-batch could not be read."""

    def end_offsets_json(self) -> str:
        """Return the end offsets as JSON, topics and partitions in order."""
        ordered = {
            topic: dict(sorted(partitions.items(), key=lambda item: int(item[0])))
            for topic, partitions in sorted(self.end_offsets.items())
        }
        return json.dumps(ordered)
