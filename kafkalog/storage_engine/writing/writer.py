"""A writer, whose batches are committed exactly once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

BATCH_SIZE: Final = 65_536
"""Bytes of records, before compression, in a full batch (Kafka's producer: batch.size)."""
CHECKPOINT: Final = ("checkpoint", "continue with the newer checkpoint")
TRANSACTION: Final = ("txnVersion", "give a higher txnVersion")
"""The number of a writer's batches, and the advice if that number has gone back."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The author of a commit: an id, its target (a topic, or `*`), and its batch."""

    id: str
    target: str
    batch_id: int
    kind: tuple[str, str] = CHECKPOINT
    """For messages only; not a part of the writer's name."""

    @property
    def name(self) -> str:
        """The writer's name in the journal."""
        return f"{self.id} {self.target}"


def writer_slug(writer_id: str, target: str) -> str:
    """Return 32 hex digits that identify a writer in file names."""
    return hashlib.blake2b(f"{writer_id}\0{target}".encode(), digest_size=16).hexdigest()
