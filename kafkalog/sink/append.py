"""Append: a foreachBatch callable that writes into a log exactly once.

`writeStream.format("kafkalog")` does not need it. It serves what Spark offers only through
`foreachBatch`: output mode `update`, or several writes of one micro-batch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError
from kafkalog.plain_errors import plain_in_batch
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.plan import sync_plan
from kafkalog.sink.query import MicroBatch, micro_batch_of_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_done: dict[tuple[str, ...], int] = {}
"""The last batch that each (run, log, topic, name) of this process writes or has written."""
_mutex = threading.Lock()
_DONE_MAX = 1024


class Append:
    """Write each micro-batch into the log at `path`, exactly once.

    Use it as `stream.writeStream.foreachBatch(Append(path, "t")).outputMode("update").start()`, or
    call `Append(path, "t")(df, batch_id)` in your own function. A micro-batch that Spark repeats
    after a failure is skipped. Two writes to one topic in one micro-batch need two names; without
    them the second raises InvalidInputError, since it looks like a repetition.

    The log remembers the micro-batches by the query's id and the name. Spark Connect hides the
    query. Give its `checkpointLocation` as `checkpoint` there, a local directory of the server: it
    has the query's id, and `Append` syncs Spark's plan in it. A name alone also names the query.
    It belongs to one checkpoint: a query with a new checkpoint needs a new name. In a classic
    session `checkpoint` may be left out; another query's is refused.

    With `topic` None, each row's `topic` column names the topic. Further keywords are options of
    the sink; put those with a dot into `options`: `options={"topic.segment.bytes": "1048576"}`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        topic: str | None = None,
        *,
        name: str = "",
        checkpoint: str | PathLike[str] | None = None,
        options: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.path = fspath(path)
        self.topic = topic
        self.name = name
        self.checkpoint = None if checkpoint is None else fspath(checkpoint)
        self.options = {**(options or {}), **more}
        taken = {"txnappid", "txnversion"} & {option.lower() for option in self.options}
        if taken:
            raise InvalidInputError(
                f"Append sets {' and '.join(sorted(taken))} itself; to tell two writes of a "
                "micro-batch apart give each its name="
            )

    @plain_in_batch
    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write one micro-batch; `batch_id` is Spark's."""
        running = micro_batch_of_driver(
            df, batch_id, "kafkalog.sink.Append", name=self.name, checkpoint=self.checkpoint
        )
        options = {**self.options, "path": self.path}
        if running.checkpoint is not None:
            options["checkpointLocation"] = running.checkpoint
        if self.topic is not None:
            options["topic"] = self.topic
        parsed = SinkOptions.parse(options)
        use = (running.run_id, parsed.place, parsed.target, self.name)
        with _mutex:
            if _done.get(use) == batch_id:
                raise InvalidInputError(
                    f"a second Append writes to {self.topic or 'the topics'} at {self.path} in "
                    f"micro-batch {batch_id}; give each its own name="
                )
            # A run executes each micro-batch once, so only a second use can come here again.
            _done.pop(use, None)
            _done[use] = batch_id
            while len(_done) > _DONE_MAX:
                _done.pop(next(iter(_done)))
        try:
            sync_plan(running.checkpoint, batch_id)
            writer = df.write.format("kafkalog").mode("append").options(**options)
            writer.option("txnAppId", self.writer_id(running)).option("txnVersion", batch_id).save()
        except BaseException:
            with _mutex:
                _done.pop(use, None)
            raise

    def writer_id(self, running: MicroBatch) -> str:
        """Return the name under which the log remembers this write's batch ids."""
        is_known = running.query_id != self.name  # under Spark Connect a name is the query's
        return f"{running.query_id}/{self.name}" if self.name and is_known else running.query_id
