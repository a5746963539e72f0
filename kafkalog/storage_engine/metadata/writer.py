"""A writer, whose batches are committed exactly once, and the rule that decides so.

A batch id equal to its writer's last is a retry, and is dropped. A lower one is refused, unless the
writer is reset. A higher one is committed.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kafkalog.errors import CommitConflictError
from kafkalog.storage_engine.metadata.state import State, WriterState

_logger = logging.getLogger(__name__)
WRITER_RETENTION_MS: Final = 30 * 24 * 60 * 60 * 1000
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


def last_batch(state: State, writer: Writer, now_ms: int) -> WriterState | None:
    """Return a writer's last batch, if it is not forgotten.

    It is forgotten if this clock and that of the log's last commit say so: one may be ahead.
    """
    known = state.writers.get(writer.name)
    if known is None or known.time_ms < min(now_ms, state.time_ms) - WRITER_RETENTION_MS:
        return None
    return known


def is_new(
    state: State, writer: Writer | None, rows: int, now_ms: int, *, reset_writer: bool
) -> bool:
    """Return whether a batch is to be committed; raises CommitConflictError for an older one."""
    if writer is None:
        return True
    known = state.writers.get(writer.name)
    if reset_writer and known is not None and writer.batch_id < known.batch_id:
        return True
    return not is_committed(state, writer, rows, now_ms)


def is_committed(state: State, writer: Writer, rows: int, now_ms: int) -> bool:
    """Tell whether the batch is a retry; raises CommitConflictError when it is older than that."""
    known = last_batch(state, writer, now_ms)
    if known is None or writer.batch_id > known.batch_id:
        return False
    when = datetime.fromtimestamp(known.time_ms / 1000).astimezone()
    if writer.batch_id < known.batch_id:
        numbered_by, remedy = writer.kind
        raise CommitConflictError(
            f"this {numbered_by} is older than the log: committed {known.batch_id} at "
            f"{when:%H:%M}, got {writer.batch_id} (writer {writer.id}, target {writer.target}, "
            f"committed at {when:%Y-%m-%d %H:%M:%S%z}); {remedy}, "
            "or set option resetWriter=true to write these batches again"
        )
    _logger.warning(
        "batch %d of writer %s to %s is committed already (at %s): its rows are not written again",
        writer.batch_id,
        writer.id,
        writer.target,
        when.isoformat(timespec="seconds"),
    )
    if rows != known.rows:
        _logger.warning(
            "batch %d of writer %s had %d rows when it was committed, the retry has %d: "
            "the source gave other rows for the same batch",
            writer.batch_id,
            writer.id,
            known.rows,
            rows,
        )
    return True
