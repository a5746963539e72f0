"""What a log shows, whether it may, and whether work on it goes on."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from kafkalog.cleaner.schedule import manager
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests.torture.complaints import Complaints
from tests.torture.memory import forget
from tests.torture.workloads import OPERATIONS, Opened

__all__ = [
    "PartitionRows",
    "Snapshot",
    "TopicRows",
    "cleaning_faults",
    "faults_of",
    "forget",
    "is_repeatable",
    "later",
    "read_partition",
    "recovered",
    "snapshot",
    "told",
    "with_obsolete",
    "works",
]

Row = tuple[int, bytes | None, bytes | None, int]
_SHOWN: Final = 6
_READ_COLUMNS: Final = ("offset", "key", "value", "timestamp")


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """What a partition shows: its range, and its records as (offset, key, value, epoch ms)."""

    log_start: int
    high_watermark: int
    rows: tuple[Row, ...]

    def latest(self) -> dict[bytes | None, Row]:
        """Return the last record of each key, tombstones too."""
        return {row[1]: row for row in self.rows}


@dataclass(frozen=True, slots=True)
class TopicRows:
    """What a topic shows."""

    config: tuple[tuple[str, str], ...]
    partitions: Mapping[int, PartitionRows]

    @property
    def is_compacted(self) -> bool:
        """Whether the cleaner may take obsolete records from it."""
        return "compact" in dict(self.config)["cleanup.policy"]


Snapshot = Mapping[str, TopicRows]
"""What a log shows at one moment, by topic."""


# --- what a log shows ----------------------------------------------------------------------------


def read_partition(
    engine: DirectoryLog, topic: TopicState, partition: int, state: PartitionState
) -> PartitionRows:
    """Read what a partition shows."""
    rows = tuple(_rows(engine, topic.name, partition, None)) if state.high_watermark else ()
    return PartitionRows(state.log_start_offset, state.high_watermark, rows)


Reading = Callable[[DirectoryLog, TopicState, int, PartitionState], PartitionRows]
Looking = Callable[[DirectoryLog], Snapshot]


def snapshot(log: DirectoryLog | Path, read: Reading = read_partition) -> Snapshot:
    """Read all that a log shows; of a path without changing anything."""
    engine = DirectoryLog(log, read_only=True) if isinstance(log, Path) else log
    found = {}
    for name, topic in engine.state().topics.items():
        partitions = {
            number: read(engine, topic, number, state) for number, state in topic.present()
        }
        found[name] = TopicRows(tuple(sorted(topic.config.items())), partitions)
    return found


def _rows(engine: DirectoryLog, topic: str, partition: int, start: int | None) -> Iterator[Row]:
    for batch in engine.read(topic, partition, start, columns=_READ_COLUMNS):
        *columns, times = batch.columns
        shown = [column.to_pylist() for column in columns]
        stamps = [us // 1_000 for us in times.cast(pa.int64()).to_pylist()]
        yield from zip(*shown, stamps, strict=True)


def later(after: Snapshot, before: Snapshot, ms: int) -> Snapshot:
    """Return what a log shows if what came between two moments had come so much later."""
    found = {}
    for name, topic in after.items():
        was = before[name].partitions if name in before else {}
        partitions = {}
        for number, now in topic.partitions.items():
            old = set(was[number].rows) if number in was else set()
            rows = tuple(row if row in old else (*row[:3], row[3] + ms) for row in now.rows)
            partitions[number] = dataclasses.replace(now, rows=rows)
        found[name] = dataclasses.replace(topic, partitions=partitions)
    return found


def with_obsolete(seen: Snapshot, before: Snapshot) -> Snapshot:
    """Return what was seen, with the records that a cleaning had taken: they may come back.

    A cleaning is durable when it is done. Those that were deleted do not come back.
    """
    found = {}
    for name, topic in seen.items():
        partitions = dict(topic.partitions)
        if topic.is_compacted:
            for number, now in topic.partitions.items():
                rows = before[name].partitions[number].rows
                kept = tuple(row for row in rows if row[0] >= now.log_start)
                partitions[number] = dataclasses.replace(now, rows=kept)
        found[name] = dataclasses.replace(topic, partitions=partitions)
    return found


def recovered(root: Path, now_ms: int) -> None:
    """Make a directory a log again that was on its way to a broker, or back."""
    release(root, now_ms=now_ms)
    adopt(root, now_ms=now_ms)


# --- whether it may ------------------------------------------------------------------------------


def faults_of(found: Snapshot, before: Snapshot, after: Snapshot | None, kind: str) -> list[str]:
    """Return what a log shows that it may not, between two moments of a workload.

    `atomic`: all is as before, or all is as after. `none`: nothing changes. `partial`: records that
    go may go one by one, but no older value of a key comes back. `topic`: besides what changes at
    once, a topic whose config changes may be missing. `copied`: records may come one by one, in
    their order. Without `after` it is not known which of the records go.
    """
    if found == before or (after is not None and kind != "none" and found == after):
        return []
    if after is None:
        after = before if kind == "none" else None
    if kind in ("atomic", "none", "handed"):
        return _differences(found, before, after)
    if kind == "topic":
        return list(_topic_faults(found, before, before if after is None else after))
    if kind == "copied" and after is not None:
        return list(_copied_faults(found, before, after))
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


def _copied_faults(found: Snapshot, before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what is not as before, nor a beginning of what is copied."""
    for name in sorted({*found, *before, *after}):
        now, was, will = (each.get(name) for each in (found, before, after))
        if now in (was, will):
            continue
        if now is None or will is None or now.config != will.config:
            yield f"{name}: expected as before or as after, found {now}"
            continue
        for number, partition in now.partitions.items():
            old = was.partitions[number].high_watermark if was else 0
            end, new = partition.high_watermark, will.partitions[number]
            if not old <= end <= new.high_watermark:
                yield f"{name}-{number}: high watermark: found {end}, expected {old} or more"
            rows = tuple(row for row in new.rows if row[0] < end)
            yield from _unlike_rows(f"{name}-{number}", partition.rows, rows)


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
    """Yield keys whose latest record is gone; a tombstone may go if all of its key went."""
    latest, kept = was.latest(), found.latest()
    for key, row in latest.items():
        now = kept.get(key)
        if row[0] < found.log_start or now == row:
            continue
        if now is not None:
            yield f"{where}: an older value of {key!r} is back: {now}, the latest was {row}"
        elif row[2] is not None:
            yield f"{where}: the latest record of {key!r} is lost: {row}"


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


def works(log: Opened, before: Snapshot, look: Looking = snapshot) -> list[str]:
    """Verify, append, read, clean, close and open a log that shows `before`; say what is wrong.

    `look` takes snapshots of it.
    """
    with Complaints() as complaints:
        return [*_works(log, before, look), *complaints.faults]


def _works(log: Opened, before: Snapshot, look: Looking) -> Iterator[str]:
    engine, now_ms = log.engine, log.moment.now_ms + 1
    yield from _damage(log.root)  # before a cleaning makes indexes anew
    value = b"probe %d" % log.moment.turn
    result = engine.append("t", [(b"probe", value)], now_ms=now_ms)
    ((_, partition), (offset, _)) = next(iter(result.offsets.items()))
    row = (offset, b"probe", value, now_ms)
    read = list(_rows(engine, "t", partition, offset))
    if read != [row]:
        yield f"appended {row}, read {read}"
    probed = _with_row(before, partition, row)
    for stats in manager.clean(engine, "t", force=True, now_ms=now_ms):
        if stats.error is not None:
            yield f"{stats.topic}-{stats.partition}: not cleaned: {stats.error}"
    cleaned = look(engine)
    for fault in cleaning_faults(cleaned, probed, "t", now_ms):
        yield f"after a cleaning: {fault}"
    yield from _damage(log.root, "t")
    topics = engine.state().topics
    log.reopen()
    if log.engine.state().topics != topics:
        yield f"after close and open: {log.engine.state().topics}, before: {topics}"
    for fault in _unlike(look(log.engine), cleaned):
        yield f"after close and open: {fault}"


def _damage(root: Path, topic: str | None = None) -> Iterator[str]:
    for finding in verify(root, topic, deep=True):
        if finding.is_damage:
            yield f"verify: {finding}"


def cleaning_faults(found: Snapshot, before: Snapshot, topic: str, now_ms: int) -> Iterator[str]:
    """Yield what a forced cleaning of a topic, which nothing held back, has done wrong.

    All that is obsolete is gone, and nothing else but tombstones that had their time.
    """
    others = ({name: each[name] for name in each if name != topic} for each in (found, before))
    yield from _unlike(*others)
    now, was = found[topic], before[topic]
    if now.config != was.config or set(now.partitions) != set(was.partitions):
        yield f"{topic}: another topic than before"
        return
    kept_ms = int(dict(was.config)["delete.retention.ms"])
    for number, old in was.partitions.items():
        latest = old.latest()
        wanted = tuple(row for row in old.rows if latest[row[1]] == row)
        # Its time begins with the first cleaning, so not before it was written.
        may_go = {row for row in wanted if row[2] is None and row[3] <= now_ms - kept_ms}
        partition = now.partitions[number]
        there = set(partition.rows)
        wanted = tuple(row for row in wanted if row in there or row not in may_go)
        yield from _unlike_partition(
            f"{topic}-{number}", partition, dataclasses.replace(old, rows=wanted)
        )


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
