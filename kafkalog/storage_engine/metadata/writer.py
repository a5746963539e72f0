"""A writer, whose batches are committed exactly once, and the rule that decides so.

A batch is its id and the ends of its sources, if these are known. The last one again is a retry,
and is dropped. One that does not fit, as after a restore, is refused unless the writer is reset.
That's a lower id, the last id with other ends, or a gap in the micro-batches of a `writeStream`.
Each other one is committed.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from kafkalog.errors import CommitConflictError
from kafkalog.storage_engine.metadata.batch_identity import BatchIdentity, Comes
from kafkalog.storage_engine.metadata.state import State, WriterState

_logger = logging.getLogger(__name__)
WRITER_RETENTION_MS: Final = 30 * 24 * 60 * 60 * 1000
CHECKPOINT: Final = ("checkpoint", "continue with the newer checkpoint")
TRANSACTION: Final = ("txnVersion", "give a higher txnVersion")
"""The number of a writer's batches, and the advice if that number has gone back."""


class MicroBatchPlan(NamedTuple):
    """Spark's checkpoint about a micro-batch, and about the one before it."""

    ends: str
    """The ends of its sources: `OffsetLogEntry.ends`."""
    ends_before: str | None
    """The ends of the one before it; None if there is none, or it is gone."""
    before_ms: int | None
    """When Spark planned the one before it (epoch ms)."""
    is_every_one_written: bool
    """The sink gets all micro-batches, those without rows too, as with `writeStream`."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The author of a commit: an id, its target (a topic, or `*`), and its batch."""

    id: str
    target: str
    batch_id: int
    kind: tuple[str, str] = CHECKPOINT
    """For messages only; not a part of the writer's name."""
    plan: MicroBatchPlan | None = None
    """None for a batch of another kind, and if the plan cannot be read."""

    @property
    def name(self) -> str:
        """The writer's name in the journal."""
        return f"{self.id} {self.target}"

    @property
    def identity(self) -> BatchIdentity:
        """The batch, as it is compared with the last one."""
        return BatchIdentity(self.batch_id, self.ends)

    @property
    def ends(self) -> str | None:
        """The ends of the batch's sources, as the log keeps them."""
        return None if self.plan is None else self.plan.ends

    @property
    def is_recorded_without_rows(self) -> bool:
        """Whether the log keeps the id of a batch without rows, so that no id is missing."""
        return self.plan is not None and self.plan.is_every_one_written


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
    """Return True for a batch that must be committed, False for a retry.

    Raises CommitConflictError for a batch that does not fit, unless `reset_writer`.
    """
    if writer is None:
        return True
    known = last_batch(state, writer, now_ms)
    comes = _comes(known, writer)
    if known is not None and comes is Comes.AGAIN:
        _warn_of_retry(known, writer, rows)
        return False
    fault = _conflict(state, known, comes, writer, now_ms)
    if fault is not None and not reset_writer:
        raise fault
    return True


def is_committed(state: State, writer: Writer, now_ms: int) -> bool:
    """Return whether a batch is the last one that its writer committed."""
    return _comes(last_batch(state, writer, now_ms), writer) is Comes.AGAIN


def _comes(known: WriterState | None, writer: Writer) -> Comes:
    last = None if known is None else BatchIdentity(known.batch_id, known.ends)
    return Comes.of(writer.identity, last)


def _conflict(
    state: State, known: WriterState | None, comes: Comes, writer: Writer, now_ms: int
) -> CommitConflictError | None:
    """Return why a batch that isn't a retry does not fit; None if it fits."""
    plan = writer.plan
    if known is None:
        if plan is None or not plan.is_every_one_written or comes is Comes.NEXT:
            return None
        return _unknown(state, writer, plan, now_ms)
    if comes is Comes.EARLIER:
        return _earlier(known, writer)
    if comes is Comes.PLANNED_ANEW:
        return _planned_anew(known, writer)
    if plan is None or known.ends is None:
        return None
    if comes is Comes.SKIPPING and plan.is_every_one_written:
        return _skipping(known, writer)
    if comes is Comes.NEXT and plan.ends_before not in (None, known.ends):
        return _after_another(known, writer)
    return None


def _earlier(known: WriterState, writer: Writer) -> CommitConflictError:
    numbered_by, remedy = writer.kind
    when = _when(known.time_ms)
    cause = ""
    if writer.kind == CHECKPOINT:
        cause = (
            "; the checkpoint was restored from an earlier moment, or another query writes with a "
            "copy of it"
        )
    return CommitConflictError(
        f"this {numbered_by} is older than the log: committed {known.batch_id} at "
        f"{when:%H:%M}, got {writer.batch_id} (writer {writer.id}, target {writer.target}, "
        f"committed at {when:%Y-%m-%d %H:%M:%S%z}){cause}; {remedy}, "
        "or set option resetWriter=true to write these batches again"
    )


def _planned_anew(known: WriterState, writer: Writer) -> CommitConflictError:
    sources, before = (_sources(ends) for ends in (writer.ends, known.ends))
    changed = "" if sources == before else f", of {sources} sources instead of {before}"
    return CommitConflictError(
        f"{_place(writer)}: micro-batch {writer.batch_id} has another plan than the one that the "
        f"log has (expected the ends of the sources of {_text(known.time_ms)}, found others"
        f"{changed}). The checkpoint was restored from an earlier moment, its plan was changed, or "
        f"two queries write with copies of it. {_CONTINUE}; rows that both plans have are then "
        "written twice."
    )


def _after_another(known: WriterState, writer: Writer) -> CommitConflictError:
    return CommitConflictError(
        f"{_place(writer)}: the checkpoint has another micro-batch {known.batch_id} than the log "
        f"(expected the ends of the sources of {_text(known.time_ms)}, found others), and "
        f"micro-batch {writer.batch_id} goes on from it. The checkpoint or the log was restored "
        f"from another moment, or two queries write with copies of the checkpoint. {_CONTINUE}; "
        f"rows between the two ends may be missing or come twice."
    )


def _skipping(known: WriterState, writer: Writer) -> CommitConflictError:
    return CommitConflictError(
        f"{_place(writer)}: {_missing(known.batch_id + 1, writer)} not in the log (expected "
        f"{known.batch_id + 1} after {known.batch_id} of {_text(known.time_ms)}, found "
        f"{writer.batch_id}). The log was restored from a backup, or the query wrote elsewhere "
        f"meanwhile. {_GO_ON}"
    )


def _unknown(
    state: State, writer: Writer, plan: MicroBatchPlan, now_ms: int
) -> CommitConflictError | None:
    """Return the error for a first batch with an id above 0; None if that may be right."""
    if plan.before_ms is None or writer.name in state.forgotten_writers:
        return None
    if plan.before_ms < min(now_ms, state.time_ms) - WRITER_RETENTION_MS:
        _logger.warning(
            "%s: the log remembers no batch of this writer, which may be one of more than 30 days "
            "ago; micro-batch %d is written, and whether earlier ones are there is unknown",
            _place(writer),
            writer.batch_id,
        )
        return None
    return CommitConflictError(
        f"{_place(writer)}: {_missing(0, writer)} not in the log (expected 0, as the log remembers "
        f"no batch of this writer, found {writer.batch_id}; Spark planned the one before at "
        f"{_text(plan.before_ms)}). The log is new or was restored from a backup, or the query "
        f"wrote elsewhere before. {_GO_ON}"
    )


_CONTINUE = (
    "Continue with the newest checkpoint, or set option resetWriter=true to write this micro-batch"
)
_GO_ON = (
    "Restore the log that has them, or start the query with a new checkpoint; or set option "
    "resetWriter=true to go on without their rows."
)


def _missing(first: int, writer: Writer) -> str:
    last = writer.batch_id - 1
    return f"micro-batch {last} is" if first == last else f"micro-batches {first} to {last} are"


def _place(writer: Writer) -> str:
    return f"writer {writer.id}, target {writer.target}"


def _sources(ends: str | None) -> str:
    return (ends or "").partition("-")[0]


def _when(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000).astimezone()


def _text(time_ms: int) -> str:
    return f"{_when(time_ms):%Y-%m-%d %H:%M:%S%z}"


def _warn_of_retry(known: WriterState, writer: Writer, rows: int) -> None:
    _logger.warning(
        "batch %d of writer %s to %s is committed already (at %s): its rows are not written again",
        writer.batch_id,
        writer.id,
        writer.target,
        _when(known.time_ms).isoformat(timespec="seconds"),
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
