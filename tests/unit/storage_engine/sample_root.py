"""A small root with every kind of file a log can have, and the rows that may be read of it.

Its batches, indexes and snapshots come from `tests/builders`, which knows none of kafkalog's code.
The journal alone is the engine's own.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders import message_builder
from tests.builders.batch_builder import (
    ABORT,
    COMMIT,
    CONTROL,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    TRANSACTIONAL,
    ZSTD,
    BatchBuilder,
    Record,
    end_marker,
)
from tests.builders.segment_files import aborted_entry, gap_list, gaps_of, producer_snapshot

NOW_MS = 10_000_000
SCHEMA = changelog_schema(include_headers=True)


class Row(NamedTuple):
    """A record as a reader gets it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass
class Stored:
    """A batch, or a message v0 or v1, with the rows a reader may get from it."""

    base: int
    last: int
    data: bytes
    rows: list[Row]
    max_timestamp: int = -1
    producer_id: int = -1
    is_control: bool = False
    is_transactional: bool = False
    is_committed: bool = True
    sequence: int = -1


@dataclass
class Segment:
    """A `.log` file by its name, and its batches in order."""

    name: str
    base: int
    batches: list[Stored]
    aborted: Sequence[tuple[int, int, int, int]] = ()
    """Producer, first and last offset of an aborted transaction, and the last stable one then."""

    @property
    def data(self) -> bytes:
        """The file's content."""
        return b"".join(item.data for item in self.batches)


@dataclass
class Log:
    """One partition: its segments, and what the journal says of it."""

    topic: str
    partition: int
    segments: list[Segment]
    stable: int | None = None
    shadow: list[Segment] = field(default_factory=list)
    """Segments that are not live, whose rows are records of this log all the same."""
    config: dict[str, str] = field(default_factory=lambda: {"cleanup.policy": "delete"})
    listed_from: int = 0
    raw_gaps: list[tuple[int, int]] = field(default_factory=list)
    """What a raw append has left out."""

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def start(self) -> int:
        return self.segments[0].base

    @property
    def end(self) -> int:
        lasts = [item.last + 1 for segment in self.segments for item in segment.batches]
        return max([self.segments[-1].base, *lasts])

    @property
    def last_stable_offset(self) -> int:
        return self.end if self.stable is None else self.stable

    @property
    def is_compacted(self) -> bool:
        return self.config["cleanup.policy"] == "compact"

    def rows(self, *, committed: bool) -> list[Row]:
        end = self.last_stable_offset if committed else self.end
        return [
            row
            for segment in self.segments
            for item in segment.batches
            for row in item.rows
            if row.offset < end and not item.is_control and (item.is_committed or not committed)
        ]

    def snapshot(self, offset: int) -> bytes:
        """The `.snapshot` file of the producers' state at an offset."""
        entries: dict[int, tuple[int, ...]] = {}
        opened: dict[int, int] = {}
        for item in (item for s in self.segments for item in s.batches if item.base < offset):
            if item.is_control:
                opened.pop(item.producer_id, None)
            elif item.producer_id >= 0:
                sequence, delta = item.sequence + item.last - item.base, item.last - item.base
                entries[item.producer_id] = (sequence, item.last, delta, item.max_timestamp)
                if item.is_transactional:
                    opened.setdefault(item.producer_id, item.base)
        return producer_snapshot(
            (producer_id, 1, *entry, 4, opened.get(producer_id, -1))
            for producer_id, entry in entries.items()
        )

    def stable_below(self, offset: int) -> int:
        """Where the first transaction begins that is open at `offset`; that offset if none is."""
        opened: dict[int, int] = {}
        for item in (item for s in self.segments for item in s.batches if item.base < offset):
            if item.is_control:
                opened.pop(item.producer_id, None)
            elif item.is_transactional:
                opened.setdefault(item.producer_id, item.base)
        return min([offset, *opened.values()])

    def position_of(self, offset: int) -> tuple[int, int] | None:
        for segment in self.segments:
            position = 0
            for item in segment.batches:
                if item.last >= offset:
                    return segment.base, position
                position += len(item.data)
        return None

    def offset_for_time(self, timestamp: int) -> int | None:
        rows = (r for s in self.segments for item in s.batches for r in item.rows)
        return next((row.offset for row in rows if row.timestamp >= timestamp), None)

    def ever(self) -> dict[int, set[Row]]:
        found: dict[int, set[Row]] = {}
        for segment in (*self.segments, *self.shadow):
            for item in segment.batches:
                for row in item.rows:
                    found.setdefault(row.offset, set()).add(row)
        return found


# --- batches -------------------------------------------------------------------------------------


def stored(
    rows: Sequence[Row],
    *,
    base: int | None = None,
    last: int | None = None,
    codec: int = NONE,
    attributes: int = 0,
    producer: tuple[int, int, int] = (-1, -1, -1),
    epoch: int = 0,
    horizon: int | None = None,
    committed: bool = True,
) -> Stored:
    base = rows[0].offset if base is None else base
    last = rows[-1].offset if last is None else last
    builder = BatchBuilder(
        base_offset=base,
        last_offset=last,
        codec=codec,
        attributes=attributes,
        horizon=horizon,
        leader_epoch=epoch,
        producer=producer,
    )
    for row in rows:
        headers = [(name.encode(), content) for name, content in row.headers]
        builder.add(*row[2:4], timestamp=row.timestamp, offset=row.offset, headers=headers)
    built = builder.build()
    is_control = bool(attributes & CONTROL)
    is_transactional = bool(attributes & TRANSACTIONAL)
    kind = (is_control, is_transactional, committed, producer[2])
    return Stored(base, last, built.data, list(rows), built.max_timestamp, producer[0], *kind)


def marker(offset: int, kind: int, producer_id: int) -> Stored:
    row = Row(offset, 1000 + offset, *end_marker(kind, 4))
    bits = TRANSACTIONAL | CONTROL
    return stored([row], attributes=bits, producer=(producer_id, 1, -1))


def some(
    first: int, count: int, *, step: int = 1, keys: int = 5, size: int = 12, tombstone: bool = False
) -> list[Row]:
    return [
        Row(
            offset,
            1000 + offset,
            b"k%d" % (offset % keys),
            None if tombstone and offset == first else b"%d:" % offset + b"v" * size,
            (("h", b"%d" % offset), ("none", None)) if offset % 3 == 0 else (),
        )
        for offset in range(first, first + count * step, step)
    ]


def varied() -> Log:
    """Cleaned batches with gaps, then all codecs, then transactions, one of them open."""
    tx = {"attributes": TRANSACTIONAL}
    cleaned = [
        stored(some(0, 2, step=3, tombstone=True), last=8, horizon=90_000_000),
        stored([], base=9, last=11, producer=(70, 1, 4)),
        stored(some(14, 3, step=2), last=19, codec=GZIP),
        *[stored(some(20 + i * 4, 4, size=60), codec=i) for i in (NONE, SNAPPY, LZ4, ZSTD)],
    ]
    middle = [
        stored(some(40, 2), producer=(7, 1, 0), committed=False, **tx),
        stored(some(42, 2), producer=(8, 1, 0), **tx),
        marker(44, COMMIT, 8),
        stored(some(45, 2), producer=(8, 1, 2), **tx),
        marker(47, ABORT, 7),
        stored(some(48, 2), producer=(7, 1, 2), codec=ZSTD, **tx),
        marker(50, COMMIT, 7),
        stored(some(51, 2), producer=(7, 1, 4), codec=LZ4, committed=False, **tx),
        marker(53, COMMIT, 8),
    ]
    active = [
        stored(some(60, 2), producer=(7, 1, 6), epoch=2, committed=False, **tx),
        marker(62, ABORT, 7),
        stored(some(63, 3), producer=(9, 1, 0), epoch=2),
        stored(some(66, 2), producer=(8, 1, 4), epoch=2, codec=SNAPPY, **tx),
        stored(some(68, 2), producer=(7, 1, 8), epoch=2, **tx),
        marker(70, COMMIT, 8),
        stored(some(71, 2), epoch=2, codec=GZIP),
    ]
    segments = [
        Segment(log_name(0), 0, cleaned),
        Segment(log_name(40), 40, middle, [(7, 40, 47, 48)]),
        Segment(log_name(60), 60, active, [(7, 51, 62, 63)]),
    ]
    return Log("t", 0, segments, stable=68, config={"cleanup.policy": "compact"})


def legacy() -> Log:
    """Messages v0 and v1, plain and compressed."""

    def message(offset: int, magic: int) -> Stored:
        time = 1000 + offset if magic else -1
        row = Row(offset, time, b"k%d" % (offset % 3), b"%d" % offset)
        data = message_builder.message(magic, offset, row.key, row.value, timestamp=time)
        return Stored(offset, offset, data, [row], time)

    def wrapper(first: int, count: int, magic: int, codec: int) -> Stored:
        rows = [
            Row(n, 1000 + n if magic else -1, b"k%d" % (n % 3), b"%d" % n)
            for n in range(first, first + count)
        ]
        inner = [Record(*row[:4]) for row in rows]
        data = message_builder.wrapper(magic, codec, inner)
        return Stored(first, first + count - 1, data, rows, rows[-1].timestamp)

    first = [message(0, 0), message(1, 0), wrapper(2, 3, 0, GZIP), wrapper(5, 2, 0, LZ4)]
    second = [message(7, 1), wrapper(8, 3, 1, SNAPPY), wrapper(11, 2, 1, LZ4), message(13, 1)]
    segments = [Segment(log_name(0), 0, first), Segment(log_name(7), 7, second)]
    return Log("old", 0, segments, listed_from=14)


def mirrored() -> Log:
    """Raw appends with gaps: at the beginning, between batches, at a segment's end, in the last."""
    first = [stored(some(16, 4)), stored(some(20, 2)), stored(some(32, 4)), stored(some(40, 8))]
    second = [stored(some(64, 4)), stored(some(68, 4))]
    active = [stored(some(72, 8)), stored(some(96, 4)), stored(some(100, 4))]
    segments = [
        Segment(log_name(base), base, items)
        for base, items in ((0, first), (64, second), (72, active))
    ]
    gaps = [(0, 16), (22, 32), (36, 40), (48, 64), (80, 96)]
    return Log("raw", 0, segments, raw_gaps=gaps)


def swapping() -> Log:
    """Half a swap: what replaces two segments is in place, and they are not away yet."""
    aborted = [(7, 12, 14, 15)]
    cleaned = [
        stored(some(2, 3, step=3), base=0, last=9),
        marker(14, ABORT, 7),
        stored(some(15, 3, step=2), last=19),
    ]
    shadow = [
        Segment(log_name(0), 0, [stored(some(0, 5)), stored(some(5, 5))]),
        Segment(
            log_name(10), 10, [stored(some(10, 2)), *_aborted(12), stored(some(15, 5))], aborted
        ),
    ]
    segments = [
        Segment(log_name(0) + ".swap", 0, cleaned, aborted),
        Segment(log_name(20), 20, [stored(some(20, 3)), stored(some(23, 3))]),
    ]
    return Log("swap", 0, segments, shadow=shadow, config={"cleanup.policy": "compact"})


def cleaning() -> Log:
    """A cleaner died before its first rename: what it wrote is no part of the log."""
    aborted = [(7, 0, 2, 3)]
    segments = [
        Segment(log_name(0), 0, [*_aborted(0), stored(some(3, 3))], aborted),
        Segment(log_name(6), 6, [stored(some(6, 4))]),
        Segment(log_name(10), 10, [stored(some(10, 4))]),
    ]
    left = [marker(2, ABORT, 7), stored(some(5, 1), base=3, last=5)]
    shadow = [Segment(log_name(0) + ".cleaned", 0, left, aborted)]
    return Log("swap", 1, segments, shadow=shadow)


def _aborted(base: int) -> list[Stored]:
    """Two records and the marker that takes them back."""
    rows = stored(some(base, 2), producer=(7, 1, 0), committed=False, attributes=TRANSACTIONAL)
    return [rows, marker(base + 2, ABORT, 7)]


def log_name(base: int) -> str:
    return f"{base:020d}.log"


# --- the root ------------------------------------------------------------------------------------


class Root:
    """The root's directory, with the logs that are in it."""

    def __init__(self, path: Path, logs: Sequence[Log] | None = None) -> None:
        self.path = path
        if logs is None:
            logs = (varied(), legacy(), mirrored(), swapping(), cleaning())
        self.logs = {log.name: log for log in logs}
        # A journal of 8 KiB, so that a copy of the root costs little.
        with mock.patch.object(layout, "JOURNAL_SIZE", 8 << 10):
            engine = DirectoryLog(path)
            for log in self.logs.values():
                if log.partition == 0:
                    count = sum(other.topic == log.topic for other in self.logs.values())
                    engine.create_topic(log.topic, count, log.config, now_ms=NOW_MS)
            for log in self.logs.values():
                self._write(engine, log)
            engine.close()

    def _write(self, engine: DirectoryLog, log: Log) -> None:
        directory = self.path / log.name
        for segment in (*log.segments, *log.shadow):
            stage = Path(segment.name).suffix.replace(".log", "")
            (directory / segment.name).write_bytes(segment.data)
            for suffix, data in indexes(segment).items():
                (directory / f"{segment.base:020d}{suffix}{stage}").write_bytes(data)
        for name, data in gap_lists(log).items():
            (directory / name).write_bytes(data)
        active = log.segments[-1]
        for offset in (active.base, log.end):
            (directory / f"{offset:020d}.snapshot").write_bytes(log.snapshot(offset))
        (directory / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n2 60\n")
        (directory / f"{99:020d}.log.deleted").write_bytes(b"anything")
        horizon = {"version": 1, "first_dirty_offset": 0, "earliest_delete_horizon_ms": 5}
        (directory / "kl-delete-horizon").write_text(json.dumps(horizon) + "\n")
        if log.topic == "swap":
            mark = {"version": 1, "reason": "why", "failures": 1, "since_ms": 1, "retry_at_ms": 2}
            (directory / "kl-uncleanable").write_text(json.dumps({**mark, "config": {}}) + "\n")
        with engine.transaction() as transaction:
            transaction.change_partition(
                log.topic,
                log.partition,
                high_watermark=log.end,
                last_stable_offset=log.last_stable_offset,
                active_base=active.base,
                active_size=len(active.data),
                leader_epoch=2,
                producer_snapshot=log.end,
                listed_from=log.listed_from,
            )
            transaction.publish(NOW_MS)

    def give_to_a_broker(self) -> None:
        """Make it a directory of a broker that was killed, with all but active segments synced."""
        for name in self.files():
            if name.name.startswith("kl-") or name.name == "commit":
                (self.path / name).unlink()
        (self.path / "meta.properties").write_text(
            "version=1\ncluster.id=c\nnode.id=1\ndirectory.id=AAAAAAAAAAAAAAAAAAAAAA\n"
        )
        points = [
            f"{log.topic} {log.partition} {log.segments[-1].base}" for log in self.logs.values()
        ]
        text = "\n".join(["0", str(len(points)), *points, ""])
        for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
            (self.path / name).write_text(text)

    def files(self) -> list[Path]:
        """Every file, relative to the root."""
        found = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return sorted(found)

    def copy(self, target: Path) -> Path:
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(self.path, target, symlinks=True))


def gap_lists(log: Log) -> dict[str, bytes]:
    """What is listed of the gaps of a log, of every file that is or may be a segment."""
    if log.raw_gaps:
        return {"kl-raw-gaps": gap_list([(0, -1, log.raw_gaps)])}
    if not log.is_compacted:
        return {}
    sections = []
    for segments in (log.shadow, log.segments[:-1]):
        # What follows the last shadow is the first segment that is not its replacement.
        following = [*(s.base for s in segments[1:]), log.segments[-1].base]
        for segment, end in zip(segments, following, strict=False):
            ranges = [(item.base, item.last) for item in segment.batches]
            sections.append((segment.base, len(segment.data), gaps_of(segment.base, ranges, end)))
    return {"kl-gaps": gap_list(sections)}


def indexes(segment: Segment) -> dict[str, bytes]:
    """An entry of both indexes for every second batch, and the aborted transactions."""
    offsets = times = b""
    position, largest, largest_at = 0, -1, segment.base
    for place, item in enumerate(segment.batches):
        if item.max_timestamp > largest:
            largest, largest_at = item.max_timestamp, item.last
        if place % 2:
            offsets += struct.pack(">ii", item.last - segment.base, position)
            if largest > -1:
                times += struct.pack(">qi", largest, largest_at - segment.base)
        position += len(item.data)
    found = {".index": offsets, ".timeindex": times}
    if segment.aborted:
        found[".txnindex"] = b"".join(aborted_entry(*one) for one in segment.aborted)
    return found
