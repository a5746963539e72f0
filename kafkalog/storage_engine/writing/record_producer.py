"""Sends single records to a topic: gathers them, and commits many at once.

A commit is synced, which takes milliseconds whether it is of one record or of thousands. So records
wait until they fill a commit, or the first of them has waited for `linger.ms`; a thread commits
them, while the next ones are gathered.

Each producer is a writer, and numbers its commits. One that failed is tried again under its number:
should it be in the log after all, it is not written twice.

Like Kafka's KafkaProducer, RecordAccumulator and Sender.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - Arrow wants it, and it cannot be had at exit
import logging
import math
import operator
import os
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Self

from kafkalog.errors import CommitInDoubtError, InvalidInputError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock as clocks
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records.record_fields import Headers
from kafkalog.storage_engine.writing import writers
from kafkalog.storage_engine.writing.sent_records import UNKNOWN, SentRecord, SentRecords
from kafkalog.storage_engine.writing.single_record import (
    SingleRecord,
    TopicRules,
    record_batch,
    with_any_time,
)
from kafkalog.storage_engine.writing.staging import StagedWriter
from kafkalog.storage_engine.writing.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.writing.staging import StagedMessage

__all__ = ["Producer"]

_BATCH_SIZE_MAX: Final = 1 << 30
"""An Arrow column, of which one is made for each commit, holds less than 2 GiB."""
_RETRY_S: Final = 1.0
"""Kafka: retry.backoff.max.ms."""

_log = logging.getLogger(__name__)


class Producer:
    """Sends records to one topic, from any number of threads; a context manager.

    Made by `KafkaLog.producer`. What `send` has taken is written within about `linger_ms`, many
    records a commit, and synced as commits of the topic are; readers see whole commits. The records
    of one thread are written in the order in which it sent them. While one commit is made the next
    one is gathered; when that is full too, `send` waits.

    **The end of a `with` block** closes it, also after an error: what was sent is written, as some
    of it may be already. Where it has to be all or nothing, `append` it.

    **A commit that fails** is tried again, every second and at each `flush` and `close`, and is
    never written twice. Until it succeeds nothing is dropped, and no more is taken: `send`,
    `flush`, `result` and `close` raise what it failed with. A topic that was deleted, or altered so
    that it refuses what was sent, is such a failure too. `close` tries once (again, where it is in
    doubt what became of that), and then gives up: a note of its error says of how many records it
    is not known that they are written.

    While it is open `kafkalog writers` lists it. A process that is forked off needs a producer of
    its own, and none can be pickled. One that is not closed is closed when the interpreter exits,
    but in a child of `multiprocessing`, which ends without that.
    """

    def __init__(
        self,
        engine: Engine,
        topic: str,
        *,
        batch_size: int,
        linger_ms: float,
        clock: Callable[[], int] = clocks.now_ms,
    ) -> None:
        """`clock` gives epoch milliseconds, for records that come without a time."""
        self.topic: Final = topic
        self._engine = engine
        self._batch_size = _checked_batch_size(batch_size)
        self._linger_s = _checked_linger_ms(linger_ms) / 1e3
        self._clock = clock
        self._id = uuid.uuid4()
        self._rules = TopicRules.of(engine.describe(topic))
        self._changed = threading.Condition()
        self._gathered = SentRecords(topic, 0, self._wait_for)
        self._committing: SentRecords | None = None
        """What the thread commits, or has failed to."""
        self._flushed = UNKNOWN
        """Up to this number nothing waits for `linger.ms`."""
        self._fault: BaseException | None = None
        """What the last commit failed with; None when it succeeded."""
        self._failures = 0
        self._retry_s = 0.0
        self._is_closed = self._is_stopped = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kafkalog-producer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # who forgets to close loses nothing

    def send(
        self,
        key: bytes | str | None,
        value: bytes | str | None,
        *,
        headers: Headers | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
    ) -> SentRecord:
        """Take a record, which is committed soon, with others; text is UTF-8.

        A value of None is a tombstone. headers: (text, bytes) pairs, or a mapping; timestamp: epoch
        ms, now unless given; partition: by the key unless given. Waits while records come faster
        than they are committed. Raises InvalidInputError for a record that `append` would refuse,
        and what the last commit failed with: this record is not taken then, all others are kept.
        """
        self._check_process()
        now_ms = self._clock()
        time_ms = now_ms if timestamp is None else timestamp
        record = SingleRecord.of(key, value, headers, time_ms, partition)
        size = record.size()
        if not self._rules.surely_takes(record, size, now_ms):
            self._check(record, now_ms)
        with self._changed:
            self._check_open()
            while self._is_full() and self._fault is None:
                self._changed.wait()
                self._check_open()
            if self._fault is not None:
                raise self._fault
            if not len(self._gathered):
                self._gathered.since_s = time.monotonic()
                self._changed.notify_all()
            place = self._gathered.add(record, size)
            if self._is_full():
                self._changed.notify_all()
            return SentRecord(self._gathered, place)

    def flush(self) -> None:
        """Return when all that was sent before is committed; raises what a commit failed with."""
        self._check_process()
        with self._changed:
            self._check_open()
            self._flush()

    def close(self) -> None:
        """Commit what was sent, and end; again it only waits for that.

        Raises what the commit failed with; then the records that are left are given up. In a
        process that was forked off it does nothing: the records are the other one's.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
        if not is_first:
            self._thread.join()
            return
        try:
            with self._changed:
                try:
                    self._flush()
                except CommitInDoubtError:
                    self._flush()  # the next commit can tell
        except BaseException as fault:
            try:
                self._stop()
            finally:
                self._give_up(fault)
            raise
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"the producer of topic {self.topic!r} cannot be pickled: open the log, and a producer "
            "of it, in the process that sends"
        )

    # --- what is sent ----------------------------------------------------------------------------

    def _check(self, record: SingleRecord, now_ms: int) -> None:
        """Stage a record alone; raises what `append` would."""
        state = self._engine.state()
        rows = self._rows([record], state)
        for run in self._staged(rows, state, now_ms).runs:
            state.topic(self.topic).check_is_here(run.partition)

    def _rows(self, records: list[SingleRecord], state: State, number: int = 0) -> pa.RecordBatch:
        return record_batch(records, state.topic(self.topic), self._id.int + number)

    def _staged(self, rows: pa.RecordBatch, state: State, now_ms: int) -> StagedMessage:
        staging = StagedWriter(None, state, now_ms=lambda: now_ms)
        staging.append(self.topic, rows)
        return staging.finish()

    def _is_full(self) -> bool:
        return len(self._gathered) > 0 and self._gathered.size >= self._batch_size

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError(
                f"the producer of topic {self.topic!r} is closed: make another one of the log"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"the producer of topic {self.topic!r} is another process's, which this one was "
                "forked off: open the log, and a producer of it, here"
            )

    # --- waiting for commits ---------------------------------------------------------------------

    def _wait_for(self, sent: SentRecords, timeout: float | None) -> None:
        """Return when some records are committed: what `SentRecord.result` waits for."""
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: sent.is_committed or self._fault is not None, timeout)
            if sent.is_committed:
                return
            if self._fault is not None:
                raise self._fault
            raise TimeoutError(f"topic {self.topic!r}: not committed within {timeout} s")

    def _flush(self) -> None:
        """Hold the lock for it, and for what follows."""
        last = self._gathered if len(self._gathered) else self._committing
        failures = self._failures
        while last is not None and not last.is_committed:
            if self._fault is not None and self._failures > failures:
                raise self._fault
            if self._flushed < last.number:
                self._flushed = last.number
                self._changed.notify_all()
            self._changed.wait()

    def _due_s(self) -> float:
        """Return when the thread has something to commit."""
        next_one = self._committing or self._gathered
        if not len(next_one):
            return math.inf
        if next_one.number <= self._flushed:
            return -math.inf
        if self._committing is not None:
            return self._retry_s
        return -math.inf if self._is_full() else self._gathered.since_s + self._linger_s

    def _next(self) -> SentRecords | None:
        """Wait for what to commit; None at the end."""
        while not self._is_stopped:
            wait_s = self._due_s() - time.monotonic()
            if wait_s > 0:
                self._changed.wait(None if wait_s == math.inf else wait_s)
                continue
            if self._committing is None:
                self._committing = self._gathered
                number = self._committing.number + 1
                self._gathered = SentRecords(self.topic, number, self._wait_for)
                self._changed.notify_all()
            return self._committing
        return None

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                sent = self._next()
            if sent is None:
                return
            try:
                self._commit(sent)
            except BaseException as fault:  # whatever it is, those who send get to know of it
                self._note_failure(sent, fault)

    def _commit(self, sent: SentRecords) -> None:
        """Commit some records, unless that was done when it seemed to fail."""
        import numpy as np

        state, now_ms = self._engine.state(), self._clock()
        rows = self._rows(sent.records, state, sent.number)
        staged = self._staged(rows, with_any_time(state, self.topic), now_ms)
        writer = Writer(self._writer_id, self.topic, sent.number)
        result = self._engine.commit([staged], writer=writer, now_ms=now_ms)
        topic = state.topic(self.topic)
        partitions, timestamps = (rows[name].to_numpy() for name in ("partition", "timestamp"))
        if TopicConfig.parse(topic.config).message_timestamp_type == "LogAppendTime":
            timestamps = np.full(len(rows), UNKNOWN if result.skipped else now_ms)
        starts = {number: first for (_, number), (first, _) in result.offsets.items()}
        with self._changed:
            self._rules = TopicRules.of(topic)
            sent.note_committed(partitions, timestamps, starts)
            self._committing = self._fault = None
            self._changed.notify_all()

    def _note_failure(self, sent: SentRecords, fault: BaseException) -> None:
        with self._changed:
            is_first, self._fault = self._fault is None, fault
            self._failures += 1
            self._flushed = UNKNOWN
            self._retry_s = time.monotonic() + _RETRY_S
            self._changed.notify_all()
        if is_first:
            _log.warning(
                "topic %r: a commit has failed, and is tried again (records: %d): %s",
                self.topic,
                len(sent),
                fault,
            )

    # --- the end ---------------------------------------------------------------------------------

    @property
    def _writer_id(self) -> str:
        return f"producer-{self._id.hex}"

    def _stop(self) -> None:
        """End the thread, and let the log forget this writer: it writes no more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        try:
            if writers.writers(self._engine.state(), self._writer_id):
                writers.forget_writer(self._engine, self._writer_id, now_ms=self._clock())
        except (KafkaLogError, OSError) as fault:  # then it is forgotten as one that was killed
            _log.warning("topic %r: a producer's end was not noted: %s", self.topic, fault)

    def _give_up(self, fault: BaseException) -> None:
        """Say how many records are not written; who waits for one of them gets the error."""
        with self._changed:
            count = len(self._gathered) + len(self._committing or ())
            if count == 0:
                return
            self._fault = self._fault or fault
            self._changed.notify_all()
        text = (
            f"topic {self.topic!r}: records that were sent and are not known to be written: {count}"
        )
        fault.add_note(text)
        _log.error("%s: %s", text, fault)


def _checked_batch_size(batch_size: int) -> int:
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = UNKNOWN
    if not 0 <= size <= _BATCH_SIZE_MAX:
        raise InvalidInputError(
            f"batch.size (batch_size): expected 0 to {_BATCH_SIZE_MAX} bytes, found {batch_size!r}"
        )
    return size


def _checked_linger_ms(linger_ms: float) -> float:
    if not isinstance(linger_ms, int | float) or not 0 <= linger_ms <= layout.INT32_MAX:
        raise InvalidInputError(
            f"linger.ms (linger_ms): expected 0 to {layout.INT32_MAX}, found {linger_ms!r}"
        )
    return linger_ms
