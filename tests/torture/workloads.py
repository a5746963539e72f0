"""What is done to a log while it is broken: small operations, one after the other.

The same sequence gives the same records at the same offsets, whenever it runs: keys, values and the
clock follow from how many operations came before. Only ids and the cleaner's secrets are drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from kafkalog.cleaner import manager
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.errors import StorageError
from kafkalog.storage_engine import checkpoints, layout, staging
from kafkalog.storage_engine.broker.adopt import adopt
from kafkalog.storage_engine.broker.release import release
from kafkalog.storage_engine.commit import Writer
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.segments import sweep_deleted
from kafkalog.storage_engine.staging import StagedMessage, StagedWriter, writer_slug

__all__ = [
    "BASIC",
    "OPERATIONS",
    "VARIANTS",
    "Moment",
    "Opened",
    "Operation",
    "prepare",
    "random_sequences",
    "sequences",
    "small_files",
]

DELAY_MS: Final = 60_000
STEP_MS: Final = 20_000
FAR_MS: Final = 4_000_000_000_000
"""Beyond `file.delete.delay.ms` of everything: what counts there is the file system's own time."""
KEYS: Final = 12
VARIANTS: Final = ("plain", "lz4", "full")
"""As it comes; compressed; with a journal so full that one of the next commits rewrites it."""
Rows = list[tuple[bytes, bytes | None]]


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a workload is: from it follow the values that are written, and the time."""

    turn: int = 100
    now_ms: int = 1_700_000_000_000

    def next(self) -> Moment:
        """Return the moment of the next operation."""
        return Moment(self.turn + 1, self.now_ms + STEP_MS)


class Opened:
    """A log that is open, and the moment of its last operation."""

    def __init__(self, root: Path, moment: Moment = Moment()) -> None:
        self.root = root
        self.moment = moment
        self.engine = Engine(root, create=False)

    def perform(self, name: str) -> None:
        """Do the next operation."""
        self.moment = self.moment.next()
        OPERATIONS[name].run(self)

    def perform_again(self, name: str) -> None:
        """Do the last operation once more, with the same values and at the same time."""
        OPERATIONS[name].run(self)

    def reopen(self) -> None:
        """Close the log and open it."""
        self.engine.close()
        self.engine = Engine(self.root, create=False)


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


# --- records -------------------------------------------------------------------------------------


def _rows(turn: int, count: int) -> Rows:
    """Return the records of a turn; one of them deletes its key."""
    found: Rows = []
    for n in range(count):
        value = None if n == 1 and turn % 2 else b"%d.%d" % (turn, n) + b"v" * 9
        found.append((b"k%d" % ((turn * 5 + n) % KEYS), value))
    return found


def _batch(rows: Rows, partition: int | None = None) -> pa.RecordBatch:
    columns = {
        "key": pa.array([key for key, _ in rows], pa.binary()),
        "value": pa.array([value for _, value in rows], pa.binary()),
    }
    if partition is not None:
        columns["partition"] = pa.array([partition] * len(rows), pa.int32())
    return pa.record_batch(columns)


def _stage(
    log: Opened, task: int, batches: Mapping[str, pa.RecordBatch], batch_size: int
) -> StagedMessage:
    writer = StagedWriter(
        log.root,
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
    log.engine.append("t", _batch(_rows(log.moment.turn, 3)), now_ms=log.moment.now_ms)


def _relaxed(log: Opened) -> None:
    log.engine.append("r", _batch(_rows(log.moment.turn, 2)), now_ms=log.moment.now_ms)


def _adopt(log: Opened) -> None:
    """Commit a run that is large enough to become a segment."""
    large, staging.SEGMENT_RUN_SIZE = staging.SEGMENT_RUN_SIZE, 200
    try:
        batch = _batch(_rows(log.moment.turn, 14), log.moment.turn % 2)
        message = _stage(log, 0, {"t": batch}, batch_size=200)
    finally:
        staging.SEGMENT_RUN_SIZE = large
    _commit(log, [message])


def _commit_many(log: Opened) -> None:
    """Commit what two tasks have staged for all partitions of two topics."""
    turn = log.moment.turn
    messages = [
        _stage(log, task, {"t": _batch(rows), "d": _batch(rows)}, batch_size=150)
        for task, rows in enumerate((_rows(turn, 4), _rows(turn + 1, 3)))
    ]
    _commit(log, messages)


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


def _merge(log: Opened) -> None:
    """Clean with room in segments for several, batches joined, and keys beyond the budget."""
    config = {"segment.bytes": str(2_000 + log.moment.turn)}
    log.engine.alter_topic("t", config, now_ms=log.moment.now_ms)
    _clean_with(log, CleanerConfig(dedupe_buffer_size=24 * 6))


def _retain(log: Opened) -> None:
    for stats in log.engine.apply_retention(now_ms=log.moment.now_ms):
        if stats.error is not None:
            raise StorageError(f"{stats.topic}-{stats.partition}: not retained: {stats.error}")


def _delete_records(log: Opened) -> None:
    """Delete as many of the records as follows from the turn, so that a second time is none."""
    for partition, (_, end) in log.engine.offsets("d").items():
        before = min(end, 2 * (log.moment.turn - Moment().turn))
        log.engine.delete_records("d", partition, before, now_ms=log.moment.now_ms)


def _topic(log: Opened) -> None:
    """Delete a topic, and create one of its name, which its config tells from the old one."""
    moment = log.moment
    if "x" in log.engine.topics():
        log.engine.delete_topic("x", now_ms=moment.now_ms)
    config = {"max.message.bytes": str(10_000 + moment.turn), "file.delete.delay.ms": str(DELAY_MS)}
    log.engine.create_topic("x", 1, config, now_ms=moment.now_ms)


def _alter(log: Opened) -> None:
    size = str(20_000 + log.moment.turn)
    log.engine.alter_topic("t", {"max.message.bytes": size}, now_ms=log.moment.now_ms)


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
    log.engine = Engine(log.root, create=False)


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
)
OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({each.name: each for each in _ALL})
BASIC: Final = tuple(each.name for each in _ALL[:12])
"""The operations of which all sequences are tried."""


# --- workloads -----------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let new journals be of a few KB: to copy, and to compare, a MB of zeros takes long."""
    size = layout.JOURNAL_SIZE
    setattr(layout, "JOURNAL_SIZE", 4 << 10)  # noqa: B010  (a constant but for this)
    try:
        yield
    finally:
        setattr(layout, "JOURNAL_SIZE", size)  # noqa: B010


def prepare(root: Path, variant: str = "plain") -> None:
    """Make the log that workloads begin with.

    A compacted topic `t` of several small segments with overwritten and deleted keys, a topic `d`
    that retention takes from, `r` whose commits are not synced at once, and `x` to be deleted.
    """
    codec = "lz4" if variant == "lz4" else "uncompressed"
    common = {
        "compression.type": codec,
        "index.interval.bytes": "100",
        "file.delete.delay.ms": str(DELAY_MS),
        "delete.retention.ms": str(3 * STEP_MS),
        "min.cleanable.dirty.ratio": "0",
    }
    deleted = {"cleanup.policy": "delete", "retention.bytes": "400", "segment.bytes": "300"}
    with small_files(), Engine(root) as engine:
        now_ms = Moment().now_ms
        engine.create_topic("t", 2, {**common, "segment.bytes": "400"}, now_ms=now_ms)
        engine.create_topic("d", 1, {**common, **deleted}, now_ms=now_ms)
        engine.create_topic("r", 1, {**common, "flush.messages": "5"}, now_ms=now_ms)
        engine.create_topic("x", 1, {"file.delete.delay.ms": str(DELAY_MS)}, now_ms=now_ms)
        for turn in range(5):
            for topic in ("t", "d"):
                engine.append(topic, _batch(_rows(turn, 6)), now_ms=now_ms + turn)
        engine.append("x", _batch(_rows(1, 2)), now_ms=now_ms)
        engine.sync(now_ms=now_ms)
    if variant == "full":
        _fill_journal(root)


def _fill_journal(root: Path) -> None:
    """Make commits until another one of them does not fit into the journal."""
    journal, spare = root / layout.COMMIT, root.with_name(root.name + ".before")
    inode = journal.stat().st_ino
    with Engine(root, create=False) as engine:
        size = 10_000
        while journal.stat().st_ino == inode:
            shutil.copy2(journal, spare)
            size += 1
            engine.alter_topic("r", {"max.message.bytes": str(size)}, now_ms=Moment().now_ms)
    spare.replace(journal)


def sequences(most: int, *, least: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield all sequences of `least` to `most` of the basic operations."""
    for length in range(least, most + 1):
        yield from itertools.product(BASIC, repeat=length)


def random_sequences(seed: int, length: int, count: int) -> Iterator[tuple[str, ...]]:
    """Yield sequences drawn by `seed` from all operations."""
    dice = random.Random(f"sequences {seed} {length}")
    for _ in range(count):
        yield tuple(dice.choices(tuple(OPERATIONS), k=length))
