"""What is written to a log that is killed or cut, and what must be found in it afterwards.

Everything follows from a seed and the numbers of steps: who knows the seed knows what step 17
writes where, so all that is noted of a step is that it was sent and that it was acknowledged.
Steps come one after the other from one writer, and a commit that did not land takes no offsets:
so a log holds exactly the first n steps, each record at the one offset it can have, and n lies
between the last acknowledged step and the last one sent. `Model` says which n that is, and raises
`Wrong` for anything else: a step that is half there, there twice, or missing.

The notes are entries of a file outside the log, appended by single writes: they survive whoever
wrote them, and are in the order in which they were written.
"""

from __future__ import annotations

import os
import random
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot
from kafkalog.storage_engine.records.murmur2 import partition_of

TABLE, EVENTS = "table", "events"
RETAINED: Final = 6_000
"""Bytes of `EVENTS` that retention leaves, at least, once it has taken something."""
PARTITIONS: Final[Mapping[str, int]] = {TABLE: 3, EVENTS: 2}
CONFIGS: Final[Mapping[str, Mapping[str, str]]] = {
    TABLE: {
        "cleanup.policy": "compact",
        "segment.bytes": "20000",
        "min.cleanable.dirty.ratio": "0.01",
        # Tombstones and replaced files go within the life of a log, not within a day.
        "delete.retention.ms": "300",
        "file.delete.delay.ms": "100",
    },
    EVENTS: {
        "cleanup.policy": "delete",
        "segment.bytes": "2500",
        "retention.bytes": str(RETAINED),
        "retention.ms": "-1",
        "file.delete.delay.ms": "100",
    },
}
CODECS: Final = ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
KEYS: Final = 40
"""Of each partition."""
STEPS_AHEAD: Final = 2_000
"""A log that claims to be longer than this is wrong, and no reason to go on counting."""

Partition = tuple[str, int]
Record = tuple[bytes, bytes | None]
Row = tuple[str, bytes, bytes | None]
"""Topic, key, value."""


class Wrong(Exception):
    """A log is not what it must be."""


# --- notes ---------------------------------------------------------------------------------------

SENT, ACKNOWLEDGED, FORKED = b"s", b"a", b"f"
WRITTEN, FLUSHED = b"w", b"c"
_ENTRY: Final = struct.Struct("<cQI")  # kind, number, bytes of data that follow


class Note(NamedTuple):
    """What happened: a step was sent, a device written to."""

    kind: bytes
    number: int
    data: bytes


class Notes:
    """A file of notes, which any number of processes append to; reads what is new at each call."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._position = 0

    def write(self, kind: bytes, number: int, data: bytes | memoryview = b"") -> None:
        """Append a note; it is there for all others when this returns."""
        os.writev(self._fd, (_ENTRY.pack(kind, number, len(data)), data))

    def read(self) -> Iterator[Note]:
        """Yield the notes that were not yielded yet."""
        while len(head := os.pread(self._fd, _ENTRY.size, self._position)) == _ENTRY.size:
            kind, number, size = _ENTRY.unpack(head)
            data = os.pread(self._fd, size, self._position + _ENTRY.size)
            if len(data) < size:  # it is being written
                return
            self._position += _ENTRY.size + size
            yield Note(kind, number, data)

    def close(self) -> None:
        os.close(self._fd)


class Progress:
    """The last step that was sent, and the last one acknowledged."""

    def __init__(self, sent: int = 0, acknowledged: int = 0) -> None:
        self.sent = sent
        self.acknowledged = acknowledged
        self.forked: list[int] = []
        """Process ids of children that somebody left behind."""

    def take(self, notes: Iterable[Note]) -> None:
        for note in notes:
            if note.kind == SENT:
                self.sent = max(self.sent, note.number)
            elif note.kind == ACKNOWLEDGED:
                self.acknowledged = max(self.acknowledged, note.number)
            elif note.kind == FORKED:
                self.forked.append(note.number)


# --- steps ---------------------------------------------------------------------------------------

APPEND, COMMIT, ALTER = "append", "commit", "alter"
WRITER_ID: Final = "writer"


@dataclass(frozen=True, slots=True)
class Step:
    """One atomic change: an append, a commit of what tasks staged, or another config."""

    number: int
    kind: str
    tasks: tuple[tuple[Row, ...], ...] = ()
    """Rows of each task; an append has one task and one topic."""
    topic: str = ""
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def writer(self) -> Writer:
        """Who commits it, so that a retry is known as one."""
        return Writer(WRITER_ID, "*", self.number)


def _keys() -> dict[Partition, list[bytes]]:
    """Draw up the keys of each partition, by Kafka's default partitioner."""
    found: dict[Partition, list[bytes]] = {
        (topic, number): [] for topic, count in PARTITIONS.items() for number in range(count)
    }
    for (topic, number), keys in found.items():
        candidates = (b"key-%d" % n for n in range(100_000))
        mine = (key for key in candidates if partition_of(key, PARTITIONS[topic]) == number)
        keys.extend(next(mine) for _ in range(KEYS))
    return found


_KEYS = _keys()


def step_of(seed: str, number: int) -> Step:
    """Draw a step: many are small, one in twelve brings segments of its own."""
    draw = random.Random(f"{seed} step {number}")
    kind = draw.choices((APPEND, COMMIT, ALTER, "large"), (50, 35, 5, 8))[0]
    if kind == ALTER:
        topic = draw.choice((TABLE, EVENTS))
        return Step(number, ALTER, (), topic, {"compression.type": draw.choice(CODECS)})
    if kind == "large":
        row_count = draw.randrange(60, 200)
        keys = _KEYS[TABLE, draw.randrange(PARTITIONS[TABLE])]
        rows: list[Row] = [
            (TABLE, draw.choice(keys), draw.randbytes(300)) for _ in range(row_count)
        ]
        more = [_row(draw, number, n, EVENTS) for n in range(draw.randrange(4))]
        return Step(number, COMMIT, ((*more, *rows),))
    if kind == APPEND:
        topic = draw.choice((TABLE, TABLE, EVENTS))
        rows = [_row(draw, number, n, topic) for n in range(draw.randrange(1, 9))]
        return Step(number, APPEND, (tuple(rows),), topic)
    tasks = []
    for task in range(draw.randrange(1, 4)):
        count = draw.randrange(1, 25)
        topics = draw.choices((TABLE, EVENTS), (2, 1), k=count)
        tasks.append(tuple(_row(draw, number, 100 * task + n, t) for n, t in enumerate(topics)))
    return Step(number, COMMIT, tuple(tasks))


def _row(draw: random.Random, step: int, number: int, topic: str) -> Row:
    key = draw.choice(_KEYS[topic, draw.randrange(PARTITIONS[topic])])
    if topic == TABLE and draw.random() < 0.12:
        return topic, key, None
    return topic, key, b"%d-%d " % (step, number) * draw.randrange(1, 20)


# --- what a log must hold ------------------------------------------------------------------------


class Model:
    """What the first n steps of a seed make of a log, for every n that was asked for."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.records: dict[Partition, list[Record]] = {
            (topic, number): [] for topic, count in PARTITIONS.items() for number in range(count)
        }
        self.steps = 0
        self._ends: dict[Partition, list[int]] = {each: [0] for each in self.records}
        self._totals = [0]
        self._configs: list[dict[str, str]] = [dict.fromkeys(PARTITIONS, "")]
        self._batches = [-1]
        self._latest: dict[Partition, tuple[int, dict[bytes, int]]] = {}

    def extend(self, steps: int) -> None:
        """Know so many steps at least."""
        while self.steps < steps:
            self.steps += 1
            step = step_of(self.seed, self.steps)
            for topic, key, value in (row for rows in step.tasks for row in rows):
                partition = topic, partition_of(key, PARTITIONS[topic])
                self.records[partition].append((key, value))
            for each, ends in self._ends.items():
                ends.append(len(self.records[each]))
            self._totals.append(sum(map(len, self.records.values())))
            config = {step.topic: step.config["compression.type"]} if step.config else {}
            self._configs.append({**self._configs[-1], **config})
            self._batches.append(step.number if step.kind == COMMIT else self._batches[-1])

    def offsets(self, step: int) -> dict[Partition, tuple[int, int]]:
        """Return which offsets a step has been given where it wrote something."""
        self.extend(step)
        ranges = {each: (ends[step - 1], ends[step]) for each, ends in self._ends.items()}
        return {each: (first, end) for each, (first, end) in ranges.items() if first < end}

    def steps_in(self, state: State, least: int, most: int) -> int:
        """Return how many steps a state of the journal holds; raises Wrong if it is none of these.

        Where that is not told apart, since a step changed nothing, the largest number.
        """
        self.extend(most)
        found = {
            (topic, number): state.topic(topic).partitions[number].high_watermark
            for topic, number in self.records
        }
        known = state.writers.get(Writer(WRITER_ID, "*", 0).name)
        batch = -1 if known is None else known.batch_id
        config = {t: state.topic(t).config.get("compression.type", "") for t in PARTITIONS}
        for step in range(most, least - 1, -1):
            expected = {each: ends[step] for each, ends in self._ends.items()}
            if (expected, self._batches[step], self._configs[step]) == (found, batch, config):
                return step
        ranges = {each: (ends[least], ends[most]) for each, ends in self._ends.items()}
        raise Wrong(
            f"expected the state after one of the steps {least} to {most}: high watermarks "
            f"{ranges}, last batch {self._batches[least]} to {self._batches[most]}, codecs "
            f"{self._configs[least]} to {self._configs[most]}; found {found}, {batch}, {config}"
        )

    def steps_like(self, state: State, least: int) -> int:
        """The same for who does not know what was sent: as many as there are records."""
        total = sum(p.high_watermark for topic in PARTITIONS for p in state.topic(topic).partitions)
        while self._totals[-1] <= total and self.steps < least + STEPS_AHEAD:
            self.extend(self.steps + 1)
        return self.steps_in(state, least, max(least, bisect_right(self._totals, total) - 1))

    def latest_records(self, partition: Partition, end: int) -> dict[bytes, int]:
        """Return the offset of each key's latest record below `end`."""
        known, found = self._latest.get(partition, (0, {}))
        if known > end:
            known, found = 0, {}
        records = self.records[partition]
        found.update((records[offset][0], offset) for offset in range(known, end))
        self._latest[partition] = end, found
        return found

    def extend_to(self, partition: Partition, end: int) -> None:
        """Know the records below an offset; raises Wrong for one that nobody can have written."""
        limit = self.steps + STEPS_AHEAD
        while len(self.records[partition]) < end:
            if self.steps == limit:
                raise Wrong(f"{partition}: a high watermark of {end} was never sent")
            self.extend(self.steps + 1)

    # --- comparing -------------------------------------------------------------------------------

    def check(self, log: DirectoryLog, partitions: Iterable[Partition] | None = None) -> None:
        """Read a log, or some of it; raises Wrong for what is lost, doubled, or was never sent."""
        for partition in self.records if partitions is None else partitions:
            directory = log.partition_directory(*partition)
            if (mark := read_uncleanable(DirectoryNotes(directory))) is not None:
                raise Wrong(f"{partition} was marked uncleanable: {mark}")
            with log.snapshot(*partition, whole=True) as snapshot:
                self.check_snapshot(snapshot)

    def check_snapshot(self, snapshot: DirectorySnapshot) -> None:
        """The same of one partition at one moment."""
        partition, state = (snapshot.topic, snapshot.partition), snapshot.state
        start, end = state.log_start_offset, state.high_watermark
        self.extend_to(partition, end)
        records = self.records[partition]
        found = rows_of(snapshot.read(start, end, schema=changelog_schema()))
        offsets = [offset for offset, _ in found]
        if offsets != sorted(set(offsets)) or (
            offsets and not start <= offsets[0] <= offsets[-1] < end
        ):
            raise Wrong(f"{partition}: offsets out of order, or not in [{start}, {end}): {offsets}")
        for offset, record in found:
            if records[offset] != record:
                expected = records[offset]
                raise Wrong(f"{partition}: expected {expected} at offset {offset}, found {record}")
        whole_from = max(start, state.first_dirty_offset, state.cleaning_offset)
        if snapshot.topic == EVENTS:
            whole_from = start
        missing = set(range(whole_from, end)) - set(offsets)
        if missing:
            raise Wrong(f"{partition}: lost of [{whole_from}, {end}): {sorted(missing)}")
        if start:
            _check_start(snapshot)
        if snapshot.topic == TABLE:
            self._check_latest(snapshot, dict(found))

    def _check_latest(self, snapshot: DirectorySnapshot, found: Mapping[int, Record]) -> None:
        """Nothing that is the latest of its key is gone, and a cleaned part has keys once."""
        partition, end = (snapshot.topic, snapshot.partition), snapshot.state.high_watermark
        records = self.records[partition]
        latest_records = self.latest_records(partition, end)
        values = {o: records[o] for o in latest_records.values() if records[o][1] is not None}
        lost = values.keys() - found.keys()
        if lost:
            raise Wrong(f"{partition}: the latest of their keys are lost: {sorted(lost)} of {end}")
        budget = 1 << 20
        seen = dict(rows_of(latest(snapshot, end, budget_bytes=budget, schema=changelog_schema())))
        if seen != values:
            raise Wrong(f"{partition}: expected as latest {sorted(values)}, found {sorted(seen)}")
        clean = [records[o][0] for o in found if o < snapshot.state.first_dirty_offset]
        if len(clean) != len(set(clean)):
            raise Wrong(
                f"{partition}: keys twice below {snapshot.state.first_dirty_offset}: {clean}"
            )


def _check_start(snapshot: DirectorySnapshot) -> None:
    """Only retention moves a log's start, by whole segments, and it leaves what it has to."""
    start, partition = snapshot.state.log_start_offset, (snapshot.topic, snapshot.partition)
    if snapshot.topic != EVENTS:
        raise Wrong(f"{partition}: begins at {start}, and nothing may take away what was before")
    active = snapshot.state.active_base, snapshot.state.active_size
    sizes = {segment.base_offset: segment.size for segment in snapshot.segments} | dict([active])
    left = sum(size for base, size in sizes.items() if base >= start)
    if start not in sizes or left < RETAINED:
        raise Wrong(
            f"{partition}: begins at {start} with {left} bytes, which is not what retention leaves:"
            f" whole segments of {sizes}, and no less than {RETAINED} bytes"
        )


def rows_of(batches: Iterable[Any]) -> list[tuple[int, Record]]:
    """Return offset, key and value of each row."""
    found: list[tuple[int, Record]] = []
    for rows in batches:
        offsets, keys, values = (rows[name].to_pylist() for name in ("offset", "key", "value"))
        found += zip(offsets, zip(keys, values, strict=True), strict=True)
    return found
