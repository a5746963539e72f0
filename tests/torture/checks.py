"""What a log shows, whether it may, and whether work on it goes on."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafkalog.cleaner import manager, uncleanable
from kafkalog.storage_engine import partition_directory
from kafkalog.storage_engine.broker.adopt import adopt
from kafkalog.storage_engine.broker.release import release
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.inspection.verify import verify
from kafkalog.storage_engine.transaction_markers import known_markers
from tests.torture.workloads import OPERATIONS, Opened

__all__ = [
    "PartitionRows",
    "Snapshot",
    "TopicRows",
    "faults_of",
    "forget",
    "is_repeatable",
    "recovered",
    "snapshot",
    "told",
    "works",
]

Row = tuple[int, bytes | None, bytes | None]
_SHOWN: Final = 6
_READ_COLUMNS: Final = ("offset", "key", "value")


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """What a partition shows: its range, and its records as (offset, key, value)."""

    log_start: int
    high_watermark: int
    rows: tuple[Row, ...]

    def newest(self) -> dict[bytes | None, Row]:
        """Return the last record of each key, tombstones too."""
        return {row[1]: row for row in self.rows}


@dataclass(frozen=True, slots=True)
class TopicRows:
    """What a topic shows."""

    config: tuple[tuple[str, str], ...]
    partitions: Mapping[int, PartitionRows]

    @property
    def is_compacted(self) -> bool:
        """Whether the cleaner may take superseded records from it."""
        return "compact" in dict(self.config)["cleanup.policy"]


Snapshot = Mapping[str, TopicRows]
"""What a log shows at one moment, by topic."""


# --- what a log shows ----------------------------------------------------------------------------


def snapshot(log: Engine | Path) -> Snapshot:
    """Read all that a log shows; of a path without changing anything."""
    engine = Engine(log, read_only=True) if isinstance(log, Path) else log
    found = {}
    for name, topic in engine.state().topics.items():
        partitions = {}
        for number, state in topic.present():
            rows = tuple(_rows(engine, name, number, None)) if state.high_watermark else ()
            partitions[number] = PartitionRows(state.log_start_offset, state.high_watermark, rows)
        found[name] = TopicRows(tuple(sorted(topic.config.items())), partitions)
    return found


def _rows(engine: Engine, topic: str, partition: int, start: int | None) -> Iterator[Row]:
    for batch in engine.read(topic, partition, start, columns=_READ_COLUMNS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def forget() -> None:
    """Forget what this process remembers of directories: another state is at their paths now."""
    uncleanable._unwritten.clear()
    known_markers.clear()
    partition_directory._suspect.clear()


def recovered(root: Path, now_ms: int) -> None:
    """Make a directory a log again that was on its way to a broker, or back."""
    release(root, now_ms=now_ms)
    adopt(root, now_ms=now_ms)


# --- whether it may ------------------------------------------------------------------------------


def faults_of(found: Snapshot, before: Snapshot, after: Snapshot | None, kind: str) -> list[str]:
    """Return what a log shows that it may not, between two moments of a workload.

    `atomic`: all is as before, or all is as after. `none`: nothing changes. `partial`: records that
    go may go one by one, but no older value of a key comes back. `topic`: besides what changes at
    once, a topic whose config changes may be missing. Without `after` it is not known which of the
    records go.
    """
    if found == before or (after is not None and kind != "none" and found == after):
        return []
    if after is None:
        after = before if kind == "none" else None
    if kind in ("atomic", "none", "handed"):
        return _differences(found, before, after)
    if kind == "topic":
        return list(_topic_faults(found, before, before if after is None else after))
    if kind == "partial":
        return list(_partial_faults(found, before, after))
    raise ValueError(f"unknown kind {kind!r}")


def _differences(found: Snapshot, before: Snapshot, after: Snapshot | None) -> list[str]:
    """Say how far a log is from what it was, and from what it was to be."""
    is_as_before = list(_unlike(found, before))
    if after is None or after == before:
        return is_as_before
    faults = [f"not as before: {fault}" for fault in is_as_before]
    return faults + [f"not as after: {fault}" for fault in _unlike(found, after)]


def _topic_faults(found: Snapshot, before: Snapshot, after: Snapshot) -> Iterator[str]:
    for name in sorted({*found, *before, *after}):
        choices = [before.get(name), after.get(name)]
        if choices[0] != choices[1]:
            choices.append(None)
        if found.get(name) not in choices:
            wanted = {} if choices[0] is None else {name: choices[0]}
            yield from _unlike({name: found[name]} if name in found else {}, wanted)


def _partial_faults(found: Snapshot, before: Snapshot, after: Snapshot | None) -> Iterator[str]:
    if set(found) != set(before):
        yield f"topics: expected {sorted(before)}, found {sorted(found)}"
        return
    for name, topic in found.items():
        configs = [each[name].config for each in (before, after) if each is not None]
        if topic.config not in configs:
            yield f"{name}: config: expected one of {configs}, found {topic.config}"
        if set(topic.partitions) != set(before[name].partitions):
            yield f"{name}: partitions: found {sorted(topic.partitions)}"
            continue
        for number, partition in topic.partitions.items():
            was = before[name].partitions[number]
            will = None if after is None else after[name].partitions[number]
            where = f"{name}-{number}"
            yield from _between(where, partition, was, will)
            if topic.is_compacted:
                yield from _older_values(where, partition, was)
            else:
                kept = tuple(row for row in was.rows if row[0] >= partition.log_start)
                yield from _unlike_rows(where, partition.rows, kept)


def _between(
    where: str, found: PartitionRows, was: PartitionRows, will: PartitionRows | None
) -> Iterator[str]:
    """Yield what lies not between two states of a partition that records only go from."""
    if found.high_watermark != was.high_watermark:
        yield f"{where}: high watermark: {was.high_watermark} became {found.high_watermark}"
    end = was.high_watermark if will is None else will.log_start
    if not was.log_start <= found.log_start <= end:
        yield f"{where}: log start: {was.log_start} became {found.log_start}, not above {end}"
    for row in _shown(set(found.rows) - set(was.rows)):
        yield f"{where}: the record {row} was not there before"
    if len(set(found.rows)) != len(found.rows):
        yield f"{where}: records are there twice"
    if will is not None:
        for row in _shown(set(will.rows) - set(found.rows)):
            yield f"{where}: the record {row} is lost"


def _older_values(where: str, found: PartitionRows, was: PartitionRows) -> Iterator[str]:
    """Yield keys whose newest record is gone; a tombstone may go if all of its key went."""
    newest, kept = was.newest(), found.newest()
    for key, row in newest.items():
        now = kept.get(key)
        if row[0] < found.log_start or now == row:
            continue
        if now is not None:
            yield f"{where}: an older value of {key!r} is back: {now}, the newest was {row}"
        elif row[2] is not None:
            yield f"{where}: the newest record of {key!r} is lost: {row}"


def _unlike(found: Snapshot, wanted: Snapshot) -> Iterator[str]:
    """Yield how one snapshot differs from another, place by place."""
    if set(found) != set(wanted):
        yield f"topics: expected {sorted(wanted)}, found {sorted(found)}"
    for name in sorted(set(found) & set(wanted)):
        if found[name].config != wanted[name].config:
            changed = sorted(set(found[name].config) - set(wanted[name].config))
            yield f"{name}: config: found {changed}, expected others"
        mine, other = found[name].partitions, wanted[name].partitions
        if set(mine) != set(other):
            yield f"{name}: partitions: expected {sorted(other)}, found {sorted(mine)}"
        for number in sorted(set(mine) & set(other)):
            yield from _unlike_partition(f"{name}-{number}", mine[number], other[number])


def _unlike_partition(where: str, found: PartitionRows, wanted: PartitionRows) -> Iterator[str]:
    if (found.log_start, found.high_watermark) != (wanted.log_start, wanted.high_watermark):
        yield (
            f"{where}: range: expected [{wanted.log_start}, {wanted.high_watermark}), "
            f"found [{found.log_start}, {found.high_watermark})"
        )
    yield from _unlike_rows(where, found.rows, wanted.rows)


def _unlike_rows(where: str, found: tuple[Row, ...], wanted: tuple[Row, ...]) -> Iterator[str]:
    for row in _shown(set(wanted) - set(found)):
        yield f"{where}: the record {row} is lost"
    for row in _shown(set(found) - set(wanted)):
        yield f"{where}: the record {row} is not expected"
    if len(set(found)) != len(found):
        yield f"{where}: records are there twice"
    elif set(found) == set(wanted) and found != wanted:
        yield f"{where}: records are in another order"


def _shown(rows: set[Row]) -> list[Row]:
    return sorted(rows)[:_SHOWN]


# --- whether work goes on ------------------------------------------------------------------------


def is_repeatable(name: str | None) -> bool:
    """Tell whether an operation may be done again when nobody knows whether it was done."""
    return name is not None and OPERATIONS[name].repeatable


def works(log: Opened, before: Snapshot) -> list[str]:
    """Append, read, clean, verify, close and open a log that shows `before`; say what is wrong."""
    engine, now_ms = log.engine, log.moment.now_ms + 1
    value = b"probe %d" % log.moment.turn
    result = engine.append("t", [(b"probe", value)], now_ms=now_ms)
    ((_, partition), (offset, _)) = next(iter(result.offsets.items()))
    row = (offset, b"probe", value)
    read = list(_rows(engine, "t", partition, offset))
    faults = [] if read == [row] else [f"appended {row}, read {read}"]
    probed = _with_row(before, partition, row)
    for stats in manager.clean(engine, "t", force=True, now_ms=now_ms):
        if stats.error is not None:
            faults.append(f"{stats.topic}-{stats.partition}: not cleaned: {stats.error}")
    cleaned = snapshot(engine)
    faults += [f"after a cleaning: {f}" for f in faults_of(cleaned, probed, None, "partial")]
    found = [str(each) for each in verify(log.root, deep=True) if each.is_damage]
    faults += [f"verify: {finding}" for finding in found]
    topics = engine.state().topics
    log.reopen()
    if log.engine.state().topics != topics:
        faults.append(f"after close and open: {log.engine.state().topics}, before: {topics}")
    return faults


def _with_row(before: Snapshot, partition: int, row: Row) -> Snapshot:
    """Return what a log shows once one record was appended to a partition of `t`."""
    topic = before["t"]
    was = topic.partitions[partition]
    now = PartitionRows(was.log_start, was.high_watermark + 1, (*was.rows, row))
    return {**before, "t": TopicRows(topic.config, {**topic.partitions, partition: now})}


def told(fault: BaseException) -> str:
    """Say what was raised, and where, in one line."""
    frames = traceback.extract_tb(fault.__traceback__)[-3:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(fault).__name__}: {' '.join(str(fault).split())} (at {where})"
