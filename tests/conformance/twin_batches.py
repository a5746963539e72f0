"""Batches as many producers write them: drawn, valid, and built without our encoder.

`Writers` keeps what each producer may do next: its epoch and sequence, whether its transaction is
open. What it draws a broker could have in its log, also as a source that was compacted before has
it: with gaps, with batches whose last record is gone, with delete horizons, and empty ones.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from tests.builders.batch_builder import NO_PRODUCER, NONE, Record, batch_data, marker

TRANSACTIONAL, DELETE_HORIZON = 0x10, 0x40
ABORT, COMMIT, LEADER_CHANGE = 0, 1, 2


@dataclass(frozen=True)
class Taste:
    """What a log is like; shares are of 1."""

    keys: int
    is_skewed: bool
    tombstones: float
    keyless: float
    records_max: int
    value_size_max: int
    codecs: tuple[int, ...]
    timestamp_types: tuple[int, ...]
    gaps: float
    compacted: float
    plain: float
    idempotent: int
    transactional: int
    aborts: float
    bumps_epochs: bool
    """Whether every marker raises its producer's epoch, as transactions of version 2 do."""
    resets: float
    strange_controls: float


def draw_taste(draw: random.Random) -> Taste:
    one_codec = draw.random() < 0.6
    codecs = (draw.randrange(5),) if one_codec else tuple(range(5))
    return Taste(
        keys=draw.choice((1, 3, 8, 30, 200)),
        is_skewed=draw.random() < 0.5,
        tombstones=draw.choice((0.0, 0.05, 0.3, 0.8)),
        keyless=draw.choice((0.0, 0.0, 0.1, 0.6)),
        records_max=draw.choice((1, 3, 12)),
        value_size_max=draw.choice((3, 40, 400)),
        codecs=codecs,
        timestamp_types=draw.choice(((0,), (0,), (8,), (0, 8))),
        gaps=draw.choice((0.0, 0.0, 0.2)),
        compacted=draw.choice((0.0, 0.0, 0.2)),
        plain=draw.choice((0.0, 0.3, 1.0)),
        idempotent=draw.choice((0, 0, 1, 3)),
        transactional=draw.choice((0, 1, 2, 4)),
        aborts=draw.choice((0.2, 0.5, 0.9)),
        bumps_epochs=draw.random() < 0.5,
        resets=draw.choice((0.0, 0.05)),
        strange_controls=draw.choice((0.0, 0.0, 0.02)),
    )


@dataclass
class _Producer:
    number: int
    is_transactional: bool
    epoch: int = 0
    sequence: int = 0
    is_open: bool = False


@dataclass
class Writers:
    """Draws the batches of one log, one after the other; `end` is the log's end."""

    draw: random.Random
    taste: Taste
    end: int = 0
    leader_epoch: int = 0
    _producers: list[_Producer] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.taste.idempotent + self.taste.transactional):
            self._producers.append(_Producer(1000 + number, number >= self.taste.idempotent))

    @property
    def is_any_open(self) -> bool:
        """Whether a transaction is."""
        return any(producer.is_open for producer in self._producers)

    def batches(self, count: int, now_ms: int) -> bytes:
        """Draw batches with timestamps about `now_ms`."""
        return b"".join(self._batch(now_ms) for _ in range(count))

    def end_transactions(self, now_ms: int, share: float) -> bytes:
        """Write a marker for that share of the open transactions."""
        data = b""
        for producer in self._producers:
            if producer.is_open and self.draw.random() < share:
                data += self._marker(producer, now_ms)
        return data

    def _batch(self, now_ms: int) -> bytes:
        draw, taste = self.draw, self.taste
        if draw.random() < taste.gaps:
            self.end += draw.choice((1, 2, 50))
        if draw.random() < taste.strange_controls:
            return self._leader_change(now_ms)
        if not self._producers or draw.random() < taste.plain:
            return self._data(now_ms, None)
        producer = draw.choice(self._producers)
        if producer.is_transactional and draw.random() < (0.35 if producer.is_open else 0.05):
            return self._marker(producer, now_ms)
        if not producer.is_open and draw.random() < taste.resets:
            producer.epoch += 1
            producer.sequence = 0
        return self._data(now_ms, producer)

    def _data(self, now_ms: int, producer: _Producer | None) -> bytes:
        draw, taste = self.draw, self.taste
        count = draw.randint(1, taste.records_max)
        room = count
        is_compacted = draw.random() < taste.compacted
        if is_compacted:
            room += draw.randrange(4)
        offsets = sorted(draw.sample(range(self.end, self.end + room), count))
        if is_compacted and draw.random() < 0.2:
            offsets = []
        records = [self._record(offset, now_ms) for offset in offsets]
        attributes = draw.choice(taste.timestamp_types)
        if producer is not None and producer.is_transactional:
            attributes |= TRANSACTIONAL
            producer.is_open = True
        base_timestamp = None
        if is_compacted and offsets and draw.random() < 0.5:
            attributes |= DELETE_HORIZON
            base_timestamp = now_ms + draw.choice((-100_000, 0, 1_000, 50_000, 10**9))
        data = self._sealed(
            records, attributes, draw.choice(taste.codecs), room, producer, base_timestamp, now_ms
        )
        if producer is not None:
            producer.sequence = (producer.sequence + room) & 0x7FFF_FFFF
        self.end += room
        return data

    def _sealed(
        self,
        records: list[Record],
        attributes: int,
        codec: int,
        room: int,
        producer: _Producer | None,
        base_timestamp: int | None,
        now_ms: int,
    ) -> bytes:
        of_producer = NO_PRODUCER
        if producer is not None:
            of_producer = (producer.number, producer.epoch, producer.sequence)
        return batch_data(
            records,
            base_offset=self.end,
            last_offset=self.end + room - 1,
            codec=codec if records else NONE,
            attributes=attributes,
            base_timestamp=base_timestamp,
            max_timestamp=None if records else now_ms,
            leader_epoch=self.leader_epoch,
            producer=of_producer,
        )

    def _record(self, offset: int, now_ms: int) -> Record:
        draw, taste = self.draw, self.taste
        number = draw.randrange(taste.keys)
        if taste.is_skewed:
            number = int(taste.keys ** draw.random()) - 1
        # The keys of markers are keys that records may have, too.
        key: bytes | None = draw.choice((b"k%d", b"k%d", b"key number %d")) % number
        if draw.random() < 0.03:
            key = draw.choice((b"", struct.pack(">hh", 0, ABORT), struct.pack(">hh", 0, COMMIT)))
        if draw.random() < taste.keyless:
            key = None
        value: bytes | None = None
        if draw.random() >= taste.tombstones:
            value = draw.choice((b"v", b"\0\xff")) * draw.randrange(taste.value_size_max)
        names = draw.choices((b"a", b"h\xc3\xa9"), k=draw.choice((0, 0, 0, 2)))
        headers = [(name, draw.choice((None, b"", b"header"))) for name in names]
        return Record(offset, now_ms + draw.randrange(-500, 500), key, value, headers)

    def _marker(self, producer: _Producer, now_ms: int) -> bytes:
        if self.taste.bumps_epochs:
            producer.epoch += 1
            producer.sequence = 0
        kind = ABORT if self.draw.random() < self.taste.aborts else COMMIT
        producer.is_open = False
        data = marker(
            self.end, kind, producer.number, timestamp=now_ms, epoch=producer.epoch,
            coordinator_epoch=3, leader_epoch=self.leader_epoch,
        ).data  # fmt: skip
        self.end += 1
        return data

    def _leader_change(self, now_ms: int) -> bytes:
        record = Record(
            self.end,
            now_ms,
            struct.pack(">hh", 0, LEADER_CHANGE),
            struct.pack(">hibbb", 0, 1, 1, 1, 0),
        )
        self.end += 1
        return batch_data([record], control=True, leader_epoch=self.leader_epoch)
