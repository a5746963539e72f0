"""Records that do not fit into a table: fail the query, or leave them out.

The dead-letter topic gets the whole record, with its place and the reason as headers. Their names
are those of Kafka Connect's dead-letter queue (org.apache.kafka.connect.runtime.errors
.DeadLetterQueueReporter, KIP-298). They are written before the rows are committed. The log knows
the plan of their micro-batch, so its repetition writes them once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.sink.query import EndOffsets
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.sink.upsert.rows import REASON
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.object_store.address import is_store_url, store_options
from kafkalog.storage_engine.place import read_places, written_place

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from kafkalog.storage_engine.object_store.address import StoreAddress


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
_KEEPS_ALL = {"cleanup.policy": "delete", "retention.ms": "-1"}
"""The configs of a dead-letter topic: two dead letters of one key both stay."""


class Refusal(NamedTuple):
    """A record that a target refuses."""

    topic: str
    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class BadRecords:
    """The treatment of records that do not fit, as `on_bad_record` gives it.

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
    is_elsewhere: bool = False
    """Whether the topic is known to be in another log than the one that the query reads."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options `store.*` of a log in an object store."""

    @classmethod
    def parse(cls, text: str, path: str) -> BadRecords:
        """Parse `on_bad_record`; raises InvalidInputError."""
        if text in {"fail", "skip"}:
            return cls(text == "skip")
        topic = str(text).removeprefix(_DEAD_LETTER)
        if topic == str(text):
            raise InvalidInputError(
                f'on_bad_record is "fail", "skip" or "deadletter:<topic>", not {text!r}'
            )
        try:
            NewTopic.of(1, _KEEPS_ALL).check(topic)
        except InvalidInputError as fault:
            raise InvalidInputError(f"on_bad_record, the dead-letter topic: {fault}") from None
        return cls(True, topic, path)

    def beside(self, path: str, topic: str, options: Mapping[str, str] | None = None) -> BadRecords:
        """Return the rule for a view of `topic` of the log at `path`, with the view's options.

        Raises InvalidInputError.
        """
        known = self if self.path else replace(self, path=path)
        if not self.topic:
            return known
        if is_store_url(known.path):
            known = replace(known, options=store_options(options or {}))
        read = read_places({**(options or {}), "path": path})
        known = replace(known, is_elsewhere=known._place not in read)
        known._check_topic({topic: {}})
        return known

    @property
    def _place(self) -> Path | StoreAddress:
        return written_place({**self.options, "path": self.path})

    def check(self, end_offsets: EndOffsets) -> None:
        """Check, before the query leaves out a record, whether the dead-letter topic takes it.

        Raises InvalidInputError, and StorageError for a log that cannot be written.
        """
        if not self.topic:
            return
        if not self.path:
            raise InvalidInputError(
                "on_bad_record names a dead-letter topic (expected its log, found no path). Give "
                "the upsert path=, the log of the topic."
            )
        self._check_topic(end_offsets)
        known = shared_readable(self._place).state().topics.get(self.topic)
        if known is not None and TopicConfig.parse(known.config).needs_keys:
            raise InvalidInputError(
                f"on_bad_record: topic {self.topic} is compacted (expected cleanup.policy=delete, "
                f"found {known.config['cleanup.policy']}), so a dead letter would replace an "
                "earlier one of its key. Alter the topic, or name another one."
            )

    def _check_topic(self, read: Mapping[str, object]) -> None:
        """Refuse a query that would read its own dead letters, and leave them out for ever."""
        if self.topic in read and not self.is_elsewhere:
            raise InvalidInputError(
                f"on_bad_record: {self.topic} is the topic that the query reads (expected another "
                "one). Give the bad records a topic of their own."
            )

    def refused(self, df: DataFrame, refused: Sequence[Refusal]) -> DataFrame:
        """Return the records of `df` that a target refuses, with `kl_reason`."""
        places = df.sparkSession.createDataFrame(
            list(refused), f"topic string, partition int, offset bigint, {REASON} string"
        )
        return df.join(places, list(_PLACE)).select(*df.columns, REASON)

    def leave_out(
        self,
        found: DataFrame,
        writer: str,
        batch_id: int,
        end_offsets: EndOffsets,
        applied: EndOffsets,
    ) -> int:
        """Count bad records, and write those of a dead-letter topic; return the number.

        `found` has the columns of the stream and `kl_reason`. The log knows `writer`, and the plan
        of its last micro-batch: its id and its end offsets. Records below `applied` were left out
        before. Raises InvalidInputError, and the errors of the sink.
        """
        from pyspark.sql import functions as F

        if applied:
            found = _beyond(found, applied)
        first = F.min(F.struct(*_PLACE, REASON))
        places = F.bit_xor(F.xxhash64(*_PLACE))
        [(count, record, digest)] = found.agg(F.count("*"), first, places).collect()
        if not count:
            return 0
        topic, partition, offset, reason = record
        _log.warning(
            "micro-batch %d of %s: bad records left out%s: %d; the first is %s-%d offset %d: %s",
            batch_id,
            writer,
            f", which go to topic {self.topic}" if self.topic else "",
            count,
            topic,
            partition,
            offset,
            reason,
        )
        if self.topic:
            self._write(found, writer, plan_number(batch_id, end_offsets, digest))
        return int(count)

    def _write(self, found: DataFrame, writer: str, plan: int) -> None:
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
        log = shared_log(self._place)
        log.create_topic(self.topic, config=_KEEPS_ALL, exist_ok=True)
        # The numbers of plans have no order: each but the last one is new.
        once = {"txnAppId": writer, "txnVersion": str(plan), "resetWriter": "true"}
        options = {**self.options, "path": self.path, "topic": self.topic, **once}
        letters.write.format("kafkalog").mode("append").options(**options).save()


def plan_number(batch_id: int, end_offsets: EndOffsets, places: int) -> int:
    """Return a number that this plan of a micro-batch has, and no other plan of the query.

    `places` is a digest of its bad records: another schema, or another table, refuses others.
    """
    plan = json.dumps([batch_id, end_offsets, places], sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(plan, digest_size=8).digest()) >> 1


def _beyond(found: DataFrame, ends: EndOffsets) -> DataFrame:
    """Return the records at or beyond these end offsets."""
    from pyspark.sql import functions as F

    known = F.from_json(F.lit(json.dumps(ends)), "map<string,map<string,bigint>>")
    partitions = F.try_element_at(known, F.col("topic"))
    end = F.try_element_at(partitions, F.col("partition").cast("string"))
    return found.where(F.col("offset") >= F.coalesce(end, F.lit(0)))
