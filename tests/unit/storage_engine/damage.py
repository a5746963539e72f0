"""What damage makes of a root: read in every way there is, written to, and judged.

An outcome that is not allowed is a fault.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import kafkalog
from kafkalog.cleaner.key_index.key_lookup import KeyLookup, Record
from kafkalog.errors import KafkaLogError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.transactions.transaction_markers import known_markers
from tests.unit.storage_engine.sample_root import NOW_MS, Log, Root, Row, Stored
from tests.unit.storage_engine.times import offset_since

SCHEMA = changelog_schema(include_headers=True)
BITS = (0x01, 0x80)
"""What is flipped in a byte where not every bit is."""

# --- judging a damaged one -----------------------------------------------------------------------


class Hung(BaseException):
    """Reading did not come to an end."""


@dataclass
class Judge:
    """Puts damage into a root and counts what becomes of it; what is not allowed is a fault.

    `whole`: everything reads as before. `refused`: a typed error, and what lies below the damage
    can be read. Where a broker wrote the log, and so nobody has listed its gaps, there are two
    more, as in Kafka. `short`: the log reads as if it ended, or had a gap, at the damage.
    `shifted`: the base offset of a batch, which no checksum covers, points into a gap of the log
    beside it.
    """

    root: Root
    scratch: Path
    is_listed: bool = True
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def files(self) -> list[Path]:
        """The files to be damaged."""
        return self.root.files()

    def judge(self, name: Path, data: bytes | None, position: int, *, write: bool) -> str:
        """Judge one file with other content (None: missing), damaged from byte `position` on."""
        path = self.root.path / name
        before = path.read_bytes()
        replace(path, data)
        try:
            with deadline():
                outcome = self._read(name, position)
                if write:
                    self._write(name, position)
        except (Exception, Hung) as fault:
            text = f"{type(fault).__name__}: {fault}"
            size = "missing" if data is None else f"{len(data)} of {len(before)} bytes"
            self.faults.append(f"{name} damaged at byte {position} ({size}): {text}")
            outcome = "WRONG"
        finally:
            replace(path, before)
        self.outcomes[kind_of(name), outcome] += 1
        return outcome

    def _logs(self, name: Path) -> list[Log]:
        log = self.root.logs.get(name.parts[0])
        return [log] if log else list(self.root.logs.values())

    def _read(self, name: Path, position: int) -> str:
        known_markers.clear()  # of the whole log, they would make up for what is damaged
        try:
            engine = kafkalog.open(self.root.path, read_only=True, create=False)
            directory_log_of(engine).state()
        except KafkaLogError:
            return "refused"
        found = {"whole"}
        for log in self._logs(name):
            damage = Damage.of(log, name, position, is_listed=self.is_listed)
            for committed in (True, False):
                found.add(check_read(directory_log_of(engine), log, damage, committed=committed))
            found.add(check_lookups(directory_log_of(engine), log, damage))
        try:
            statuses = engine.status(now_ms=NOW_MS)
            assert len(statuses) == len(self.root.logs), statuses
        except KafkaLogError:
            found.add("refused")
        return next(word for word in ("shifted", "short", "refused", "whole") if word in found)

    def _write(self, name: Path, position: int) -> None:
        """Clean, and append, on a copy; what was to be read, and is not obsolete, stays."""
        log = self._logs(name)[-1]
        damage = Damage.of(log, name, position, is_listed=self.is_listed)
        path = self.root.copy(self.scratch)
        try:
            engine = kafkalog.open(path, create=False)
        except KafkaLogError:
            return
        try:
            before: list[Row] | None = read(directory_log_of(engine), log, committed=False)
        except KafkaLogError:
            before = None
        whole = log.rows(committed=False) if before is None else before
        wanted = {row.key: row for row in whole}
        kept = [row for row in wanted.values() if row.offset < damage.offset or before is not None]
        if log.is_compacted:
            with contextlib.suppress(KafkaLogError):
                engine.clean(log.topic, force=True, now_ms=NOW_MS)
            check_kept(directory_log_of(engine), log, damage, kept)
        new = {"key": [b"new"], "value": [b"v"], "timestamp": [None], "partition": [log.partition]}
        types = [pa.binary(), pa.binary(), pa.timestamp("ms"), pa.int32()]
        columns = [pa.array(v, t) for v, t in zip(new.values(), types, strict=True)]
        try:
            engine.append(log.topic, pa.table(columns, names=list(new)), now_ms=NOW_MS)
        except KafkaLogError:
            pass
        else:
            kept.append(Row(log.end, NOW_MS, b"new", b"v"))
        check_kept(directory_log_of(engine), log, damage, kept)


@dataclass
class BrokerJudge(Judge):
    """The same for a directory of a broker: writing is to adopt it, to append and to read again."""

    is_listed: bool = False

    def _write(self, name: Path, position: int) -> None:
        path = self.root.copy(self.scratch)
        try:
            adopt(path, config={"*": {"cleanup.policy": "delete"}}, now_ms=NOW_MS)
            engine = kafkalog.open(path, create=False)
        except KafkaLogError:
            return
        for log in self._logs(name):
            damage = Damage.of(log, name, position, is_listed=False)
            for committed in (True, False):
                check_read(directory_log_of(engine), log, damage, committed=committed)
            end = engine.offsets(log.topic)[log.partition][1]
            rows = {"key": [b"new"], "value": [b"v"], "partition": [log.partition]}
            engine.append(log.topic, pa.table(rows), now_ms=NOW_MS)
            new = [
                (row.offset, row.key)
                for row in read(directory_log_of(engine), log, committed=False, start=end)
            ]
            assert new == [(end, b"new")], f"appended at {end}, read {new}"


@dataclass(frozen=True)
class Damage:
    """Where damage lies: the end of the last batch before it, and the batch it is in.

    The batch is told only where the damage is in its base offset, which no checksum covers.
    """

    offset: int
    batch: Stored | None = None
    is_in_log: bool = False
    is_listed: bool = True
    """The gaps of the log are listed there, so no damage of it may be passed over."""
    sound_from: int | None = None
    """Where the next segment begins, which no damage of a batch in half a swap takes along."""

    @classmethod
    def of(cls, log: Log, name: Path, position: int, *, is_listed: bool) -> Damage:
        is_listed = is_listed and log.listed_from == 0
        offset, before, has_room = log.start, 0, False
        for segment in (*log.segments, *log.shadow):
            for item in segment.batches:
                if name.parts == (log.name, segment.name) and position < len(item.data):
                    moved = item if position < 8 else None
                    # The batch before is doubted as well where the damaged one overlaps it, and it
                    # may be the one that is moved: how many messages a wrapper has is not known
                    # unless it is decompressed, and others may lie in a gap that is not listed.
                    is_doubted = log.topic == "old" or (has_room and not is_listed)
                    offset = before if moved and is_doubted else offset
                    above = [other.base for other in log.segments if other.base > segment.base]
                    is_amid = name.suffix == layout.SWAP and item is not segment.batches[-1]
                    sound = above[0] if is_amid else None
                    return cls(offset, moved, True, is_listed, sound)
                position -= len(item.data) if name.parts == (log.name, segment.name) else 0
                has_room = item.base > offset
                offset, before = item.last + 1, offset
        return cls(log.start, is_listed=is_listed)

    @property
    def may_be_short(self) -> bool:
        """Whether the log may read as if it ended, or had a gap, at the damage."""
        return self.is_in_log and not self.is_listed

    def times(self, log: Log, timestamp: int) -> set[int | None]:
        """What may be told of a time: where half a swap is damaged, also what it replaces."""
        shadow = log.shadow if self.is_in_log else ()
        older = (row for segment in shadow for item in segment.batches for row in item.rows)
        offsets = {row.offset for row in older if row.timestamp >= timestamp}
        return {log.offset_for_time(timestamp), *offsets}


def places(root: Path, name: Path) -> range:
    """The bytes of a file that mean something."""
    data = (root / name).read_bytes()
    if name.name not in {layout.COMMIT, layout.COMMIT_RELEASED}:
        return range(len(data))
    return range(min(len(data), len(data.rstrip(b"\0")) + 40))


def cases(judge: Judge, writes: int, step: int) -> Iterator[tuple[Path, bytes, int, bool]]:
    """Yield (file, content, place, whether to write) of every `step`-th place."""
    number = 0
    for name in judge.files():
        data = (judge.root.path / name).read_bytes()
        for place in places(judge.root.path, name):
            number += 1
            if number % step == 0:
                yield name, data, place, number // step % writes == 0


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= bit
    return bytes(changed)


def outcome_lines(outcomes: Counter[tuple[str, str]]) -> Iterator[str]:
    """A table: by kinds of files, how often each outcome came."""
    kinds = sorted({kind for kind, _ in outcomes})
    words = ("WRONG", "whole", "refused", "short", "shifted")
    yield f"{'damaged':36}" + "".join(f"{word:>10}" for word in words)
    for kind in kinds:
        yield f"{kind:36}" + "".join(f"{outcomes[kind, word]:10}" for word in words)


def kind_of(name: Path) -> str:
    """`.log`, `.index.swap`, `commit`, `kl-pin-`: what kind of file a name is of."""
    stem, dot, rest = name.name.partition(".")
    if name.parts[0] == layout.METADATA_DIRECTORY:
        return f"{layout.METADATA_DIRECTORY} {dot}{rest}"
    if stem.isdigit() or layout.parse_staged(name.name) or dot + rest == layout.KEYS:
        return dot + rest
    return layout.PIN if stem.startswith(layout.PIN) else name.name


def replace(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


@contextlib.contextmanager
def deadline(seconds: float = 120.0) -> Iterator[None]:
    def hung(*_: object) -> None:
        raise Hung(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_read(engine: DirectoryLog, log: Log, damage: Damage, *, committed: bool) -> str:
    wanted = log.rows(committed=committed)
    allowed = set(wanted)
    for segment in log.shadow:
        allowed.update(row for item in segment.batches for row in item.rows)
    try:
        rows = read(engine, log, committed=committed)
    except KafkaLogError:
        if damage.is_in_log:
            end = log.stable_below(damage.offset) if committed else damage.offset
            below = read(engine, log, committed=committed, end=end)
            expected = [row for row in wanted if row.offset < end]
            assert below == expected, f"below {end}: {below} instead of {expected}"
        return "refused"
    finally:
        if damage.sound_from is not None:
            start = damage.sound_from
            above = read(engine, log, committed=committed, start=start)
            expected = [row for row in wanted if row.offset >= start]
            assert above == expected, f"from {start} on: {above} instead of {expected}"
    offsets = [row.offset for row in rows]
    assert offsets == sorted(set(offsets)), f"offsets {offsets}"
    wrong = [row for row in rows if row not in allowed]
    if wrong:
        assert damage.batch is not None and not damage.is_listed, f"wrong records {wrong}"
        contents = {row[1:] for row in damage.batch.rows}
        assert all(row[1:] in contents for row in wrong), f"wrong records {wrong}"
        return "shifted"
    missing = [row for row in wanted if row not in set(rows)]
    if not missing:
        return "whole"
    assert damage.is_in_log and not damage.is_listed, f"lost records {missing}"
    end = log.stable_below(damage.offset) if committed else damage.offset
    assert missing[0].offset >= end, f"lost below {end}: {missing}"
    return "short"


def check_lookups(engine: DirectoryLog, log: Log, damage: Damage) -> str:
    """Times and keys are found where they are; positions too, as long as the log is sound."""
    found = {"whole"}
    try:
        with engine.snapshot(log.topic, log.partition) as snapshot:
            for item in (item for segment in log.segments for item in segment.batches):
                place = snapshot.position_of(item.last)
                at = None if place is None else (place[0].base_offset, place[1])
                assert damage.is_in_log or at == log.position_of(item.last), f"{item.last} at {at}"
                if item.rows:
                    time = item.rows[-1].timestamp
                    offset = offset_since(snapshot, time)
                    is_right = damage.may_be_short or offset in damage.times(log, time)
                    assert is_right, f"time {time} at {offset}"
    except KafkaLogError:
        found.add("refused")
    found.update(check_keys(engine, log, damage))
    return "refused" if "refused" in found else "whole"


def check_keys(engine: DirectoryLog, log: Log, damage: Damage) -> Iterator[str]:
    """Each key has its latest record, or an error; only where gaps are unlisted an older one."""
    rows = log.rows(committed=True)
    latest = {row.key: row for row in rows if row.key is not None}
    contents = {row[1:] for row in rows}
    with KeyLookup(engine, log.topic) as lookup:
        for key in (*latest, b"nobody's"):
            try:
                record = lookup.get(key, partition=log.partition)
            except KafkaLogError:
                yield "refused"
                continue
            found = None if record is None else _row_of(record)
            wanted = latest.get(key)
            if found == (wanted if wanted is not None and wanted.value is not None else None):
                continue
            assert damage.may_be_short, f"key {key!r}: {found}, not {wanted}"
            assert found is None or found[1:] in contents, f"key {key!r}: wrong record {found}"


def _row_of(record: Record) -> Row:
    return Row(record.offset, record.timestamp_ms, record.key, record.value, record.headers)


def check_kept(engine: DirectoryLog, log: Log, damage: Damage, kept: list[Row]) -> None:
    ever = log.ever()
    try:
        rows = read(engine, log, committed=False)
    except KafkaLogError:
        with contextlib.suppress(KafkaLogError):
            rows = read(engine, log, committed=False, end=damage.offset)
            lost = [row for row in kept if row.offset < damage.offset and row not in rows]
            assert not (lost and damage.is_in_log), f"lost by writing: {lost}"
        return
    if damage.batch is None or damage.is_listed:
        wrong = [r for r in rows if r not in ever.get(r.offset, ()) and r not in kept]
        assert not wrong, f"wrong after writing: {wrong}"
    lost = [row for row in kept if row not in rows]
    assert not lost, f"lost by writing: {lost}"


def read(
    engine: DirectoryLog, log: Log, *, committed: bool, start: int = 0, end: int | None = None
) -> list[Row]:
    """Everything of one partition, or what lies from `start` on, or below `end`."""
    with engine.snapshot(log.topic, log.partition) as snapshot:
        state = snapshot.state
        stop = state.last_stable_offset if committed else state.high_watermark
        stop = stop if end is None else min(end, stop)
        start = max(start, state.log_start_offset)
        if stop < start:
            return []
        return rows_of(snapshot.read(start, stop, schema=SCHEMA, read_committed=committed))


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    found: list[Row] = []
    for table in batches:
        columns: list[list[Any]] = [
            table.column("offset").to_pylist(),
            table.column("timestamp").cast(pa.int64()).to_pylist(),
            table.column("key").to_pylist(),
            table.column("value").to_pylist(),
            table.column("headers").to_pylist(),
        ]
        for offset, time, key, value, headers in zip(*columns, strict=True):
            pairs = tuple((h["key"], h["value"]) for h in headers or ())
            found.append(Row(offset, time // 1000, key, value, pairs))
    return found
