"""Records that do not fit into a table: fail the query, or leave them out.

The dead-letter topic gets the whole record, with its place and the reason as headers. Their names
are those of Kafka Connect's dead-letter queue (org.apache.kafka.connect.runtime.errors
.DeadLetterQueueReporter, KIP-298). They are written before the rows are committed. The log knows
the micro-batch, so its repetition writes them once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.rows import REASON
from kafkalog.storage_engine.format import layout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BadRecords", "Refusal"]

_log = logging.getLogger("kafkalog.sink")
_DEAD_LETTER = "deadletter:"
_HEADERS = {
    "__connect.errors.topic": "topic",
    "__connect.errors.partition": "partition",
    "__connect.errors.offset": "offset",
    "__connect.errors.exception.message": REASON,
}
"""The headers of a dead letter, and the columns of their values."""
_PLACE = ("topic", "partition", "offset")


class Refusal(NamedTuple):
    """A record that a target refuses."""

    topic: str
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class BadRecords:
    """What an upsert does with a record that does not fit.

    - "fail": the record fails the micro-batch, and the error names it.
    - "skip": the record is left out and counted.
    - "deadletter:<topic>": the record is left out, counted and appended to that topic of the log at
      `path`, with its key, value, timestamp and headers.

    A record that is left out is not in the log, as far as the table is concerned: the row of an
    earlier record of its key stays.
    """

    are_left_out: bool
    topic: str = ""
    path: str = ""

    @classmethod
    def parse(cls, text: str, path: str) -> BadRecords:
        """Parse `on_bad_record`; raises InvalidInputError."""
        if text in {"fail", "skip"}:
            return cls(text == "skip")
        topic = text.removeprefix(_DEAD_LETTER)
        if topic == text:
            raise InvalidInputError(
                f'on_bad_record is "fail", "skip" or "deadletter:<topic>", not {text!r}'
            )
        if fault := layout.topic_name_fault(topic):
            raise InvalidInputError(f"on_bad_record, the dead-letter topic: {fault}")
        return cls(True, topic, path)

    def beside(self, path: str, topic: str) -> BadRecords:
        """Return the rule for a view of `topic` of the log at `path`."""
        if topic == self.topic:
            raise InvalidInputError(
                f"on_bad_record: {topic} is the topic that the view reads (expected another one). "
                "Give the bad records a topic of their own."
            )
        return self if self.path else replace(self, path=path)

    def refused(self, df: DataFrame, refused: Sequence[Refusal]) -> DataFrame:
        """Return the records of `df` that a target refuses, with `kl_reason`."""
        places = df.sparkSession.createDataFrame(
            list(refused), f"topic string, partition int, offset bigint, {REASON} string"
        )
        return df.join(places, list(_PLACE)).select(*df.columns, REASON)

    def leave_out(self, found: DataFrame, writer: str, batch_id: int) -> int:
        """Count bad records, and write those of a dead-letter topic; return the number.

        `found` has the columns of the stream and `kl_reason`. The log knows `writer` and its
        `batch_id`. Raises InvalidInputError, and the errors of the sink.
        """
        from pyspark.sql import functions as F

        if self.topic and not self.path:
            raise InvalidInputError(
                "on_bad_record names a dead-letter topic (expected its log, found no path). Give "
                "the upsert path=, the log of the topic."
            )
        first = F.min(F.struct(*_PLACE, REASON))
        [(count, record)] = found.agg(F.count("*"), first).collect()
        if not count:
            return 0
        topic, partition, offset, reason = record
        _log.warning(
            "micro-batch %d of %s: %d records are left out%s; the first is %s-%d offset %d: %s",
            batch_id,
            writer,
            count,
            f" and go to topic {self.topic}" if self.topic else "",
            topic,
            partition,
            offset,
            reason,
        )
        if self.topic:
            self._write(found, writer, batch_id)
        return int(count)

    def _write(self, found: DataFrame, writer: str, batch_id: int) -> None:
        from pyspark.sql import functions as F

        ours = F.array(
            *[
                F.struct(
                    F.lit(name).alias("key"),
                    F.col(column).cast("string").cast("binary").alias("value"),
                )
                for name, column in _HEADERS.items()
            ]
        )
        none = F.array().cast("array<struct<key:string,value:binary>>")
        theirs = [F.coalesce("headers", none)] if "headers" in found.columns else []
        letters = found.repartition(1).sortWithinPartitions(*_PLACE)
        letters = letters.select(
            "key", "value", "timestamp", F.concat(*theirs, ours).alias("headers")
        )
        options = {"path": self.path, "topic": self.topic, "txnAppId": writer}
        target = letters.write.format("kafkalog").mode("append").options(**options)
        target.option("txnVersion", batch_id).save()
