"""Random logs, cleaned by two cleaners: one leaves unchanged segments alone and has a bit for each
dirty offset, the other reads all segments and looks every key up.

Keys that come back and keys that do not, deletions, producers, transactions, records without a key,
records deleted by offset, small segments, small maps, batches left apart; and what may become of
the key indexes of the first. After every cleaning both have the same bytes in their logs, and the
latest record of every key is the one that a dictionary says.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup import obsolete_offsets
from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import CONTROL
from tests.unit.cleaner.transactional_log import Log
from tests.unit.storage_engine.faults import Died, each_act

NEVER = 1 << 60
LARGE = 1 << 20


@dataclass
class Pair:
    """The same log twice, the first one cleaned by the cleaner that leaves segments alone."""

    root: Path
    draw: random.Random
    config: dict[str, str]
    now_ms: int = 1_000
    latest_records: dict[bytes, tuple[int, bytes | None]] = field(default_factory=dict)
    """Key -> offset and value of its latest committed record."""
    read: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.logs = [Log(DirectoryLog(self.root / name)) for name in ("left", "again")]
        for log in self.logs:
            log.engine.create_topic("t", 1, self.config)
        self.open: dict[int, list[tuple[bytes, tuple[int, bytes | None]]]] = {}
        self.special = self.draw.choice([0.0, 0.1, 0.3, 1.0])
        """How much there is of what keeps a segment from being unchanged."""
        start = self.draw.choice([0, 0, (1 << 31) - 100, 1 << 40])
        for log in self.logs:
            log.end = start
        self.both(lambda log: log.data(0, time=self.now_ms))
        self._note([0], start, False, self.latest_records.__setitem__)
        for first in range(1_000, 1_800, 40):
            self.append_rows(list(range(first, first + 40)))

    def both(self, act: Callable[[Log], object]) -> None:
        for log in self.logs:
            act(log)

    @property
    def log_start(self) -> int:
        return self.logs[0].engine.describe("t").partitions[0].log_start_offset

    # --- writing ---

    def append(self) -> None:
        draw = self.draw
        highest = draw.choice([3, 30, 900])
        keys: list[int | None] = [draw.randrange(highest) for _ in range(draw.randrange(1, 30))]
        if draw.random() < 0.5:  # keys of which most are not written again soon
            first = draw.randrange(1_000, 2_000)
            keys = list(range(first, first + draw.randrange(1, 30)))
        producer = draw.randrange(3)
        if draw.random() >= self.special:
            self.append_rows([key for key in keys if key is not None])
            return
        if draw.random() < 0.1:
            keys[draw.randrange(len(keys))] = None
        end, now_ms = self.logs[0].end, self.now_ms
        tombstones = draw.random() < 0.3
        match draw.randrange(4):
            case 0 if producer not in self.open:
                self.both(lambda log: log.data(*keys, producer=producer + 10, time=now_ms))
                self._note(keys, end, False, self.latest_records.__setitem__)
            case 1:
                held = self.open.setdefault(producer, [])
                self.both(
                    lambda log: log.data(*keys, producer=producer, transactional=True, time=now_ms)
                )
                self._note(
                    keys, end, False, lambda key, latest_records: held.append((key, latest_records))
                )
            case _:
                self.both(lambda log: log.data(*keys, tombstones=tombstones, time=now_ms))
                self._note(keys, end, tombstones, self.latest_records.__setitem__)

    def append_rows(self, keys: list[int]) -> None:
        draw, end = self.draw, self.logs[0].end
        rows = [
            (
                b"%d" % key,
                None if draw.random() < self.special / 10 else b"%d" % draw.randrange(10**9),
            )
            for key in keys
        ]
        self.both(lambda log: log.engine.append("t", rows, now_ms=self.now_ms))
        for place, (key, value) in enumerate(rows):
            self.latest_records[key] = (end + place, value)
        for log in self.logs:
            log.end += len(rows)

    def _note(
        self,
        keys: list[int | None],
        end: int,
        tombstones: bool,
        put: Callable[[bytes, tuple[int, bytes | None]], object],
    ) -> None:
        for place, key in enumerate(keys):
            if key is not None:
                value = None if tombstones else b"%d" % (end + place)
                put(b"%d" % key, (end + place, value))

    def end_transactions(self, share: float) -> None:
        for producer in sorted(self.open):
            if self.draw.random() < share:
                written = self.open.pop(producer)
                if self.draw.random() < 0.5:
                    self.both(lambda log, p=producer: log.abort(p, time=self.now_ms))  # type: ignore[misc]
                    continue
                self.both(lambda log, p=producer: log.commit(p, time=self.now_ms))  # type: ignore[misc]
                for key, (offset, value) in written:
                    if self.latest_records.get(key, (-1, None))[0] < offset:
                        self.latest_records[key] = offset, value

    def delete_records(self) -> None:
        state = self.logs[0].engine.describe("t").partitions[0]
        before = self.draw.randrange(state.log_start_offset, state.last_stable_offset + 1)
        before = min(before, state.log_start_offset + 60)

        def delete(log: Log) -> None:
            log.engine.delete_records("t", 0, before, now_ms=self.now_ms)
            manager.retain(log.engine, now_ms=self.now_ms)

        self.both(delete)

    # --- what may become of an index ---

    def harm_indexes(self) -> None:
        directory = self.logs[0].directory
        for _ in range(2):
            found = sorted(directory.glob("kl-*.keys"))
            if not found:
                return
            path = self.draw.choice(found)
            match self.draw.randrange(5):
                case 0:
                    path.unlink()
                case 1:
                    data = bytearray(path.read_bytes())
                    data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
                    path.write_bytes(data)
                case 2:
                    path.write_bytes(self.draw.choice(found).read_bytes())
                case 3:  # one that is older than its segment
                    kept = self.root / path.name
                    if kept.exists():
                        shutil.copy(kept, path)
                case 4:
                    shutil.copy(path, self.root / path.name)

    # --- cleaning ---

    def clean(self, patch: pytest.MonkeyPatch) -> None:
        draw = self.draw
        config = CleanerConfig(
            merge_batches=draw.random() < 0.9,
            spill=draw.random() < 0.7,
            dedupe_buffer_size=draw.choice([LARGE, LARGE, LARGE, 24 * 50]),
            io_buffer_size=draw.choice([700, 1 << 20]),
        )
        found: list[list[CleanerStats]] = []
        for log, worthwhile, share in zip(self.logs, (0, NEVER), (16, NEVER), strict=True):
            patch.setattr(unchanged_segments, "WORTHWHILE", worthwhile)
            patch.setattr(obsolete_offsets, "SHARE", share)
            patch.setattr(obsolete_offsets, "SIZE_MIN", 1 << 16 if share < NEVER else 0)
            found.append(clean(log.engine, "t", force=True, now_ms=self.now_ms, config=config))
            assert [stats.error for stats in found[-1]] in ([None], [])
        for stats, other in zip(*found, strict=True):
            self.read["left"] += stats.bytes_read
            self.read["again"] += other.bytes_read
            for name in ("end_offset", "rounds", "tombstones_kept", "records_removed"):
                assert getattr(stats, name) == getattr(other, name), name
            for name in ("bytes_removed", "keyless_records", "segments_before", "segments_after"):
                assert getattr(stats, name) == getattr(other, name), name

    def compare(self) -> None:
        left, again = self.logs
        assert files_of(left) == files_of(again)
        states = [log.engine.describe("t").partitions[0] for log in self.logs]
        assert states[0] == states[1]
        self.check_latest(left)

    def check_latest(self, log: Log) -> None:
        """Everything that tells the latest record of a key agrees with the dictionary."""
        expected = {
            key: (offset, value)
            for key, (offset, value) in self.latest_records.items()
            if value is not None and offset >= self.log_start
        }
        stable = log.engine.describe("t").partitions[0].last_stable_offset
        if any(offset >= stable for offset, _ in self.latest_records.values()):
            return  # what is committed behind an open transaction is seen later
        found = {}
        with log.engine.snapshot("t", 0, whole=True) as snapshot:
            end, budget = snapshot.state.high_watermark, self.draw.choice([LARGE, LARGE, 24 * 300])
            for rows in latest(snapshot, end, budget_bytes=budget, schema=changelog_schema()):
                columns = (rows[name].to_pylist() for name in ("key", "offset", "value"))
                found.update(
                    {key: (offset, value) for key, offset, value in zip(*columns, strict=True)}
                )
        assert found == expected
        with KeyLookup(log.engine, "t") as lookup:
            for key in self.draw.sample(
                sorted(self.latest_records), min(len(self.latest_records), 8)
            ):
                record = lookup.get(key, partition=0)
                assert (record and (record.offset, record.value)) == expected.get(key)


def files_of(log: Log) -> dict[str, bytes]:
    suffixes = (layout.LOG, layout.TRANSACTION_INDEX, layout.INDEX, layout.TIME_INDEX)
    active = log.engine.describe("t").partitions[0].active_base
    return {
        path.name: path.read_bytes()
        for path in log.directory.iterdir()
        if path.suffix in suffixes and path.stem.isdigit() and int(path.stem) < active
    }


def pair(root: Path, seed: int) -> Pair:
    draw = random.Random(seed)
    config = {
        "segment.bytes": draw.choice(["1500", "4000"]),
        "compression.type": draw.choice(["producer", "lz4", "uncompressed"]),
        "delete.retention.ms": draw.choice(["0", "500"]),
        "file.delete.delay.ms": "0",
        "cleanup.policy": "compact,delete",
        "retention.ms": "-1",
    }
    return Pair(root, draw, config)


def run(root: Path, seed: int, patch: pytest.MonkeyPatch, rounds: int) -> Pair:
    logs = pair(root, seed)
    draw = logs.draw
    for _ in range(rounds):
        for _ in range(draw.choice([1, 1, 3, 12])):
            logs.append()
        logs.end_transactions(draw.choice([0.3, 1.0]))
        logs.now_ms += draw.choice([0, 100, 400, 3_000, 2 * 86_400_000])
        if draw.random() < 0.15:
            logs.delete_records()
        if draw.random() < 0.4:
            logs.harm_indexes()
        logs.clean(patch)
        logs.compare()
    return logs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_two_cleaners_agree_on_a_random_log(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = run(tmp_path, seed, monkeypatch, 12)
    assert logs.read["left"] <= logs.read["again"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_cleaning_that_dies_anywhere_leaves_no_old_record_behind(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged_segments, "WORTHWHILE", 0)
    logs = pair(tmp_path, 1_000 + seed)
    (log, _), draw = logs.logs, logs.draw
    for _ in range(10):
        for _ in range(draw.choice([1, 3, 8])):
            logs.append()
        logs.end_transactions(1.0)
        logs.now_ms += draw.choice([0, 400, 3_000])
        config = CleanerConfig(dedupe_buffer_size=draw.choice([LARGE, 24 * 50]))

        def work(config: CleanerConfig = config) -> None:
            clean(log.engine, "t", force=True, now_ms=logs.now_ms, config=config)

        for _ in range(draw.choice([1, 1, 3])):  # killed twice, a cleaning does not spill
            each_act(work, draw.randrange(1, 120), Died(), after=draw.random() < 0.5)
            log.engine.close()
            log.engine = DirectoryLog(tmp_path / "left")
        work()
        logs.check_latest(log)
        clean_to = log.first_dirty_offset
        keys = [
            record.key
            for batch in log.batches()
            if not batch.attributes & CONTROL
            for record in batch.records
            if logs.log_start <= record.offset < clean_to
        ]
        assert keys and Counter(keys) == Counter(set(keys))
