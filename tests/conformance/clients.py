"""Kafka clients that live as long as a scenario does, over every stop of its broker.

`Sender` knows what was acknowledged, `Follower` fails when it is made to rewind or to skip, and
`HandDriven` chooses producer id, epoch and sequence itself.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiokafka.protocol.api import RequestHeader_v1, RequestStruct, Response
from aiokafka.protocol.produce import ProduceRequest_v7
from aiokafka.protocol.transaction import InitProducerIdRequest_v0
from aiokafka.protocol.types import Array, Int16, Int32, Int64, Schema, String
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from tests.conformance.kafka import KafkaBroker
from tests.conformance.record import Record, record_of

Partition = tuple[str, int]

# A broker that is away for seconds is what these tests are about: nothing of it on the terminal.
_PATIENT = {
    "log_level": 0,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
    "retry.backoff.ms": 20,
    "topic.metadata.refresh.interval.ms": 1000,
}
_WAIT_SECONDS = 60


class Sent(NamedTuple):
    """A record that a broker has acknowledged, or, in a transaction, will have at its commit."""

    key: bytes | None
    value: bytes | None


class Sender:
    """A producer, and what became of each of its records."""

    def __init__(self, broker: KafkaBroker, **settings: object) -> None:
        self.acknowledged: dict[Partition, dict[int, Sent]] = {}
        self.faults: list[str] = []
        self._undecided: list[tuple[Partition, int, Sent]] = []
        self._is_transactional = "transactional_id" in settings
        self._producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "linger.ms": 2,
                "error_cb": self._note,
                **_PATIENT,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        if self._is_transactional:
            self._producer.init_transactions(_WAIT_SECONDS)

    def _note(self, error: KafkaError) -> None:
        if error.fatal():
            self.faults.append(str(error))

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        partition: int = 0,
        timestamp: int = 0,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> None:
        """Send a record; `flush` waits for its acknowledgement. Timestamp 0 is the clock's."""

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self.faults.append(f"{topic}-{partition} {(value or b'')[:20]!r}: {error}")
                return
            place = (topic, partition), message.offset(), Sent(key, value)
            if self._is_transactional:
                self._undecided.append(place)
            else:
                self._acknowledge(*place)

        self._producer.produce(
            topic,
            value=value,
            key=key,
            partition=partition,
            timestamp=timestamp,
            headers=list(headers),
            on_delivery=delivered,
        )
        self._producer.poll(0)

    def _acknowledge(self, partition: Partition, offset: int, sent: Sent) -> None:
        offsets = self.acknowledged.setdefault(partition, {})
        assert offset not in offsets, f"{partition}: offset {offset} was given twice"
        offsets[offset] = sent

    def poke(self, seconds: float = 0.0) -> None:
        """Let the producer work for a while."""
        self._producer.poll(seconds)

    def flush(self) -> None:
        """Wait until everything is acknowledged; fails when anything was refused."""
        remaining = self._producer.flush(_WAIT_SECONDS)
        assert self.faults == [], self.faults[:3]
        assert remaining == 0

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        self._producer.commit_transaction(_WAIT_SECONDS)
        assert self.faults == [], self.faults[:3]
        for place in self._undecided:
            self._acknowledge(*place)
        self._undecided.clear()

    def abort(self) -> None:
        self.flush()  # else what is to be aborted is not even sent
        self._producer.abort_transaction(_WAIT_SECONDS)
        self._undecided.clear()


class Follower:
    """A consumer that holds its positions while its broker comes and goes.

    With a `group` its positions are the group's, and committed; else they are its own. It fails
    when a record comes again or out of order, and when the log has no record at its position.
    """

    def __init__(
        self,
        broker: KafkaBroker,
        partitions: Iterable[Partition],
        *,
        group: str | None = None,
        committed: bool = True,
    ) -> None:
        self.records: dict[Partition, list[Record]] = {place: [] for place in partitions}
        self._group = group
        self._settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group or "followers",
            "enable.auto.commit": False,
            # A group that is new begins at the beginning; one that lost its place would, too.
            "auto.offset.reset": "earliest" if group else "error",
            "fetch.wait.max.ms": 20,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            **_PATIENT,
        }
        self.wake()

    def wake(self) -> None:
        """Begin, or go on where `sleep` has left off."""
        self._consumer = Consumer(self._settings)
        if self._group:
            self._consumer.subscribe(sorted({topic for topic, _ in self.records}))
        else:
            self._consumer.assign([TopicPartition(*place, 0) for place in self.records])

    def sleep(self) -> None:
        """Go away; the group keeps the position, with the leader epoch of the last record."""
        assert self._group
        self._consumer.close()

    def catch_up(self, last_offsets: Mapping[Partition, int]) -> None:
        """Read on until the record of each of these offsets has been read."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while behind := {
            place: offset for place, offset in last_offsets.items() if self.last(place) < offset
        }:
            assert time.monotonic() < deadline, f"nothing comes of {behind}"
            self._take(self._consumer.poll(0.2))
        if self._group:
            self._consumer.commit(asynchronous=False)

    def last(self, place: Partition) -> int:
        """The offset of the last record that was read of a partition; -1 before the first."""
        records = self.records[place]
        return records[-1].offset if records else -1

    def idle(self, seconds: float) -> None:
        """Go on polling, as a consumer must, when there may be nothing to read."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._take(self._consumer.poll(0.1))

    def _take(self, message: Any) -> None:
        if message is None:
            return
        error = message.error()
        if error is not None:
            # The broker is away, or just back and does not know its topics or groups yet.
            assert error.retriable() or error.code() in _PASSING, str(error)
            return
        place = message.topic(), message.partition()
        assert message.offset() > self.last(place), f"{place} went back to {message.offset()}"
        self.records[place].append(record_of(message))

    def close(self) -> None:
        self._consumer.close()


_PASSING = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}

NOT_LEADER_OR_FOLLOWER, COORDINATOR_LOAD_IN_PROGRESS, OUT_OF_ORDER_SEQUENCE = 6, 14, 45


class _EndOfEpochResponse(Response):
    API_KEY, API_VERSION = 23, 3
    _PARTITION = Array(
        ("error_code", Int16), ("partition", Int32), ("epoch", Int32), ("end_offset", Int64)
    )
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", Array(("topic", String("utf-8")), ("partitions", _PARTITION))),
    )


class _EndOfEpochRequest(RequestStruct):
    API_KEY, API_VERSION = 23, 3
    RESPONSE_TYPE = _EndOfEpochResponse
    _PARTITION = Array(("partition", Int32), ("current_epoch", Int32), ("epoch", Int32))
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("topics", Array(("topic", String("utf-8")), ("partitions", _PARTITION))),
    )


class HandDriven:
    """A client by hand: an idempotent producer, one batch a request; a context manager.

    It keeps nothing but its producer id and epoch, so it can send any batch again.
    """

    def __init__(self, broker: KafkaBroker) -> None:
        host, port = broker.bootstrap.split(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None
        self._correlation = itertools.count()
        request = InitProducerIdRequest_v0(None, 60_000)
        # Who asks first has the broker fetch ids from its controller, and is told to come back.
        answer = self._ask_while(COORDINATOR_LOAD_IN_PROGRESS, lambda it: it.error_code, request)
        assert answer.error_code == 0, answer
        self.producer_id, self.producer_epoch = answer.producer_id, answer.producer_epoch

    def send(
        self, topic: str, values: Iterable[bytes], sequence: int, *, partition: int = 0
    ) -> tuple[int, int]:
        """Send a batch whose first record has that sequence; returns error code and base offset."""
        batch = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=0,
            is_transactional=0,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=sequence,
            batch_size=1 << 20,
        )
        now_ms = round(time.time() * 1000)
        for number, value in enumerate(values):
            batch.append(number, now_ms, None, value, [])
        request = ProduceRequest_v7(
            None, -1, 10_000, [(topic, [(partition, bytes(batch.build()))])]
        )
        # Who asks a broker that has just started may come before it leads the partition.
        answer = self._ask_while(NOT_LEADER_OR_FOLLOWER, lambda it: it.topics[0][1][0][1], request)
        ((_, ((_, code, offset, *_),)),) = answer.topics
        return code, offset

    def end_of_epoch(self, place: Partition, epoch: int) -> int:
        """Return where the broker says that a leader epoch ends.

        A consumer whose position is behind that end takes the log for truncated, and rewinds.
        """
        topic, number = place
        request = _EndOfEpochRequest(-1, [(topic, [(number, -1, epoch)])])
        ((_, ((code, _, _, end_offset),)),) = self._ask(request).topics
        assert code == 0
        return int(end_offset)

    def _ask_while(self, passing: int, code_of: Callable[[Any], int], request: Any) -> Any:
        """Ask again, as every client does, as long as the answer is an error that passes."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while code_of(answer := self._ask(request)) == passing and time.monotonic() < deadline:
            time.sleep(0.05)
        return answer

    def _ask(self, request: Any) -> Any:
        header = RequestHeader_v1(request, next(self._correlation), "by-hand").encode()
        data = header + request.encode()
        try:
            answer = self._exchange(data)
        except OSError:
            self.close()  # the broker was restarted since
            answer = self._exchange(data)
        return request.RESPONSE_TYPE.decode(io.BytesIO(answer[4:]))

    def _exchange(self, data: bytes) -> bytes:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 10)
        self._socket.sendall(struct.pack(">i", len(data)) + data)
        (size,) = struct.unpack(">i", self._receive(4))
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def transaction(sender: Sender, *, abort: bool = False) -> Iterator[None]:
    """Send what the block sends in one transaction."""
    sender.begin()
    yield
    if abort:
        sender.abort()
    else:
        sender.commit()
