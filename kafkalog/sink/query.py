"""The streaming query and micro-batch that code runs for, as Spark's local properties say.

Spark sets these properties for everything that a micro-batch runs. Its tasks see them, and so does
the driver's thread inside `foreachBatch`. A plain batch job lacks all of them.

Spark Connect runs the function of `foreachBatch` in a Python process of its own on the server's
host, one for each run of a query. That process sees neither the properties nor the query. The name
or the checkpoint that the user gives is the query's identity there. The checkpoint says how far the
micro-batch reaches; without it the rows do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from uuid import UUID, uuid4

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.spark_offset_log import OffsetLogEntry
from kafkalog.spark_results import collected, is_connect
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


EndOffsets = dict[str, dict[str, int]]
"""{topic: {partition: next offset}}, as in Spark's offset log."""

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_RUN_ID = "spark.jobGroup.id"
_CHECKPOINTS = "spark.sql.streaming.checkpointLocation"
"""The session's setting of the directory for checkpoints; tasks see the session's settings."""
_PROCESS = str(uuid4())
"""The run of a query under Spark Connect: this process runs the micro-batches of no other run."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a query."""

    query_id: str
    """Stays the same as long as the checkpoint. Under Spark Connect it is the name that the user
    gave, if there is one."""
    batch_id: int
    run_id: str
    """Each start of the query has a new one; "" if it is not known."""
    checkpoint: str | None = None
    """Where the query's checkpoint is; None if it is not known."""


def micro_batch_of_task(
    checkpoint: str | None = None, query_name: str | None = None
) -> MicroBatch | None:
    """Return the micro-batch of the running task; None in a plain batch job.

    `checkpoint` and `query_name` are options of the query. Without a checkpoint, it is that of the
    name in the session's directory for checkpoints (Spark: ResolveWriteToStream).
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    running = None if context is None else _read(context.getLocalProperty)
    if context is None or running is None:
        return None
    parent = context.getLocalProperty(_CHECKPOINTS)
    if checkpoint is None and parent and query_name:
        checkpoint = f"{parent.rstrip('/')}/{query_name}"
    return replace(running, checkpoint=checkpoint)


def micro_batch_of_driver(
    frame: DataFrame, batch_id: int, caller: str, *, name: str, checkpoint: str | None
) -> MicroBatch:
    """Return the micro-batch that `foreachBatch` is running; errors begin with `caller`.

    Raises InvalidInputError outside foreachBatch, for a `checkpoint` that is not the query's, and
    under Spark Connect without a `name` or a `checkpoint`.
    """
    if is_connect(frame):
        if not name and checkpoint is None:
            raise InvalidInputError(
                f"{caller}: Spark Connect does not show which query runs; give it the query's "
                "checkpoint=, or a name= that no other query uses for the same target"
            )
        query_id = None if checkpoint is None else _planned_by(checkpoint, batch_id, caller)
        return MicroBatch(name or str(query_id), batch_id, _PROCESS, checkpoint)
    found = _read(frame.sparkSession.sparkContext.getLocalProperty)
    if found is None:
        raise InvalidInputError(
            f"{caller} works inside foreachBatch only, which has a query and a micro-batch "
            "id; outside use df.write with txnAppId and txnVersion"
        )
    if checkpoint is not None:
        query_id = _planned_by(checkpoint, batch_id, caller)
        if query_id != found.query_id:
            raise InvalidInputError(
                f"{caller}: {checkpoint} is another query's checkpoint (expected query "
                f"{found.query_id}, found {query_id}). Give checkpoint= the running query's "
                "checkpointLocation, or leave it out."
            )
    execution = _execution(frame, found)
    return replace(
        found,
        # A user may have changed the property, by setJobGroup inside foreachBatch.
        run_id=str(execution.runId().toString()),
        checkpoint=str(execution.resolvedCheckpointRoot()),
    )


def _planned_by(checkpoint: str, batch_id: int, caller: str) -> str:
    """Return the id of the query whose checkpoint this is; it must have planned the micro-batch."""
    query_id, directory = checkpoint_query_id(checkpoint), checkpoint_directory(checkpoint)
    if (
        query_id is None
        or directory is None
        or not (directory / "offsets" / str(batch_id)).exists()
    ):
        raise InvalidInputError(
            f"{caller}: {checkpoint} is not the running query's checkpoint (expected a local "
            f"directory with Spark's metadata and offsets/{batch_id}). Give checkpoint= the "
            "checkpointLocation, or leave it out."
        )
    return query_id


def start_offsets_of_driver(frame: DataFrame, running: MicroBatch) -> EndOffsets | None:
    """Return where the micro-batch begins: the end of the one before, {} for the first.

    None if the checkpoint of a query under Spark Connect is not known, or lacks that micro-batch.
    Raises InvalidInputError if `running` does not run in this Spark session.
    """
    if running.batch_id == 0:
        return {}
    before = replace(running, batch_id=running.batch_id - 1)
    if is_connect(frame) and checkpoint_directory(running.checkpoint) is None:
        return None
    try:
        return end_offsets_of_driver(frame, before, dict)
    except (StorageError, _NotPlannedError):
        return None


def first_of_run_of_driver(frame: DataFrame, running: MicroBatch) -> int | None:
    """Return the id of the first micro-batch since the query was started.

    It is too high if Spark keeps the progress of fewer (spark.sql.streaming
    .numRecentProgressUpdates). None under Spark Connect. Raises InvalidInputError if `running` does
    not run in this Spark session.
    """
    if is_connect(frame):
        return None
    ended = _execution(frame, running).recentProgress()  # the oldest comes first
    return int(ended[0].batchId()) if len(ended) else running.batch_id


class _NotPlannedError(InvalidInputError):
    """The offset log lacks a micro-batch."""


def end_offsets_of_driver(
    frame: DataFrame, running: MicroBatch, reached: Callable[[], EndOffsets]
) -> EndOffsets:
    """Return the end of the micro-batch: {topic: {partition: next offset}}.

    The query's offset log has it, so markers, compacted tails and micro-batches without rows count
    too. Sources whose offsets are not those of a Kafka log are left out. Under Spark Connect it is
    read only if the checkpoint is known. Otherwise the end is behind the last row of each
    partition; one without rows is where earlier micro-batches have `reached`.
    Raises InvalidInputError if `running` does not run in this Spark session, and StorageError.
    """
    if is_connect(frame):
        directory = checkpoint_directory(running.checkpoint)
        if directory is not None:
            return end_offsets_of_checkpoint(directory, running.batch_id)
        return _behind_the_rows(frame, reached())
    log = _execution(frame, running).offsetLog()
    entry = log.get(running.batch_id)
    if entry.isEmpty():
        raise _NotPlannedError(
            f"query {running.query_id}, micro-batch {running.batch_id}: not in the offset log of "
            "the query's checkpoint"
        )
    # The classes of the entries differ by format; their text is that of the file.
    jvm: Any = frame.sparkSession.sparkContext._jvm
    written = jvm.java.io.ByteArrayOutputStream()
    log.serialize(entry.get(), written)
    where = f"query {running.query_id}, micro-batch {running.batch_id}"
    return _end_offsets(where, bytes(written.toByteArray()))


def _behind_the_rows(frame: DataFrame, reached: EndOffsets) -> EndOffsets:
    from pyspark.sql import functions as F

    ends = {topic: dict(partitions) for topic, partitions in reached.items()}
    if {"topic", "partition", "offset"} <= {*frame.columns}:
        last = frame.groupBy("topic", "partition").agg(F.max("offset"))
        for topic, partition, offset in collected(last):
            known = ends.setdefault(topic, {})
            known[str(partition)] = max(offset + 1, known.get(str(partition), 0))
    return ends


def end_offsets_of_checkpoint(directory: Path, batch_id: int) -> EndOffsets:
    """Return the end of a micro-batch as the checkpoint's offset log has it.

    Spark writes it there before it runs the micro-batch. Raises StorageError if it cannot be read.
    """
    path = directory / "offsets" / str(batch_id)
    try:
        text = files.read_file(path)
    except OSError as fault:
        files.pass_on(fault)
        raise StorageError(f"{path}: the plan of the micro-batch: {fault}") from fault
    return _end_offsets(path, text)


def _end_offsets(where: object, text: bytes) -> EndOffsets:
    try:
        return end_offsets(OffsetLogEntry.parse(text.decode()).sources.values())
    except ValueError as fault:
        raise StorageError(f"{where}: the plan of the micro-batch: {fault}") from fault


def _execution(frame: DataFrame, running: MicroBatch) -> Any:
    """Return Spark's object of the running query; raises InvalidInputError if it is not there.

    A micro-batch has a copy of the session that knows no query; the shared state knows all of them.
    """
    jvm: Any = frame.sparkSession.sparkContext._jvm
    shared: Any = frame.sparkSession._jsparkSession.sharedState()
    query = shared.activeStreamingQueries().get(jvm.java.util.UUID.fromString(running.query_id))
    if query is None:
        raise InvalidInputError(
            f"query {running.query_id}, micro-batch {running.batch_id}: no such query is running "
            "in this Spark session"
        )
    return query


def end_offsets(sources: Iterable[str]) -> EndOffsets:
    """Merge the offsets of a query's sources, each given as the JSON of an offset log.

    JSON of another form than {topic: {partition: offset}} is left out. If two sources read one
    partition, the lower offset counts, since both have read up to it.
    """
    ends: EndOffsets = {}
    for text in sources:
        for topic, partitions in _kafka_offsets(text).items():
            known = ends.setdefault(topic, {})
            for partition, offset in partitions.items():
                known[partition] = min(known.get(partition, offset), offset)
    return ends


def _kafka_offsets(text: str) -> EndOffsets:
    try:
        offsets = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(offsets, dict):
        return {}
    for partitions in offsets.values():
        if not isinstance(partitions, dict):
            return {}
        for partition, offset in partitions.items():
            if not partition.isdecimal() or type(offset) is not int or offset < 0:
                return {}
    return offsets


def checkpoint_directory(location: str | None) -> Path | None:
    """Return the directory of a checkpoint on a local file system; None for any other."""
    if location is None:
        return None
    parts = urlsplit(location)
    if parts.scheme not in {"", "file"}:
        return None
    return Path(unquote(parts.path) if parts.scheme else location)


def checkpoint_query_id(location: str | None) -> str | None:
    """Return the query id that a checkpoint on a local file system holds; None when unknown."""
    directory = checkpoint_directory(location)
    if directory is None:
        return None
    try:
        return str(json.loads(files.read_file(directory / "metadata"))["id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as raised:
        files.pass_on(raised)
        return None


def _read(get: Callable[[str], str | None]) -> MicroBatch | None:
    query_id, batch_id = get(_QUERY_ID), get(_BATCH_ID)
    if not query_id or batch_id is None:
        return None
    return MicroBatch(query_id, int(batch_id), _run_id(get(_RUN_ID)))


def _run_id(group: str | None) -> str:
    try:
        return str(UUID(group or ""))
    except ValueError:
        return ""
