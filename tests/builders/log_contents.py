"""What a log holds, as plain values, for tests that check it or compare it before and after.

A log is a directory, which is opened to read, or what `kafkalog.open` returned, or an engine of
either kind. The topic is `t` unless a call names another.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest, latest_of_topic
from kafkalog.inspection.verify import verify
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.state import PartitionState

__all__ = [
    "column",
    "damage",
    "first_dirty",
    "index_entries",
    "latest_column",
    "latest_records",
    "offsets",
    "pairs",
    "records",
    "segment_bases",
    "segment_sizes",
    "state_of",
    "time_index_entries",
    "values",
]

Log = Path | DirectoryLog | KafkaLog
Record = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key and value."""
BUDGET_BYTES = 1 << 20
LATEST_BUDGET_BYTES = CleanerConfig().dedupe_buffer_size


def records(log: Log, topic: str = "t") -> list[Record]:
    """Return every record of a topic, in order."""
    engine = _engine(log)
    found: list[Record] = []
    for number, _ in engine.describe(topic).present():
        for rows in engine.read(topic, number):
            columns = (rows[name].to_pylist() for name in ("offset", "key", "value"))
            found += [(number, *record) for record in zip(*columns, strict=True)]
    return found


def pairs(log: Log, topic: str = "t") -> list[tuple[bytes | None, bytes | None]]:
    """Return key and value of every record of a topic, in order."""
    return [(key, value) for _, _, key, value in records(log, topic)]


def column(
    log: Log, name: str, topic: str = "t", partition: int | None = None, **options: Any
) -> list[Any]:
    """Return one column of a topic, partition by partition, or of one partition."""
    engine = _engine(log)
    numbers = [number for number, _ in engine.describe(topic).present()]
    return [
        cell
        for number in (numbers if partition is None else [partition])
        for rows in engine.read(topic, number, **options)
        for cell in rows[name].to_pylist()
    ]


def offsets(log: Log, topic: str = "t", partition: int | None = None, **options: Any) -> list[int]:
    """Return the offsets that a reader gets."""
    return column(log, "offset", topic, partition, **options)


def values(
    log: Log, topic: str = "t", partition: int | None = None, **options: Any
) -> list[bytes | None]:
    """Return the values that a reader gets."""
    return column(log, "value", topic, partition, **options)


def latest_records(log: Log, topic: str = "t") -> dict[bytes, bytes]:
    """Return the latest value of every key."""
    found: dict[bytes, bytes] = {}
    for rows in latest_of_topic(_engine(log), topic, budget_bytes=LATEST_BUDGET_BYTES):
        found.update(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
    return found


def latest_column(
    log: Log,
    name: str = "offset",
    topic: str = "t",
    *,
    end: int | None = None,
    budget_bytes: int = BUDGET_BYTES,
    keys: Collection[bytes] | None = None,
    with_tombstones: bool = False,
) -> dict[bytes, Any]:
    """Return one column of the latest record of every key below `end` in partition 0."""
    schema = changelog_schema()
    found: dict[bytes, Any] = {}
    with _engine(log).snapshot(topic, 0, whole=True) as snapshot:
        end = snapshot.state.high_watermark if end is None else end
        for rows in latest(
            snapshot,
            end,
            budget_bytes=budget_bytes,
            schema=schema,
            keys=keys,
            with_tombstones=with_tombstones,
        ):
            assert rows.schema == schema
            cells = dict(zip(rows["key"].to_pylist(), rows[name].to_pylist(), strict=True))
            assert len(cells) == rows.num_rows and found.keys().isdisjoint(cells)
            found |= cells
    return found


def state_of(engine: DirectoryLog, topic: str = "t", partition: int = 0) -> PartitionState:
    """Return what the journal says of a partition."""
    return engine.describe(topic).partitions[partition]


def first_dirty(engine: DirectoryLog, topic: str = "t") -> int:
    """Return the offset from which partition 0 is not cleaned yet."""
    return state_of(engine, topic).first_dirty_offset


def segment_bases(engine: DirectoryLog, stage: str = "") -> list[int]:
    """Return the base offsets of the segments of partition 0, or of its files of a stage."""
    names = (path.name for path in engine.partition_directory("t", 0).iterdir())
    parsed = (layout.parse_segment_file(name) for name in names)
    return sorted(found[0] for found in parsed if found and found[1:] == (layout.LOG, stage))


def segment_sizes(engine: DirectoryLog) -> list[int]:
    """Return the sizes of the `.log` files of partition 0, in order."""
    paths = sorted(engine.partition_directory("t", 0).glob(f"*{layout.LOG}"))
    return [path.stat().st_size for path in paths]


def index_entries(engine: DirectoryLog, base: int = 0) -> list[tuple[int, int]]:
    """Return the entries of an offset index of partition 0."""
    return list(struct.iter_unpack(">ii", _segment_file(engine, base, layout.INDEX)))


def time_index_entries(engine: DirectoryLog, base: int = 0) -> list[tuple[int, int]]:
    """Return the entries of a time index of partition 0."""
    return list(struct.iter_unpack(">qi", _segment_file(engine, base, layout.TIME_INDEX)))


def damage(root: Path) -> list[str]:
    """Return what `verify` takes for damage."""
    return [str(finding) for finding in verify(root, deep=True) if finding.is_damage]


def _segment_file(engine: DirectoryLog, base: int, suffix: str) -> bytes:
    return (engine.partition_directory("t", 0) / layout.segment_file(base, suffix)).read_bytes()


def _engine(log: Log) -> Any:
    if isinstance(log, Path):
        return DirectoryLog(log, read_only=True)
    return log._engine if isinstance(log, KafkaLog) else log
