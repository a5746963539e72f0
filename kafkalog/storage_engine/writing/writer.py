"""A writer: whose batches are committed once, and how large they are unless it says more."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

__all__ = ["BATCH_SIZE", "CHECKPOINT", "TRANSACTION", "Writer", "writer_slug"]

BATCH_SIZE: Final = 65_536
"""Bytes of records, before compression, that fill a batch (Kafka's producer: batch.size)."""
CHECKPOINT: Final = ("checkpoint", "continue with the newer checkpoint")
TRANSACTION: Final = ("txnVersion", "give a higher txnVersion")
"""What numbers a writer's batches, and what helps when that number has gone back."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who commits: an id, what it writes to (a topic, or `*`), and the batch it is at."""

    id: str
    target: str
    batch_id: int
    kind: tuple[str, str] = CHECKPOINT
    """For messages alone: no part of the writer's name."""

    @property
    def name(self) -> str:
        """The writer's name in the journal."""
        return f"{self.id} {self.target}"


def writer_slug(writer_id: str, target: str) -> str:
    """Return the 32 hex digits that stand for a writer in file names."""
    return hashlib.blake2b(f"{writer_id}\0{target}".encode(), digest_size=16).hexdigest()
