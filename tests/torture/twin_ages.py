"""How old segments are: as Kafka believes, and as their batches say."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.builders.segment_files import name

__all__ = ["Age", "Retention", "are_explained", "true_time"]

_ENTRY: Final = struct.Struct(">qi")


@dataclass(frozen=True)
class Age:
    """One segment, with its times in epoch milliseconds."""

    base: int
    size: int
    believed: int
    """The largest timestamp, as Kafka goes by it."""
    told: int
    """The largest timestamp of its batches; -1 for none."""
    modified: int


@dataclass(frozen=True)
class Retention:
    """What there is to delete before a retention."""

    ages: Sequence[Age]
    config: Mapping[str, str]
    log_start: int
    end: int
    now_ms: int
    is_explained: bool
    """Whether each wrong time that Kafka believes is one that its files have."""
    sizes: Mapping[int, int]
    """The bytes of our segments, by base offset."""

    def with_our_sizes(self) -> Retention | None:
        """Return what our files have; None if their segments are not Kafka's."""
        if self.sizes.keys() != {age.base for age in self.ages}:
            return None
        return replace(self, ages=[replace(age, size=self.sizes[age.base]) for age in self.ages])

    def start(self, time: Callable[[Age], int]) -> int:
        """Return the log start after a retention that goes by these times.

        Kafka: UnifiedLog.deletableSegments.
        """
        left, start = list(self.ages), self.log_start

        def delete(is_due: Callable[[Age, int], bool]) -> None:
            nonlocal start
            while left and (len(left) > 1 or left[0].size):
                end = left[1].base if len(left) > 1 else self.end
                if end > self.end or not is_due(left[0], end):
                    return
                del left[0]
                start = max(start, end)

        def has_room(age: Age, _: int) -> bool:
            return sum(one.size for one in left) - age.size >= int(self.config["retention.bytes"])

        def is_old(age: Age, _: int) -> bool:
            return self.now_ms - time(age) > int(self.config["retention.ms"])

        delete(lambda _, end: len(left) > 1 and end <= self.log_start)
        if "delete" in self.config["cleanup.policy"]:
            if self.config["retention.bytes"] != "-1":
                delete(has_room)
            if self.config["retention.ms"] != "-1":
                delete(is_old)
        return start


def are_explained(ages: Sequence[Age], directory: Path) -> bool:
    """Return whether each wrong time that Kafka believes is one that its files have."""
    return all(
        age.believed == true_time(age) or age.believed in _file_times(directory, age)
        for age in ages
    )


def true_time(age: Age) -> int:
    """Return what the batches say; a segment whose batches have no times is as old as its file."""
    return age.told if age.told >= 0 else age.modified


def _file_times(directory: Path, age: Age) -> set[int]:
    """Return the times of a segment's time index; if it begins with none, its file's counts."""
    path = directory / name(age.base, ".timeindex")
    data = path.read_bytes() if path.exists() else b""
    whole = data[: len(data) // _ENTRY.size * _ENTRY.size]
    times = {time for time, _ in _ENTRY.iter_unpack(whole)}
    return times if any(whole[: _ENTRY.size]) else times | {age.modified}
