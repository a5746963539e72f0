"""Operations on a log, small, and always the same ones at the same moment."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final
from unittest import mock

import pyarrow as pa

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
from kafkalog.cleaner.schedule import manager
from kafkalog.erasure.erase import erase
from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError
from kafkalog.storage_engine.copying import copied_batches, copy
from kafkalog.storage_engine.directory import pins, staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.segment.swaps import sweep_deleted
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.torture.repeatable import repeatable
from tests.torture.rows import Rows, batch, rows, transactions

__all__ = ["BASIC", "DELAY_MS", "OPERATIONS", "Moment", "Opened", "Operation", "topic_config"]

DELAY_MS: Final = 60_000
STEP_MS: Final = 20_000
FAR_MS: Final = 4_000_000_000_000
"""Beyond `file.delete.delay.ms` of everything: what counts there is the file system's own time."""


def topic_config(scale: int = 1, *, compression: str = "uncompressed") -> dict[str, str]:
    """Return what the topics of workloads have in common: several segments, cleaned soon."""
    return {
        "compression.type": compression,
        "index.interval.bytes": str(100 * scale),
        "segment.bytes": str(400 * scale),
        "file.delete.delay.ms": str(DELAY_MS),
        # No cleaning is at the very moment when one of them is over: a retry is a little later.
        "delete.retention.ms": str(3 * STEP_MS + STEP_MS // 2),
        "min.cleanable.dirty.ratio": "0",
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a workload is: from it follow the values that are written, and the time."""

    turn: int = 100
    now_ms: int = 1_700_000_000_000
    scale: int = 1
    """Batches and segments are so many times as long as the shortest ones."""

    @property
    def steps(self) -> int:
        """How many operations there were."""
        return self.turn - Moment().turn

    def next(self) -> Moment:
        """Return the moment of the next operation."""
        return dataclasses.replace(self, turn=self.turn + 1, now_ms=self.now_ms + STEP_MS)

    def rows(self, count: int) -> Rows:
        """Return records of this turn."""
        return rows(self.turn, count, self.scale)


class Opened:
    """A log that is open, and the moment of its last operation."""

    def __init__(self, root: Path, moment: Moment = Moment()) -> None:
        self.root = root
        self.moment = moment
        self.engine = DirectoryLog(root, create=False)

    def perform(self, name: str) -> None:
        """Do the next operation."""
        self.moment = self.moment.next()
        OPERATIONS[name].run(self)

    def perform_again(self, name: str, *, later_ms: int = 0) -> None:
        """Do the last operation once more, with the same values, and so much later."""
        self.moment = dataclasses.replace(self.moment, now_ms=self.moment.now_ms + later_ms)
        OPERATIONS[name].run(self)

    def reopen(self) -> None:
        """Close the log and open it."""
        self.engine.close()
        self.engine = DirectoryLog(self.root, create=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that is done to a log.

    `kind` says what may be seen of it half way (see `checks`). What is `repeatable` may be done
    again when nobody knows whether it was done: the second time changes nothing.
    """

    name: str
    run: Callable[[Opened], None]
    kind: str
    repeatable: bool = True


def _stage(
    log: Opened, task: int, batches: Mapping[str, pa.RecordBatch], batch_size: int
) -> StagedMessage:
    writer = StagedWriter(
        log.engine,
        log.engine.state(),
        now_ms=lambda: log.moment.now_ms,
        writer_slug=writer_slug("torture", "*"),
        batch_id=log.moment.turn,
        spark_partition=task,
        batch_size=batch_size,
    )
    try:
        for topic, batch in batches.items():
            writer.append(topic, batch)
        return writer.finish()
    except BaseException:
        writer.discard()
        raise


def _commit(log: Opened, messages: list[StagedMessage]) -> None:
    writer = Writer("torture", "*", log.moment.turn)
    log.engine.commit(messages, writer=writer, now_ms=log.moment.now_ms)


# --- operations ----------------------------------------------------------------------------------


def _append(log: Opened) -> None:
    log.engine.append("t", batch(log.moment.rows(3)), now_ms=log.moment.now_ms)


def _relaxed(log: Opened) -> None:
    log.engine.append("r", batch(log.moment.rows(2)), now_ms=log.moment.now_ms)


def _adopt(log: Opened) -> None:
    """Commit a run that is large enough to become a segment."""
    size = 200 * log.moment.scale
    with mock.patch.object(staged_directory, "SEGMENT_RUN_SIZE", size):
        turn, now_ms = log.moment.turn, log.moment.now_ms
        run = batch(log.moment.rows(14), partition=turn % 2, now_ms=now_ms)
        message = _stage(log, 0, {"t": run}, batch_size=size)
    _commit(log, [message])


def _commit_many(log: Opened) -> None:
    """Commit what two tasks have staged for all partitions of two topics."""
    brought = (log.moment.rows(4), log.moment.next().rows(3))
    batches = [batch(records, now_ms=log.moment.now_ms) for records in brought]
    messages = [
        _stage(log, task, {"t": each, "d": each}, batch_size=150 * log.moment.scale)
        for task, each in enumerate(batches)
    ]
    _commit(log, messages)


def _wide(log: Opened) -> None:
    """Commit as if to many partitions: all are synced, also those behind one that has failed.

    By this one thread, so that the calls come in the same order each time.
    """
    known = files._SIDE_BY_SIDE_MIN, files._SIDE_BY_SIDE_MAX
    files._SIDE_BY_SIDE_MIN, files._SIDE_BY_SIDE_MAX = 1, 1
    try:
        _commit_many(log)
    finally:
        files._SIDE_BY_SIDE_MIN, files._SIDE_BY_SIDE_MAX = known


def _transact(log: Opened) -> None:
    """Import a transaction that is committed, and one that is aborted."""
    moment, partition = log.moment, log.moment.turn % 2
    _, end = log.engine.offsets("t")[partition]
    data = transactions(moment.turn, end, moment.now_ms, moment.scale)
    log.engine.append_raw("t", partition, data, now_ms=moment.now_ms)


def _refuse(log: Opened) -> None:
    """Break off two commits half-way, one by the caller's fault and one by the disk's."""
    now_ms = log.moment.now_ms
    writer = StagedWriter(None, log.engine.state(), now_ms=lambda: now_ms)
    for topic in ("t", "d"):
        writer.append(topic, batch(log.moment.rows(5)))
    message = writer.finish()
    for fault in (InvalidInputError("refused"), OSError(errno.ENOSPC, "refused")):
        try:
            with mock.patch.object(Transaction, "sync_appended", side_effect=fault):
                log.engine.commit([message], now_ms=now_ms)
        except KafkaLogError as told:
            if fault not in (told, told.__cause__):
                raise


def _roll(log: Opened) -> None:
    with log.engine.transaction() as transaction:
        for topic in ("t", "d"):
            for partition, state in transaction.topic(topic).present():
                if state.active_size:
                    transaction.roll(topic, partition, log.moment.now_ms)
        transaction.publish(log.moment.now_ms)


def _clean_with(log: Opened, config: CleanerConfig) -> None:
    found = manager.clean(log.engine, "t", force=True, now_ms=log.moment.now_ms, config=config)
    manager.retain(log.engine, "t", now_ms=log.moment.now_ms)
    for stats in found:
        if stats.error is not None:
            raise StorageError(f"{stats.topic}-{stats.partition}: not cleaned: {stats.error}")


def _clean(log: Opened) -> None:
    """Clean as Kafka does: batch by batch."""
    _clean_with(log, CleanerConfig(dedupe_buffer_size=24 << 10, merge_batches=False))


def _pin(log: Opened) -> None:
    """Clean while a reader holds the moment that it has pinned."""
    turn = log.moment.turn
    action = pins.Action("torture", str(turn), query="query", batch=turn)
    with contextlib.ExitStack() as held:
        pins.pin(log.root, action, log.engine.state, log.moment.now_ms, held=held)
        _clean(log)


def _merge(log: Opened) -> None:
    """Clean with room in segments for several, batches joined, and keys beyond the budget."""
    config = {"segment.bytes": str(2_000 * log.moment.scale + log.moment.turn)}
    log.engine.alter_topic("t", config, now_ms=log.moment.now_ms)
    _clean_with(log, CleanerConfig(dedupe_buffer_size=24 * 6))


def _retain(log: Opened) -> None:
    for stats in log.engine.apply_retention(now_ms=log.moment.now_ms):
        if stats.error is not None:
            raise StorageError(f"{stats.topic}-{stats.partition}: not retained: {stats.error}")


def _delete_records(log: Opened) -> None:
    """Delete as many of the records as follows from the turn, so that a second time is none."""
    for partition, (_, end) in log.engine.offsets("d").items():
        before = min(end, 2 * log.moment.steps)
        log.engine.delete_records("d", partition, before, now_ms=log.moment.now_ms)


def _topic(log: Opened) -> None:
    """Delete a topic, and create one of its name, which its config tells from the old one."""
    moment = log.moment
    if "x" in log.engine.topics():
        log.engine.delete_topic("x", now_ms=moment.now_ms)
    config = {"max.message.bytes": str(10_000 + moment.turn), "file.delete.delay.ms": str(DELAY_MS)}
    log.engine.create_topic("x", 1, config, now_ms=moment.now_ms)


def _delete_topic(log: Opened) -> None:
    if "x" in log.engine.topics():
        log.engine.delete_topic("x", now_ms=log.moment.now_ms)


def _alter(log: Opened) -> None:
    size = str(20_000 + log.moment.turn)
    log.engine.alter_topic("t", {"max.message.bytes": size}, now_ms=log.moment.now_ms)


def _grow(log: Opened) -> None:
    """Give a topic one partition more in each fourth turn."""
    count = 2 + (log.moment.steps - 1) // 4
    if len(log.engine.describe("d").partitions) < count:
        log.engine.alter_topic("d", partitions=count, now_ms=log.moment.now_ms)


def _copy(log: Opened) -> None:
    """Copy a topic of another log, by several commits."""
    size = 100 * log.moment.scale
    with (
        mock.patch.object(copied_batches, "COMMIT_BYTES", size),
        mock.patch.object(copy, "COMMIT_BYTES", size),
    ):
        copy.copy(_source(log.moment.scale), log.engine, now_ms=log.moment.now_ms)


@functools.cache
def _source(scale: int) -> DirectoryLog:
    """Return a log with one topic, which the cleaner has left gaps in; always the same one."""
    directory = tempfile.mkdtemp(prefix="source-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    moment = Moment(scale=scale)
    with repeatable("source"):
        with DirectoryLog(Path(directory)) as engine:
            engine.create_topic("c", 1, topic_config(scale), now_ms=moment.now_ms)
            for _ in range(4):
                moment = moment.next()
                engine.append("c", batch(moment.rows(5)), now_ms=moment.now_ms)
            manager.clean(engine, "c", force=True, now_ms=moment.now_ms)
        return DirectoryLog(Path(directory), read_only=True)


def _erase(log: Opened) -> None:
    """Erase the deleted keys of one partition at once; there are none if that was done before."""
    first, other = (_latest(log, number) for number in (0, 1))
    keys = [key for key, value in first.items() if value is None and key not in other]
    erasure = erase(
        log.engine,
        "t",
        ErasedKeys(keys or [b"none"]),
        now=True,
        clock=lambda: log.moment.now_ms,
        config=CleanerConfig(dedupe_buffer_size=24 << 10),
    )
    if erasure.after.by_key:
        raise StorageError(f"t: not erased: {erasure.after.residuals}")


def _latest(log: Opened, partition: int) -> dict[bytes, bytes | None]:
    """Return the latest value of each key; None for a tombstone."""
    latest: dict[bytes, bytes | None] = {}
    for found in log.engine.read("t", partition, columns=("key", "value")):
        latest.update(zip(*(column.to_pylist() for column in found.columns), strict=True))
    return latest


def _checkpoint(log: Opened) -> None:
    """Write the checkpoints, and remove what waits for `file.delete.delay.ms`."""
    now_ms = log.moment.now_ms
    with log.engine.transaction() as transaction:
        transaction.sync_on_publish()
        transaction.publish(now_ms)
        checkpoints.write_root_checkpoints(log.root, transaction.state)
    manager.sweep(log.engine, now_ms=now_ms)
    for name, topic in sorted(log.engine.state().topics.items()):
        for partition, _ in topic.present():
            directory = log.engine.partition_directory(name, partition)
            sweep_deleted(directory, older_than_ms=DELAY_MS, now_ms=FAR_MS)


def _release_adopt(log: Opened) -> None:
    """Give the directory to a broker, and take it back."""
    log.engine.close()
    release(log.root, now_ms=log.moment.now_ms)  # also where an adoption was broken off
    adopt(log.root, now_ms=log.moment.now_ms)
    log.engine = DirectoryLog(log.root, create=False)


_ALL: Final = (
    Operation("append", _append, "atomic", repeatable=False),
    Operation("adopt", _adopt, "atomic"),
    Operation("roll", _roll, "none"),
    Operation("commit", _commit_many, "atomic"),
    Operation("clean", _clean, "partial"),
    Operation("merge", _merge, "partial"),
    Operation("retain", _retain, "partial"),
    Operation("delete_records", _delete_records, "partial"),
    Operation("topic", _topic, "topic"),
    Operation("alter", _alter, "atomic"),
    Operation("checkpoint", _checkpoint, "none"),
    Operation("close", Opened.reopen, "none"),
    Operation("relaxed", _relaxed, "atomic", repeatable=False),
    Operation("release_adopt", _release_adopt, "handed"),
    Operation("refuse", _refuse, "none"),
    Operation("wide", _wide, "atomic"),
    Operation("transact", _transact, "atomic", repeatable=False),
    Operation("pin", _pin, "partial"),
    Operation("delete_topic", _delete_topic, "atomic"),
    Operation("grow", _grow, "atomic"),
    Operation("copy", _copy, "copied"),
    Operation("erase", _erase, "partial"),
)
OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({each.name: each for each in _ALL})
BASIC: Final = tuple(each.name for each in _ALL[:12])
"""The operations of which all sequences are tried."""
