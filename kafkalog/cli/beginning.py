"""The start of a read: the first record, an offset, a time, or the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kafkalog.cli.terminal.time_text import epoch_ms
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    from kafkalog.cli.changelog import Changelog
    from kafkalog.storage_engine.metadata.state import State


@dataclass(frozen=True, slots=True)
class Beginning:
    """The start that the options choose."""

    options: tuple[str, ...]
    """The options that were given: one, or none."""
    since_ms: int | None
    start: int | None

    @classmethod
    def of(cls, *, from_beginning: bool, from_time: str | None, start: int | None) -> Self:
        """Parse the options; raises InvalidInputError for two of them, or for an invalid time."""
        given = {
            "--from-beginning": from_beginning,
            "--from-time": from_time is not None,
            "--start": start is not None,
        }
        options = tuple(name for name, is_given in given.items() if is_given)
        if len(options) > 1:
            raise InvalidInputError(f"{' and '.join(options)}: give one of them")
        since_ms = None
        if from_time is not None:
            since_ms = epoch_ms(from_time, now_ms=clock.now_ms(), option="--from-time")
        return cls(options, since_ms, start)

    def offsets(self, changelog: Changelog, state: State, *, at_end: bool) -> dict[int, int]:
        """Return each partition's start; without options its end (`at_end`) or its first record."""
        if self.start is not None:
            return dict.fromkeys(changelog.partitions, self.start)
        if self.since_ms is not None:
            return changelog.since(self.since_ms, state)
        if at_end and not self.options:
            return changelog.ends(state)
        return changelog.beginnings(state)
