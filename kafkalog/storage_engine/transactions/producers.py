"""The producers of a partition: what each one wrote last, and which transactions are open.

Kafka gives every producer that is idempotent or transactional an id, and stamps it, an epoch and
sequence numbers into its batches. What follows from the batches below an offset is the *state* of
the producers at that offset. It is needed for two things: a broker tells duplicates and fenced
producers by it, so a directory that is given back to one must come with it (`producer_snapshot`);
and the *last stable offset*, below which every transaction has ended, is found from it.

`Producers.append` replays one batch as a broker does when it loads a log or follows a leader:

* nothing is refused, neither a gap in the sequence numbers nor an older epoch: somebody has
  accepted the batch already (`refusal` names what even a replay chokes on);
* a batch of data is the last of its producer from then on, also one the cleaner has emptied, which
  is what it was kept for; one of another epoch, older or newer, begins the sequence anew;
* the first transactional batch opens a transaction, and only a marker ends it;
* a *marker* makes its producer known if it was not, and takes over epoch and coordinator's epoch as
  they are; with another epoch, it makes the producer's last batch be forgotten, so that the next
  one starts at sequence 0. Without an open transaction it ends none;
* a control batch without records, the rest of a marker, ends nothing, but it makes its producer
  known;
* batches without a producer id, messages v0 and v1 and our own among them, only move the end.

Kafka: ProducerStateManager, ProducerStateEntry, ProducerAppendInfo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.format.control_record import ControlRecord
from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

__all__ = ["EXPIRATION_MS", "ProducerEntry", "Producers", "last_sequence"]

EXPIRATION_MS = 86_400_000
"""The default of Kafka's `producer.id.expiration.ms`: a day."""
NONE = -1


@dataclass(slots=True)
class ProducerEntry:
    """One producer; the fields are those of a snapshot's entry.

    `last_sequence`, `last_offset` and `offset_delta` (last offset minus base offset) are those of
    its last batch of data, -1, -1 and 0 while there is none in its epoch. `timestamp` (ms) is that
    of its last batch or marker. Kafka: ProducerStateEntry.
    """

    producer_id: int
    producer_epoch: int = NONE
    last_sequence: int = NONE
    last_offset: int = NONE
    offset_delta: int = 0
    timestamp: int = layout.NO_TIMESTAMP
    coordinator_epoch: int = NONE
    """Of its last marker, -1 none."""
    current_txn_first_offset: int = NONE
    """Where its open transaction begins, -1 none."""

    def begin_epoch(self, producer_epoch: int) -> None:
        """Take over an epoch; another one than before leaves no last batch."""
        if self.producer_epoch != producer_epoch:
            self.producer_epoch = producer_epoch
            self.last_sequence = self.last_offset = NONE
            self.offset_delta = 0


class Producers:
    """Every producer of a partition, as the batches below `end_offset` leave it.

    `entries` is theirs by producer id: look, and leave the changes to the methods. The state is
    one of committed batches: the end offset is not above the high watermark, so a transaction
    whose marker was seen is over.
    """

    def __init__(self, entries: Iterable[ProducerEntry] = (), end_offset: int = 0) -> None:
        self.entries = {entry.producer_id: entry for entry in entries}
        self.end_offset = end_offset
        self._open = {
            entry.producer_id: entry.current_txn_first_offset
            for entry in self.entries.values()
            if entry.current_txn_first_offset >= 0
        }

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Producers):
            return NotImplemented
        return self.end_offset == other.end_offset and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]  # mutable; mypy has object's method in mind

    def __repr__(self) -> str:
        return f"Producers({list(self.entries.values())}, end_offset={self.end_offset})"

    def append(
        self, header: BatchHeader, control: ControlRecord | None = None
    ) -> AbortedTransaction | None:
        """Replay a batch; `control` is what a control batch says (`read_control_record`).

        Returns the entry that belongs into the transaction index when the batch aborts a
        transaction. Its `last_stable_offset` is the first offset of the oldest transaction that
        is still open then, else the offset after the marker. Raises InvalidInputError when
        `control` is missing. Kafka: LogSegment.updateProducerState, ProducerAppendInfo.append.
        """
        aborted = None
        if header.producer_id >= 0 and header.magic == layout.MAGIC:
            if not header.is_control:
                self._append_data(header)
            elif header.records_count == 0:
                self._entry(header.producer_id)
            elif control is None:
                raise InvalidInputError(
                    f"the control batch at offset {header.base_offset} has a record, "
                    "which is needed to replay it"
                )
            elif control.is_marker:
                aborted = self._append_marker(header, control)
        self.end_offset = header.next_offset
        return aborted

    def refusal(self, header: BatchHeader, control: ControlRecord | None = None) -> str | None:
        """Say why a broker could not replay a batch, and so not load its log; None if it can.

        `append` takes such a batch all the same: it leaves an open transaction open, and passes
        over a control record that is no marker.
        """
        if header.producer_id < 0 or header.magic != layout.MAGIC:
            return None
        if header.is_control:
            if control is None or control.is_marker:
                return None
            return (
                f"the batch at offset {header.base_offset} has producer id {header.producer_id} "
                f"and a control record of type {control.type}: "
                "ABORT (0) or COMMIT (1) is expected"
            )
        if header.is_transactional or header.producer_id not in self._open:
            return None
        return (
            f"the batch at offset {header.base_offset} is not transactional, while a transaction "
            f"of its producer {header.producer_id} is open "
            f"since offset {self._open[header.producer_id]}"
        )

    def first_unstable_offset(self) -> int | None:
        """Return where the oldest open transaction begins; None when none is open."""
        return min(self._open.values(), default=None)

    def last_stable_offset(self, high_watermark: int, *, log_start: int = 0) -> int:
        """Return the offset below which every transaction has ended.

        It is neither above the high watermark nor below the log start.
        """
        unstable = self.first_unstable_offset()
        stable = high_watermark if unstable is None else min(unstable, high_watermark)
        return max(stable, log_start)

    def expire(self, now_ms: int, expiration_ms: int = EXPIRATION_MS) -> None:
        """Forget who wrote nothing for `expiration_ms`, unless its transaction is open.

        A broker does so with what it reads from a snapshot, before it replays what follows, and
        every ten minutes. Kafka: ProducerStateManager.removeExpiredProducers.
        """
        self.entries = {
            entry.producer_id: entry
            for entry in self.entries.values()
            if entry.producer_id in self._open or now_ms - entry.timestamp < expiration_ms
        }

    def copy(self) -> Producers:
        """Return the same state, which goes its own way from here on."""
        return Producers((replace(entry) for entry in self.entries.values()), self.end_offset)

    def _entry(self, producer_id: int) -> ProducerEntry:
        entry = self.entries.get(producer_id)
        if entry is None:
            entry = self.entries[producer_id] = ProducerEntry(producer_id)
        return entry

    def _append_data(self, header: BatchHeader) -> None:
        entry = self._entry(header.producer_id)
        entry.begin_epoch(header.producer_epoch)
        entry.last_sequence = last_sequence(header)
        entry.last_offset = header.last_offset
        entry.offset_delta = header.last_offset_delta
        entry.timestamp = header.max_timestamp
        if header.is_transactional and entry.current_txn_first_offset < 0:
            entry.current_txn_first_offset = header.base_offset
            self._open[header.producer_id] = header.base_offset

    def _append_marker(
        self, header: BatchHeader, control: ControlRecord
    ) -> AbortedTransaction | None:
        entry = self._entry(header.producer_id)
        entry.begin_epoch(header.producer_epoch)
        entry.coordinator_epoch = control.coordinator_epoch
        timestamp = control.timestamp
        entry.timestamp = header.max_timestamp if timestamp is None else timestamp
        entry.current_txn_first_offset = NONE
        first_offset = self._open.pop(header.producer_id, None)
        if first_offset is None or control.type != layout.CONTROL_ABORT:
            return None
        marker_offset = header.base_offset
        stable = min(self._open.values(), default=marker_offset + 1)
        return AbortedTransaction(header.producer_id, first_offset, marker_offset, stable)


def last_sequence(header: BatchHeader) -> int:
    """Return the sequence number of a batch's last record, -1 if it has none.

    The number after 2147483647 is 0. Kafka: DefaultRecordBatch.lastSequence.
    """
    if header.base_sequence == NONE:
        return NONE
    sequence = header.base_sequence + header.last_offset_delta
    return sequence - 2**31 if sequence > layout.INT32_MAX else sequence
