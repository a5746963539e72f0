"""Each partition of a log at one moment, as `plan` judges it, with what its cleanings have left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.cleaner.plan import judge
from kafkalog.cleaner.state.last_cleaning import read_cleanings
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cleaner.plan import Plan, Uncleanable, Verdict
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.cleaner.state.last_cleaning import LastCleaning
    from kafkalog.storage_engine.metadata.state import TopicState


@dataclass(frozen=True, slots=True)
class Judged:
    """A partition at one moment."""

    moment: Moment
    known: TopicState
    plan: Plan
    verdict: Verdict
    mark: Uncleanable | None
    last: LastCleaning | None
    """The last cleaning; None if there was none, or it is unknown."""

    @property
    def tombstones(self) -> int | None:
        """Tombstones that wait for a horizon; None if our last cleaning was not the last one."""
        is_last = self.last is not None and self.last.end_offset == self.plan.first_dirty_offset
        return self.last.tombstones if self.last is not None and is_last else None


def judged(
    moment: Moment, topic: str | None, *, asks_cleaners: bool
) -> Iterator[tuple[TopicState, int, Judged | Exception]]:
    """Judge each partition of a topic, or of all; raises UnknownTopicError.

    A partition that cannot be read has the fault. A topic that was deleted meanwhile is left out.
    `asks_cleaners` says whether to find out who is at work: that may keep a cleaner away.
    """
    state = moment.state
    for name in sorted(state.topics) if topic is None else [state.topic(topic).name]:
        known = state.topics[name]
        for number in known.numbers():
            try:
                yield known, number, _judged(moment, known, number, asks_cleaners=asks_cleaners)
            except (OSError, KafkaLogError) as fault:
                files.pass_on(fault)
                if not moment.has_topic(name, known.topic_id):
                    break
                yield known, number, fault


def _judged(moment: Moment, known: TopicState, partition: int, *, asks_cleaners: bool) -> Judged:
    place = known.name, partition
    plan, notes = moment.plan(*place), moment.notes(*place)
    mark = read_uncleanable(notes)
    verdict = judge(
        plan,
        known,
        owner=moment.owner,
        mark=mark,
        is_paused=moment.is_paused(*place),
        is_being_cleaned=asks_cleaners and moment.is_being_cleaned(*place),
        is_cleaner_running=moment.is_cleaner_running if asks_cleaners else None,
        now_ms=moment.now_ms,
    )
    return Judged(moment, known, plan, verdict, mark, next(iter(read_cleanings(notes)), None))
