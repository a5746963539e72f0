"""Send single records to a topic, many in one commit.

The sync of a commit takes milliseconds, for one record or thousands. Records therefore wait until
they fill a commit, or the first of them has waited for `linger.ms`. A thread commits them while the
next ones are collected.

Each producer is a writer and numbers its commits. A failed commit is retried under its number; if
it is in the log after all, it is not written twice.

Kafka: KafkaProducer, RecordAccumulator, Sender.
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
from datetime import datetime
from typing import TYPE_CHECKING, Final, NoReturn, Self

from kafkalog.errors import CommitInDoubtError, InvalidInputError, KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock as clocks
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.writer import Writer
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

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.writing.staged_message import StagedMessage

_BATCH_SIZE_MAX: Final = 1 << 30
"""Each commit makes one Arrow column, which holds less than 2 GiB."""
_RETRY_S: Final = 1.0
"""Kafka: retry.backoff.max.ms."""

_log = logging.getLogger(__name__)


class Producer:
    """Send records to one topic, from any number of threads; a context manager.

    `KafkaLog.producer` makes it. Records given to `send` are written within about `linger_ms`, many
    in one commit, and synced like the topic's commits. Readers see whole commits. The records of
    one thread keep their order. While one commit is made, the next is collected; when that is full
    too, `send` waits.

    **The end of a `with` block** closes the producer, even after an error. It writes the sent
    records, because some may be written already. Use `append` for all or nothing.

    **A failed commit** is retried every second and at each `flush` and `close`, and is never
    written twice. Until it succeeds, the producer keeps all records and accepts no more: `send`,
    `flush`, `result` and `close` raise the commit's error. A topic that was deleted, or altered to
    refuse sent records, causes this failure too. A `close` tries once (again, if the commit is in
    doubt) and then gives up. A note on its error says how many records may not be written.

    `kafkalog writers` lists an open producer. A forked process needs its own producer, and a
    producer cannot be pickled. The interpreter's exit closes an open producer, except in a child of
    `multiprocessing`, which does not run exit handlers.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        batch_size: int,
        linger_ms: float,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """`clock` returns epoch ms, for records without a timestamp; default: the host's clock."""
        self.topic: Final = topic
        self._log = log
        self._batch_size = _checked_batch_size(batch_size)
        self._linger_s = _checked_linger_ms(linger_ms) / 1e3
        self._clock = clock or clocks.now_ms
        self._id = uuid.uuid4()
        self._rules = TopicRules.of(log.describe(topic))
        self._changed = threading.Condition()
        self._gathered = SentRecords(topic, 0, self._wait_for)
        self._committing: SentRecords | None = None
        """The records that the thread commits, or failed to commit."""
        self._flushed = UNKNOWN
        """Records up to this number do not wait for `linger.ms`."""
        self._fault: BaseException | None = None
        self._failures = 0
        self._retry_s = 0.0
        self._is_closed = self._is_stopped = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kafkalog-producer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a producer that is never closed loses nothing

    def send(
        self,
        key: bytes | str | None,
        value: bytes | str | None,
        *,
        headers: Headers | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> SentRecord:
        """Accept a record, to be committed soon with others; text is UTF-8.

        A value of None is a tombstone. headers: (text, bytes) pairs, or a mapping; timestamp: epoch
        ms, or a datetime with a time zone, default now; partition: default by the key. Waits while
        records come faster than they are committed. Raises InvalidInputError for a record that
        `append` would refuse, and the error of the last failed commit. In both cases this record is
        not accepted; all others are kept.
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
        """Wait until all records sent before are committed; raise a failed commit's error."""
        self._check_process()
        with self._changed:
            self._check_open()
            self._flush()

    def close(self) -> None:
        """Commit the sent records and end; a second call only waits for the first.

        Raises the error of a failed commit and then gives up the remaining records. Does nothing in
        a forked process, because the records belong to the parent.
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
                    self._flush()  # the next commit finds out
        except BaseException as fault:
            try:
                self._stop()
            finally:
                self._give_up(fault)
            raise
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"the producer of topic {self.topic!r} cannot be pickled: open the log and make a "
            "producer in the process that sends"
        )

    def _check(self, record: SingleRecord, now_ms: int) -> None:
        """Stage a record alone, to raise the error of `append`."""
        state = self._log.state()
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
                f"the producer of topic {self.topic!r} is closed: make another one"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"the producer of topic {self.topic!r} belongs to the parent process: open the log "
                "and make a producer in this process"
            )

    def _wait_for(self, sent: SentRecords, timeout: float | None) -> None:
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: sent.is_committed or self._fault is not None, timeout)
            if sent.is_committed:
                return
            if self._fault is not None:
                raise self._fault
            raise TimeoutError(f"topic {self.topic!r}: not committed within {timeout} s")

    def _flush(self) -> None:
        """The caller holds the lock."""
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
        next_one = self._committing or self._gathered
        if not len(next_one):
            return math.inf
        if next_one.number <= self._flushed:
            return -math.inf
        if self._committing is not None:
            return self._retry_s
        return -math.inf if self._is_full() else self._gathered.since_s + self._linger_s

    def _next(self) -> SentRecords | None:
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

    def _run(self) -> None:
        while True:
            with self._changed:
                sent = self._next()
            if sent is None:
                return
            try:
                self._commit(sent)
            except BaseException as fault:  # whatever it is, `send` raises it
                self._note_failure(sent, fault)

    def _commit(self, sent: SentRecords) -> None:
        """Commit some records, unless an attempt that seemed to fail has committed them."""
        import numpy as np

        state, now_ms = self._log.state(), self._clock()
        rows = self._rows(sent.records, state, sent.number)
        staged = self._staged(rows, with_any_time(state, self.topic), now_ms)
        writer = Writer(self._writer_id, self.topic, sent.number)
        result = self._log.commit([staged], writer=writer, now_ms=now_ms)
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
        sent.tell_end()

    def _note_failure(self, sent: SentRecords, fault: BaseException) -> None:
        with self._changed:
            is_first, self._fault = self._fault is None, fault
            self._failures += 1
            self._flushed = UNKNOWN
            self._retry_s = time.monotonic() + _RETRY_S
            self._changed.notify_all()
        if is_first:
            _log.warning(
                "topic %r: a commit failed, and is tried again (records: %d): %s",
                self.topic,
                len(sent),
                fault,
            )

    @property
    def _writer_id(self) -> str:
        return f"producer-{self._id.hex}"

    def _stop(self) -> None:
        """End the thread, and make the log forget this writer."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        try:
            if writers.writers(self._log.state(), self._writer_id):
                writers.forget_writer(
                    self._log, self._writer_id, is_ended=True, now_ms=self._clock()
                )
        except (KafkaLogError, OSError) as fault:  # the log forgets it later, like a killed one
            files.pass_on(fault)
            _log.warning("topic %r: a producer's end was not noted: %s", self.topic, fault)

    def _give_up(self, fault: BaseException) -> None:
        """Report the number of unwritten records, and raise the error in waiting threads."""
        with self._changed:
            count = len(self._gathered) + len(self._committing or ())
            if count == 0:
                return
            self._fault = self._fault or fault
            left = [each for each in (self._committing, self._gathered) if each]
            for each in left:
                each.fault = self._fault
            self._changed.notify_all()
        for each in left:
            each.tell_end()
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
