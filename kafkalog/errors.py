"""Every error kafkalog raises, one class per fault.

KafkaLogError
├── InvalidInputError (ValueError)   the caller's options, arguments or rows
│   ├── UnknownTopicError            a topic that the log does not have
│   └── MomentPassedError            a cleaning has removed records that a read needs
├── CorruptLogError                  bytes on disk are wrong: path, position, expected, found
│   ├── CorruptBatchError            a record batch
│   │   └── OversizedBatchError      one that decompresses to more than kafkalog reads
│   └── CorruptJournalError          the `commit` file
├── OffsetOutOfRangeError            an offset outside [log start, high watermark)
├── CommitConflictError              a writer's batch that does not follow its last one
├── LockedByBrokerError              a Kafka broker owns the directory
├── SchemaNotFoundError              a schema registry has no schema of that id or subject
├── SchemaRegistryError              a schema registry does not answer, or refuses
└── StorageError                     the file system refused, or its files do not fit the journal
    ├── CommitInDoubtError           the commit record may or may not be on disk
    └── LogMovedError                the directory of an open log is gone

A message is one line: the place, the expected, the found and, if possible, the remedy.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CommitConflictError",
    "CommitInDoubtError",
    "CorruptBatchError",
    "CorruptJournalError",
    "CorruptLogError",
    "DataLossError",
    "InvalidInputError",
    "KafkaLogError",
    "LockedByBrokerError",
    "LogMovedError",
    "MomentPassedError",
    "OffsetOutOfRangeError",
    "OversizedBatchError",
    "SchemaNotFoundError",
    "SchemaRegistryError",
    "StorageError",
    "UnknownTopicError",
]


class KafkaLogError(Exception):
    """The root of all errors of this package."""


class InvalidInputError(KafkaLogError, ValueError):
    """An option, an argument or a row of the caller is wrong."""


class UnknownTopicError(InvalidInputError):
    """The log has no topic of that name."""


class MomentPassedError(InvalidInputError):
    """A read needs records of its moment that a cleaning has removed since."""


class CorruptLogError(KafkaLogError):
    """Bytes on disk are not what the format demands."""

    advice = "the file is damaged: restore it from a copy"

    def __init__(
        self,
        path: Path | str,
        position: int,
        expected: object,
        found: object,
        *,
        advice: str | None = None,
    ) -> None:
        super().__init__(path, position, expected, found)
        if advice is not None:
            self.advice = advice
        self.path = str(path)
        self.position = position
        self.expected = expected
        self.found = found

    @property
    def damage(self) -> str:
        """The damage in words, without advice."""
        return f"{self.path}: at byte {self.position}: expected {self.expected}, found {self.found}"

    def __str__(self) -> str:
        return f"{self.damage}; {self.advice}"


class CorruptBatchError(CorruptLogError):
    """A record batch is truncated, has a wrong checksum, or does not decode."""


class OversizedBatchError(CorruptBatchError):
    """A batch decompresses to more bytes than kafkalog reads; nothing says that it is damaged."""

    advice = "this is a limit of kafkalog's, not damage: read the batch with Kafka's own consumer"


class CorruptJournalError(CorruptLogError):
    """The `commit` file is not a journal this release can read."""


class OffsetOutOfRangeError(KafkaLogError):
    """An offset lies outside what the partition holds."""

    def __init__(
        self, topic: str, partition: int, offset: int, log_start: int, high_watermark: int
    ) -> None:
        super().__init__(topic, partition, offset, log_start, high_watermark)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.log_start = log_start
        self.high_watermark = high_watermark

    def __str__(self) -> str:
        return (
            f"{self.topic}-{self.partition}: offset {self.offset} is out of range, "
            f"the valid range is [{self.log_start}, {self.high_watermark}]"
        )


class DataLossError(KafkaLogError):
    """Records that a Spark read needs are gone; `failOnDataLoss=false` makes it a warning."""


class CommitConflictError(KafkaLogError):
    """A writer's batch does not follow its last one, as after a restore."""


class LockedByBrokerError(KafkaLogError):
    """A Kafka broker holds the directory, or was its last owner."""


class SchemaNotFoundError(KafkaLogError):
    """A schema registry has no schema of that id, or no such subject."""


class SchemaClashError(InvalidInputError):
    """A schema cannot be read as another one without other values."""


class SchemaRegistryError(KafkaLogError):
    """A schema registry does not answer, or refuses a request."""


class StorageError(KafkaLogError):
    """The file system failed, or its files contradict the journal."""


class CommitInDoubtError(StorageError):
    """The commit record may or may not be on disk; the next commit or open decides."""


class LogMovedError(StorageError):
    """The directory of an open log was moved or removed."""
