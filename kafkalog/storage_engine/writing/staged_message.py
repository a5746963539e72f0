"""A task's message to the commit: where its finished batches are, or the batches themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kafkalog.storage_engine.format import layout


class StagedFile(NamedTuple):
    """A file for the commit to verify: its name below the root, its size, its CRC-32C."""

    name: str
    size: int
    crc: int


class BatchFigures(NamedTuple):
    """The facts about one batch that tell a commit whether a segment ends before it."""

    rows: int
    size: int
    max_timestamp: int
    """In epoch ms; -1 for none."""


class Run(NamedTuple):
    """Finished batches of one log partition: a range of a staged file, or of the message's data.

    A tuple, because a commit may have many thousands.
    """

    topic: str
    partition: int
    file: int
    """Number of the file in `StagedMessage.files`; -1 for `StagedMessage.data`."""
    position: int
    size: int
    rows: int
    is_segment: bool = False
    """The file has only this run, and is renamed to become a segment."""
    max_timestamp: int = layout.NO_TIMESTAMP
    """The largest timestamp in epoch ms, if an object has the batches; else -1."""
    batches: tuple[BatchFigures, ...] = ()
    """Its batches, if an object has them."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """A task's message to the commit; small, and picklable."""

    spark_partition: int = 0
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The topics written to, each with the id that the task saw; '' for a topic to create."""
    files: tuple[StagedFile, ...] = ()
    runs: tuple[Run, ...] = ()
    rows: int = 0
    keyless: frozenset[str] = frozenset()
    """Topics that got rows with a null key."""
    data: bytes = b""
