"""What a log says of itself, in a form in which a directory's and a store's can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from kafkalog.errors import KafkaLogError
from kafkalog.log import KafkaLog

__all__ = ["SENTENCES", "View", "by_nature", "differences", "plain", "view"]

_LEVELS: Final = ("read_committed", "read_uncommitted")
_TIMES_MAX: Final = 12
_PATH: Final = "PATH"
_FIELDS: Final = ("partition", "offset", "key", "value", "timestampType", "headers")
View = Mapping[str, Any]
"""What was asked, and the answer, or the error."""


def view(log: KafkaLog, place: str, keys: Sequence[bytes], now_ms: int) -> View:
    """Ask a log everything; `place` is its directory or address."""
    found: dict[str, Any] = {}

    def ask(what: str, question: Callable[[], Any]) -> None:
        try:
            found[what] = plain(question(), place)
        except KafkaLogError as fault:
            found[what] = plain(f"{type(fault).__name__}: {fault}", place)

    ask("topics", log.topics)
    ask("status", lambda: log.status(now_ms=now_ms))
    ask("explain", lambda: log.explain(now_ms=now_ms))
    for name in log.topics():
        ask(f"{name}: config", partial(_config, log, name))
        ask(f"{name}: offsets", partial(log.offsets, name))
        ask(f"{name}: latest", partial(_latest, log, name))
        for number in range(len(log.describe(name).partitions)):
            for level in _LEVELS:
                ask(f"{name}-{number}: {level}", partial(_read, log, name, number, level))
            ask(f"{name}-{number}: lookup", partial(_lookups, log, name, number, keys))
        for time in _times(found, name):
            for level in _LEVELS:
                since = partial(log.offset_for_time, name, time, isolation_level=level)
                ask(f"{name}: {level} at {time}", since)
    return found


def _config(log: KafkaLog, topic: str) -> dict[str, str]:
    return dict(log.describe(topic).config)


def _latest(log: KafkaLog, topic: str) -> list[Any]:
    return _rows(log.latest(topic, include_headers=True))


def _read(log: KafkaLog, topic: str, partition: int, level: str) -> list[Any]:
    return _rows(log.read(topic, partition, include_headers=True, isolation_level=level))


def _lookups(log: KafkaLog, topic: str, partition: int, keys: Sequence[bytes]) -> list[Any]:
    return [log.lookup(topic, key, partition=partition) for key in keys]


def _rows(batches: Iterator[Any]) -> list[Any]:
    return [
        [*(row[name] for name in _FIELDS), str(row["timestamp"])]
        for batch in batches
        for row in batch.to_pylist()
    ]


def _times(found: View, name: str) -> list[int]:
    """Return times about those of some records, and those that have a meaning of their own."""
    times = {
        int(datetime.fromisoformat(row[-1]).timestamp() * 1000) + more
        for what, rows in found.items()
        if what.startswith(f"{name}-") and what.endswith("uncommitted") and isinstance(rows, list)
        for row in rows
        for more in (0, 1)
    }
    chosen = sorted(times)
    return [-3, -2, -1, 0, *chosen[:: len(chosen) // _TIMES_MAX + 1]]


def plain(found: Any, place: str) -> Any:
    """Return an answer as maps, lists and values, in which the place of the log has no name."""
    if isinstance(found, str):
        return found.replace(place, _PATH)
    if is_dataclass(found) and not isinstance(found, type):
        found = asdict(found)
    if isinstance(found, Mapping):
        return {str(name): plain(each, place) for name, each in found.items()}
    if isinstance(found, list | tuple):
        return [plain(each, place) for each in found]
    return found


# --- compare -------------------------------------------------------------------------------------

_CLEANER: Final = (
    "In an object store `explain` doesn't know whether a cleaner runs, because a store has no "
    "locks."
)
_OBJECTS: Final = (
    "The figures of a cleaning count a store's objects as segments, although several "
    "may belong to one segment."
)
_BELOW: Final = (
    "A store drops the objects there at once, and doesn't count them. In a directory "
    "the segments there count until the next retention, and the one that has the log "
    "start counts as a whole."
)
_EPOCHS: Final = (
    "A store knows only the current leader epoch of a partition, and names it with "
    "the earliest and the latest offset."
)
SENTENCES: Final = (_CLEANER, _OBJECTS, _BELOW, _EPOCHS)
"""What differs by nature, as docs/limits.md has it."""
_OF_CLEANERS: Final = ("cleaner", "no cleaner", "cleaner unknown")
_OF_OBJECTS: Final = ("segments_before", "segments_after", "batches_rewritten")
_REPORTS: Final = ("status", "explain")


def by_nature(found: Any) -> Any:
    """Return an answer without what differs by nature."""
    if isinstance(found, list):
        return [
            by_nature(each)
            for each in found
            if not (isinstance(each, Mapping) and each.get("code") in _OF_CLEANERS)
        ]
    if isinstance(found, Mapping):
        return {name: by_nature(each) for name, each in found.items() if name not in _OF_OBJECTS}
    return found


def _without_epochs(found: Any) -> Any:
    """Return the offsets of a lookup by time without their leader epochs."""
    if not isinstance(found, Mapping):
        return found
    return {number: told and told[:2] for number, told in found.items()}


def differences(directory: View, store: View, *, is_cut: bool = False) -> Iterator[str]:
    """Yield what a directory and a store say otherwise, and should not.

    `is_cut` says that a log start lies within a segment, whose bytes count in a directory alone.
    """
    for what in {**directory, **store}:
        if is_cut and what in _REPORTS:
            continue
        one, other = by_nature(directory.get(what)), by_nature(store.get(what))
        if what.endswith((" at -1", " at -2")):
            one, other = _without_epochs(one), _without_epochs(other)
        if one != other:
            yield f"{what}: {_unlike(one, other)}"


def _unlike(one: Any, other: Any) -> str:
    """Return the first places where two answers differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        return "; ".join(f"{name}: {_unlike(one.get(name), other.get(name))}" for name in names)
    if isinstance(one, list) and isinstance(other, list):
        longer = max(len(one), len(other))
        at = next(n for n in range(longer) if one[n : n + 1] != other[n : n + 1])
        if at < min(len(one), len(other)):
            return f"of {len(one)} and {len(other)}, at {at} {_unlike(one[at], other[at])}"
        return f"{len(one)} and {len(other)}, at {at} {one[at : at + 1]} and {other[at : at + 1]}"
    return f"directory {one!r}, store {other!r}"
