"""List the writers of a log, and forget one.

The journal keeps the last batch of each writer, to recognize a repeated batch. A forgotten writer
starts again: its next batch is always appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.metadata.state import State, WriterState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.log_change import LogChange

_NAMED: Final = 20


def writers(
    state: State, writer_id: str | None = None, target: str | None = None
) -> dict[tuple[str, str], WriterState]:
    """Return the last batches by (id, target), optionally of one id or one target."""
    found = {}
    for name, last in sorted(state.writers.items()):
        known_id, _, known_target = name.rpartition(" ")
        if writer_id in (None, known_id) and target in (None, known_target):
            found[known_id, known_target] = last
    return found


def forget_writer(
    log: Log, writer_id: str, target: str | None = None, *, is_ended: bool = False, now_ms: int
) -> Mapping[tuple[str, str], WriterState]:
    """Forget the last batches of a writer, in one commit; return them by (id, target).

    `target` is a topic, or `*`; None means all its targets. `is_ended`: it never writes again.
    Raises InvalidInputError, which names the known writers, for an unknown writer.
    """

    def forget(change: LogChange) -> Mapping[tuple[str, str], WriterState]:
        found = writers(change.state, writer_id, target)
        if not found:
            known = [f"{one[0]} (topic {one[1]})" for one in writers(change.state)]
            more = f" and {len(known) - _NAMED} others" if len(known) > _NAMED else ""
            raise InvalidInputError(
                f"writer {writer_id!r}{f' to topic {target!r}' if target else ''} is not "
                f"remembered; known: {', '.join(known[:_NAMED]) or 'none'}{more}"
            )
        for known_id, known_target in found:
            name = f"{known_id} {known_target}"
            change.end_writer(name) if is_ended else change.forget_writer(name, now_ms)
        return found

    return log.change(forget, now_ms=now_ms)
