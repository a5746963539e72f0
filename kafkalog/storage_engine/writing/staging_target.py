"""The target of a task's finished batches: the seam below `staging.StagedWriter`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kafkalog.storage_engine.writing.staged_message import Run, StagedFile
from kafkalog.storage_engine.writing.staged_topic import StagedTopic


class AttemptName(NamedTuple):
    """The name of a task attempt, which no other attempt has: see `layout.staged_file`."""

    writer_slug: str
    batch_id: int
    spark_partition: int
    attempt: int


class Staged(NamedTuple):
    """All that an attempt has staged, for its message."""

    files: Sequence[StagedFile]
    runs: Sequence[Run]
    data: bytes = b""


class StagingTarget(Protocol):
    """Takes the pending runs of topics; called by one thread at a time."""

    def take_excess(self, topics: Sequence[StagedTopic]) -> None:
        """Write pending runs that are too large to be kept in memory, and clear them."""

    def take_rest(self, topics: Sequence[StagedTopic]) -> Staged:
        """Write the remaining runs; return all that is written."""

    def discard(self) -> None:
        """Remove what a failed attempt has written."""


class StagingPlace(Protocol):
    """A log, as tasks see it that write to it."""

    def staging_target(self, name: AttemptName) -> StagingTarget:
        """Return where an attempt writes."""


class MessageTarget:
    """Small appends: the batches are in the message."""

    def take_excess(self, topics: Sequence[StagedTopic]) -> None:
        """Keep all in memory."""

    def take_rest(self, topics: Sequence[StagedTopic]) -> Staged:
        """Return the runs, with their bytes."""
        data = bytearray()
        runs = []
        for topic in topics:
            for partition in sorted(topic.pending):
                run = topic.pending[partition]
                runs.append(Run(topic.name, partition, -1, len(data), run.size, run.rows))
                for part in run.parts:
                    data += part.data
        return Staged((), runs, bytes(data))

    def discard(self) -> None:
        """Leave nothing, as nothing is written."""
