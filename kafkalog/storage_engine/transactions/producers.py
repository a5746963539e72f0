"""The producers of a partition: the last batch of each, and the open transactions.

Kafka gives every idempotent or transactional producer an id. The producer writes it, an epoch and
sequence numbers into its batches. The *state* at an offset follows from the batches below it. It
has two uses. A broker detects duplicates and fenced producers by it, so a directory must have it
when it returns to a broker (`producer_snapshot`). It also gives the *last stable offset*, below
which every transaction has ended.

`Producers.append` replays one batch as a broker does when it loads a log or follows a leader:

- It accepts gaps in the sequence numbers and older epochs, because a broker has already accepted
  the batch. Batches that even a replay refuses are named by `refusal`.
- A data batch becomes its producer's last batch, even one that the cleaner has emptied and kept for
  this purpose. A batch with another epoch, older or newer, restarts the sequence.
- The first transactional batch opens a transaction, and only a marker ends it.
- A *marker* adds an unknown producer, and sets its epoch and the coordinator's epoch. A marker with
  another epoch clears the producer's last batch, so the next one starts at sequence 0.
- A control batch without records, the remains of a marker, adds an unknown producer and ends no
  transaction.
- Batches without a producer id, such as our own and messages v0 and v1, only move the end.

Kafka: ProducerStateManager, ProducerStateEntry, ProducerAppendInfo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.transactions.control_record import ControlRecord
from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

EXPIRATION_MS = 86_400_000
"""The default of Kafka's `producer.id.expiration.ms`: a day."""
NONE = -1


@dataclass(slots=True)
class ProducerEntry:
    """One producer, with the fields of a snapshot's entry.

    `last_sequence`, `last_offset` and `offset_delta` (last offset minus base offset) describe its
    last data batch. If its epoch lacks them, they are -1, -1 and 0. The time of its last batch or
    marker is `timestamp` (ms). Kafka: ProducerStateEntry.
    """

    producer_id: int
    producer_epoch: int = NONE
    last_sequence: int = NONE
    last_offset: int = NONE
    offset_delta: int = 0
    timestamp: int = layout.NO_TIMESTAMP
    coordinator_epoch: int = NONE
    """The coordinator's epoch in its last marker, or -1."""
    current_txn_first_offset: int = NONE
    """The first offset of its open transaction, or -1."""

    def begin_epoch(self, producer_epoch: int) -> None:
        """Set the epoch; a change of epoch clears the last batch."""
        if self.producer_epoch != producer_epoch:
            self.producer_epoch = producer_epoch
            self.last_sequence = self.last_offset = NONE
            self.offset_delta = 0


class Producers:
    """The state of all producers of a partition at `end_offset`.

    `entries` maps producer ids to entries; only the methods change it. `end_offset` is not above
    the high watermark, so a transaction whose marker was replayed is over.
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

    def append(
        self, header: BatchHeader, control: ControlRecord | None = None
    ) -> AbortedTransaction | None:
        """Replay a batch; `control` is the record of a control batch (`read_control_record`).

        Returns the entry for the transaction index if the batch aborts a transaction. Its
        `last_stable_offset` is the first offset of the oldest transaction that remains open, or
        else the offset after the marker. Raises InvalidInputError if a needed `control` is missing.
        Kafka: LogSegment.updateProducerState, ProducerAppendInfo.append.
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
        """Return why a broker could not replay a batch and load its log, or None if it can.

        `append` accepts such a batch: it leaves an open transaction open, and ignores a control
        record that is not a marker.
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

    def is_open(self, producer_id: int, offset: int) -> bool:
        """Return whether a producer's open transaction includes an offset."""
        return self._open.get(producer_id, layout.INT64_MAX) <= offset

    def first_unstable_offset(self) -> int | None:
        """Return the first offset of the oldest open transaction, or None."""
        return min(self._open.values(), default=None)

    def last_stable_offset(self, high_watermark: int, *, log_start: int = 0) -> int:
        """Return the offset below which every transaction has ended.

        The result lies between the log start and the high watermark.
        """
        unstable = self.first_unstable_offset()
        stable = high_watermark if unstable is None else min(unstable, high_watermark)
        return max(stable, log_start)

    def expire(self, now_ms: int, expiration_ms: int = EXPIRATION_MS) -> None:
        """Drop producers that wrote nothing for `expiration_ms` and have no open transaction.

        A broker does this every ten minutes, and after it loads a snapshot, before it replays
        batches. Kafka: ProducerStateManager.removeExpiredProducers.
        """
        self.entries = {
            entry.producer_id: entry
            for entry in self.entries.values()
            if entry.producer_id in self._open or now_ms - entry.timestamp < expiration_ms
        }

    def take_over(self, entries: Iterable[ProducerEntry]) -> None:
        """Take the state that another log has at the same offset."""
        other = Producers(entries).copy()
        self.entries, self._open = other.entries, other._open

    def copy(self) -> Producers:
        """Return an independent copy."""
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
    """Return the sequence number of a batch's last record, or -1 for a batch without.

    The number after 2147483647 is 0. Kafka: DefaultRecordBatch.lastSequence.
    """
    if header.base_sequence == NONE:
        return NONE
    sequence = header.base_sequence + header.last_offset_delta
    return sequence - 2**31 if sequence > layout.INT32_MAX else sequence
