"""What two programs say of one log, in a form in which it can be compared."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafkalog.errors import CorruptBatchError, KafkaLogError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.broker.loader import LoadedPartition
from kafkalog.storage_engine.segment.loss import Loss
from tests.conformance.twin_kafka import KafkaCleaner
from tests.torture.twin_ages import Retention
from tests.torture.twin_draws import TOPIC

__all__ = [
    "LARGEST",
    "Difference",
    "View",
    "difference_of_losses",
    "differences",
    "kafkas_view",
    "our_view",
    "times_of",
]

LARGEST: Final = -3
"""The time that asks for the record with the largest timestamp."""
_TIMES_MAX: Final = 30
_LEVELS: Final = ("uncommitted", "committed")


@dataclass(frozen=True)
class Difference:
    """One thing of which two programs say two things."""

    stage: str
    what: str
    theirs: Any
    ours: Any
    is_told: bool = False
    """Whether the files say what ours says: Kafka's own decoder has read them without an index."""
    rows: tuple[list[Any], list[Any]] | None = field(default=None, repr=False)
    """All records of both, where it is about them."""
    retention: Retention | None = field(default=None, repr=False)
    """What there was to delete, where it is about that."""
    directory: Path | None = field(default=None, repr=False)
    """Kafka's copy, where files say why."""
    lost: Loss | None = None
    """What we tell to be gone."""

    def __str__(self) -> str:
        told = ", as the files" if self.is_told else ""
        return f"{self.stage}: {self.what}: Kafka {self.theirs}, ours {self.ours}{told}"


@dataclass(frozen=True)
class Told:
    """What the files say, record by record."""

    records: list[Any]
    stamps: list[Any]
    """(offset, timestamp, leader epoch, producer, kind) of all records, also of control records.

    The kind is `data` of a transaction, `ABORT` or `COMMIT` of a marker."""

    def since(self, time: int) -> Any:
        """Return the first record since a time, or the first one with the largest timestamp."""
        largest = max((stamp[1] for stamp in self.stamps), default=-1)
        wanted = max(largest if time == LARGEST else time, 0)
        return next((stamp[:3] for stamp in self.stamps if stamp[1] >= wanted), None)

    def outcomes(self, stable: int) -> tuple[list[Any], int]:
        """Return the committed records below an offset, and where the first open transaction is.

        The next marker of a producer decides.
        """
        decided: dict[int, str] = {}
        aborted, first_open = set(), -1
        for offset, _, _, producer, kind in reversed(self.stamps):
            if kind in ("ABORT", "COMMIT"):
                decided[producer] = kind
            elif kind == "data" and producer not in decided:
                first_open = offset
            elif kind == "data" and decided[producer] == "ABORT":
                aborted.add(offset)
        rows = [row for row in self.records if row[0] < stable and row[0] not in aborted]
        return rows, first_open


@dataclass(frozen=True)
class View:
    """What a program says of a log; what it did not say is None."""

    start: int
    end: int
    stable: int
    records: Mapping[str, list[Any]]
    """By level, (offset, timestamp, key, value, headers ...) of each."""
    faults: Mapping[str, str]
    """By level, what ended the reading."""
    times: Mapping[int, Any]
    told: Told | None = None
    epochs: list[Any] | None = None
    producers: Mapping[int, Any] | None = None


def times_of(records: Iterable[list[Any]]) -> list[int]:
    """Return the times that are looked up: some about the records', and the ends of time."""
    found = sorted({max(time + more, 0) for _, time, *_ in records for more in (-1, 0, 1)})
    step = len(found) // _TIMES_MAX + 1
    return [LARGEST, 0, *found[len(found) % step :: step], 2**62]


def kafkas_view(kafka: KafkaCleaner, name: str, now_ms: int) -> View:
    """Ask Kafka."""
    shown = kafka.show(now_ms, name)
    scan = shown["scan"]
    times = times_of(scan["records"])
    found = kafka.times(now_ms, name, times)
    return View(
        shown["start"],
        shown["end"],
        shown["stable"],
        {level: shown[level]["records"] for level in _LEVELS},
        {level: shown[level]["fault"] for level in _LEVELS if "fault" in shown[level]},
        {time: found[str(time)] for time in times},
        Told(scan["records"], scan["stamps"]) if _is_told(scan) else None,
        shown["epochs"],
        {int(number): entry for number, entry in shown["producers"].items()},
    )


def _is_told(scan: Mapping[str, Any]) -> bool:
    """Return whether files say what there is; no checksum covers the base offset of a batch."""
    offsets = [stamp[0] for stamp in scan["stamps"]]
    return "fault" not in scan and offsets == sorted({*offsets})


def our_view(
    log: KafkaLog,
    times: Iterable[int],
    loaded: LoadedPartition | None = None,
    now_ms: int = 0,
) -> View:
    """Ask our log; of a directory that is a broker's, what was loaded tells more."""
    start, end = log.offsets(TOPIC)[0]
    records: dict[str, list[Any]] = {}
    faults: dict[str, str] = {}
    for level in _LEVELS:
        records[level] = []
        try:
            for rows in log.read(TOPIC, 0, include_headers=True, isolation_level=f"read_{level}"):
                records[level] += _fields(rows)
        except KafkaLogError as fault:
            faults[level] = f"{type(fault).__name__}: {fault}"
    return View(
        start,
        end,
        log.describe(TOPIC).partitions[0].last_stable_offset,
        records,
        faults,
        {time: _time(log, time) for time in times},
        None,
        None if loaded is None else [list(entry) for entry in loaded.leader_epochs],
        None if loaded is None else _producers(loaded, now_ms),
    )


def _fields(rows: Any) -> Iterator[list[Any]]:
    names = ("offset", "key", "value", "headers")
    columns = [rows.column(name).to_pylist() for name in names]
    times = rows.column("timestamp").cast("int64").to_pylist()
    for time, offset, key, value, headers in zip(times, *columns, strict=True):
        fields = [offset, time // 1000, _text(key), _text(value)]
        for header in headers or ():
            fields += [header["key"], _text(header["value"])]
        yield fields


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _time(log: KafkaLog, time: int) -> Any:
    try:
        found = log.offset_for_time(TOPIC, time, isolation_level="read_uncommitted")[0]
    except KafkaLogError as fault:
        return f"{type(fault).__name__}: {fault}"
    return None if found is None else list(found)


def _producers(loaded: LoadedPartition, now_ms: int) -> dict[int, Any]:
    """Return the producers that have not expired: a broker removes the others every ten minutes."""
    producers = loaded.producers.copy()
    producers.expire(now_ms)
    return {
        number: [
            entry.producer_epoch,
            entry.last_sequence,
            entry.timestamp,
            entry.coordinator_epoch,
            entry.current_txn_first_offset,
        ]
        for number, entry in producers.entries.items()
    }


# --- compare -------------------------------------------------------------------------------------


def differences(stage: str, theirs: View, ours: View) -> Iterator[Difference]:
    """Compare two views, and ours with what the files say."""
    for what in ("start", "end", "epochs", "producers"):
        mine, others = getattr(ours, what), getattr(theirs, what)
        if mine is not None and mine != others:
            yield Difference(stage, what, others, mine)
    yield from _stable(stage, theirs, ours)
    for level in _LEVELS:
        yield from _records(stage, theirs, ours, level)
    yield from _times(stage, theirs, ours)


def difference_of_losses(
    stage: str,
    theirs: View,
    lost: Sequence[Loss],
    log: KafkaLog,
    gone: Iterable[tuple[int, int]],
) -> Iterator[Difference]:
    """Compare a log whose losses we tell with Kafka's, which goes on without a word.

    `gone` has the first and last offsets of the batches that were there, and are not in Kafka's.
    """
    start, end = log.offsets(TOPIC)[0]
    bounds = (min(theirs.start, lost[0].start), max(theirs.end, lost[-1].end))
    if (start, end) != bounds:
        yield Difference(stage, "bounds beside losses", bounds, (start, end))
    left = theirs.told.records if theirs.told else theirs.records["uncommitted"]
    for loss in lost:
        fault = _fault(log, loss.start, loss.end)
        if loss.start < loss.end and loss.what not in fault:
            yield Difference(stage, "a read of a loss", loss.what, fault)
        still = [row[0] for row in left if loss.start <= row[0] < loss.end]
        is_gone = any(first < loss.end and loss.start <= last for first, last in gone)
        told = "" if is_gone and not still else f"nothing gone, still {still}"
        yield Difference(stage, "a loss", told, f"{loss.start} to {loss.end}", lost=loss)
    found: list[Any] = []
    ends = [start, *(loss.end for loss in lost)]
    left = [row for row in left if not any(loss.start <= row[0] < loss.end for loss in lost)]
    try:
        for begin, until in zip(ends, [*(loss.start for loss in lost), end], strict=True):
            found += _range(log, begin, until)
    except CorruptBatchError as fault:
        yield Difference(stage, "uncommitted", "records", f"CorruptBatchError: {fault}")
        left = left[: len(found)]
    if found != left:
        yield Difference(stage, "records beside losses", left, found)


def _range(log: KafkaLog, start: int, end: int) -> list[Any]:
    rows: list[Any] = []
    if start < end:
        level = "read_uncommitted"
        for found in log.read(TOPIC, 0, start, end, include_headers=True, isolation_level=level):
            rows += _fields(found)
    return rows


def _fault(log: KafkaLog, start: int, end: int) -> str:
    try:
        _range(log, start, end)
    except KafkaLogError as fault:
        return str(fault)
    return "no error"


def _stable(stage: str, theirs: View, ours: View) -> Iterator[Difference]:
    if theirs.stable != ours.stable:
        _, told = theirs.told.outcomes(ours.end) if theirs.told else ([], -2)
        is_told = ours.stable == (ours.end if told == -1 else told)
        yield Difference(stage, "stable", theirs.stable, ours.stable, is_told)


def _records(stage: str, theirs: View, ours: View, level: str) -> Iterator[Difference]:
    mine, others = ours.records[level], theirs.records[level]
    if level in ours.faults or (level in theirs.faults and theirs.told is None):
        # Both read up to the damage; how far, depends on how much they read at once.
        count = min(len(mine), len(others))
        if mine[:count] == others[:count] and (level in ours.faults) == (level in theirs.faults):
            return
        is_told = False
    else:
        told = None
        if theirs.told is not None:
            committed, _ = theirs.told.outcomes(ours.stable)
            told = committed if level == "committed" else theirs.told.records
        is_told = mine == told
        if mine == others and (is_told or told is None):
            return
    at = next(
        (n for n in range(max(len(mine), len(others))) if mine[n : n + 1] != others[n : n + 1]), 0
    )
    yield Difference(
        stage,
        level,
        f"{len(others)} records, at {at} {others[at : at + 1]} {theirs.faults.get(level, '')}",
        f"{len(mine)} records, at {at} {mine[at : at + 1]} {ours.faults.get(level, '')}",
        is_told,
        (others, mine),
    )


def _times(stage: str, theirs: View, ours: View) -> Iterator[Difference]:
    if theirs.told is None:
        return
    told = {time: theirs.told.since(time) for time in ours.times}
    for is_told, others in ((False, told), (True, theirs.times)):
        unlike = [time for time in told if ours.times[time] != others[time]]
        if unlike:
            mine = {time: ours.times[time] for time in unlike}
            yield Difference(stage, "times", {time: others[time] for time in unlike}, mine, is_told)
            return
