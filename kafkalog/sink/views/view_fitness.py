"""Whether a view's table, its checkpoint and its log still fit together.

Each of the three can be lost, restored from a backup or created again. Comparing them decides
whether the view continues or is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.upsert import Upsert
from kafkalog.sink.views.generations import Generations
from kafkalog.storage_engine.metadata.state import TopicState


def position_of(target: Upsert, generations: Generations) -> tuple[str | None, Position | None]:
    """Return the id of the current generation's query, and its position in the table."""
    number = generations.current()
    query_id = None if number is None else generations.query_id(number)
    return query_id, None if query_id is None else target.position(query_id)


def check_owned(target: Upsert, generations: Generations) -> None:
    """Refuse a table with rows that no query of this checkpoint has written."""
    if not generations.query_ids().isdisjoint(target.writers()) or not target.has_rows():
        return
    known = target.positions()
    if known:
        query_id, position = max(known.items(), key=lambda item: item[1].time_ms)
        whose = f"query {query_id} brought it to micro-batch {position.batch_id}"
    else:
        whose = "no view has ever kept it"
    raise InvalidInputError(
        f"{target.where}: it has rows that are not from the checkpoint {generations.root}: "
        f"{whose}; start(rebuild=True) replaces them"
    )


def recreation(
    generations: Generations, number: int | None, topic: TopicState | None
) -> str | None:
    """Return that a topic was created again since a generation began; None if it was not.

    The generation may not exist yet, and the topic may be gone.
    """
    if number is None or topic is None or generations.topic(number)[1] == topic.topic_id:
        return None
    return f"topic {topic.name} was deleted and created again"


def reason_to_rebuild(
    target: Upsert, generations: Generations, topic: TopicState, now_ms: int
) -> str | None:
    """Return why the current generation cannot continue; None if it can. There must be one."""
    number = generations.current()
    assert number is not None
    query_id, position = position_of(target, generations)
    committed = generations.last_committed(number)
    checkpoint = generations.path(number)
    if (reason := recreation(generations, number, topic)) is not None:
        return reason
    if position is None:
        if committed is None:
            return None
        return f"the checkpoint {checkpoint} is at micro-batch {committed}, the table at none"
    last = -1 if committed is None else committed
    if position.batch_id not in {last, last + 1}:  # one ahead: Spark died before it recorded that
        return (
            f"the checkpoint {checkpoint} of query {query_id} is at micro-batch {last}, the table "
            f"at {position.batch_id}: one of them was put back from a backup"
        )
    return _reason_in_the_log(position, topic, now_ms)


def is_emptied(
    target: Upsert, generations: Generations, has_live_keys: Callable[[Position], bool]
) -> bool:
    """Return whether the table of the current generation has lost its rows.

    `has_live_keys` says whether the log has keys with values below a position; it is called only if
    the table is empty. The upsert's `select` may make no rows of those keys: a table that was
    rebuilt for this reason before counts as rightly empty.
    """
    number = generations.current()
    position = position_of(target, generations)[1]
    if number is None or position is None or generations.was_emptied(number):
        return False
    return not target.has_rows() and has_live_keys(position)


def _reason_in_the_log(position: Position, topic: TopicState, now_ms: int) -> str | None:
    """Return what the log has lost since the table's position; None if it has lost nothing.

    Deletions that are gone may be among them. A broker's log does not know which are; there, none
    is that is younger than `delete.retention.ms`.
    """
    retention_ms = topic.delete_retention_ms
    is_late = retention_ms is None or now_ms - position.time_ms > retention_ms
    applied = position.end_offsets.get(topic.name, {})
    for number, state in topic.present():
        offset = applied.get(str(number))
        if offset is None:
            continue
        if not state.log_start_offset <= offset <= state.high_watermark:
            return (
                f"it is at offset {offset} of {topic.name}-{number}, which holds "
                f"{state.log_start_offset} to {state.high_watermark}"
            )
        if state.lacks_deletions_after(offset) and (is_late or topic.knows_defaults):
            return (
                f"it is at offset {offset} of {topic.name}-{number}, of which deletions up to "
                f"offset {state.deletions_gone_to} are gone (delete.retention.ms)"
            )
    return None
