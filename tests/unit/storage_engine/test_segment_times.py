"""Whatever its time index says, a segment is as young as its batches.

The reference is a plain list of records. What spoils a time index: it is gone, cut, an older copy,
that of another segment, padded with zeros, or full of entries that somebody made up.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafkalog.cleaner.directory.log_to_clean import log_to_clean
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.layout import MAX_TIMESTAMP_POSITION
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.reading.time_offsets import MAX_TIMESTAMP
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.segment_times import SegmentTimes, largest_timestamp
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments
from tests.builders.batch_builder import GZIP, Record, at_times, empty, joined
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import segment_bases, time_index_entries
from tests.builders.message_builder import message, messages, wrapper
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine.broker_root import BrokerRoot

LOG_APPEND_TIME = 0x08
T0 = 1_700_000_000_000
ROW = [T0, T0 + 1000, T0 + 500_000, T0 + 1000, T0 + 1000]
"""The times of five records, in a batch each."""
Times = list[tuple[int, int]]


def times_file(directory: Path, base: int = 0) -> Path:
    return directory / name(base, ".timeindex")


def packed(entries: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack(">qi", *entry) for entry in entries)


class Log:
    """Topic `t` of one partition, and its records by segment as a plain list."""

    def __init__(self, root: Path, interval: int = 0) -> None:
        self.root = root
        self.segments: dict[int, Times] = {0: []}
        LogBuilder(root).topic(
            policy="compact,delete",
            index_interval_bytes=interval,
            retention_ms=1000,
            min_compaction_lag_ms=1000,
            segment_ms=2**60,
        ).engine.close()
        self.engine = DirectoryLog(root)

    @property
    def directory(self) -> Path:
        return self.engine.partition_directory("t", 0)

    @property
    def records(self) -> Times:
        return [record for records in self.segments.values() for record in records]

    def reopen(self) -> None:
        self.engine.close()
        self.engine = DirectoryLog(self.root)

    def append(self, *times: int) -> Log:
        """Append a batch of one record for each time."""
        first = len(self.records)
        added = [(first + n, ms) for n, ms in enumerate(times)]
        data = b"".join(at_times(offset, [ms]).data for offset, ms in added)
        self.engine.append_raw("t", 0, data, now_ms=T0)
        self.segments[max(self.segments)] += added
        return self

    def roll(self) -> Log:
        LogBuilder(self.engine).roll()
        self.segments.setdefault(len(self.records), [])
        return self

    def check(self, now_ms: int) -> None:
        """Compare lookups of all times, the lag, and at last retention, with the plain list."""
        assert segment_bases(self.engine) == [*self.segments]
        for ms in sorted({ms + n for _, ms in self.records for n in (-1, 0, 1)}):
            found = self.engine.offset_for_time("t", ms)[0]
            wanted = next((record for record in self.records if record[1] >= ms), None)
            assert (None if found is None else (found.offset, found.timestamp)) == wanted
        largest = max(ms for _, ms in self.records)
        latest = self.engine.offset_for_time("t", MAX_TIMESTAMP)[0]
        assert latest is not None and latest.timestamp == largest
        old = []
        for base, records in self.segments.items():
            if any(ms >= now_ms - 1000 for _, ms in records):
                break
            old.append(base)
        stays = [base for base in self.segments if base not in old]
        young = next((base for base in self.segments if self._has(base, now_ms - 999)), None)
        active = max(self.segments)
        end = active if young is None else young
        assert self._to_clean(now_ms) == end
        self.engine.apply_retention("t", now_ms=now_ms)
        assert segment_bases(self.engine) == (stays or [len(self.records)])

    def _has(self, base: int, ms: int) -> bool:
        return any(time >= ms for _, time in self.segments[base])

    def _to_clean(self, now_ms: int) -> int:
        topic = self.engine.describe("t")
        return log_to_clean(
            "t",
            0,
            directory=self.directory,
            config=TopicConfig.parse(topic.config),
            state=topic.partitions[0],
            segments=list_segments(self.directory),
            now_ms=now_ms,
        ).end


Spoil = Callable[[Path, random.Random], None]


def gone(path: Path, _: random.Random) -> None:
    path.unlink(missing_ok=True)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes() if path.exists() else b""
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def without_one(path: Path, rng: random.Random) -> None:
    data = path.read_bytes() if path.exists() else b""
    place = 12 * rng.randrange(len(data) // 12 + 1)
    path.write_bytes(data[:place] + data[place + 12 :])


def padded(path: Path, rng: random.Random) -> None:
    data = path.read_bytes() if path.exists() else b""
    path.write_bytes(data[: 12 * rng.randrange(len(data) // 12 + 1)] + bytes(120))


def made_up(path: Path, rng: random.Random) -> None:
    entries = sorted((T0 + 10 * rng.randrange(9), rng.randrange(9)) for _ in range(4))
    path.write_bytes(packed(entries))


def another_one(path: Path, rng: random.Random) -> None:
    others = [each.read_bytes() for each in sorted(path.parent.glob("*.timeindex*"))]
    path.write_bytes(rng.choice([b"", *others]))


def old_copy(path: Path, _: random.Random) -> None:
    """Put back what was kept the last time, and keep what is there."""
    kept = path.with_name(path.name + ".kept")
    old = kept.read_bytes() if kept.exists() else b""
    kept.write_bytes(path.read_bytes() if path.exists() else b"")
    path.write_bytes(old)


SPOILS = [gone, cut, without_one, padded, made_up, another_one, old_copy]


# --- the row of the field, and what is like it ----------------------------------------------------


LOST: dict[str, Callable[[bytes], bytes | None]] = {
    "the last entry": lambda data: data[:-12],
    "the file": lambda _: None,
    "all entries": lambda _: b"",
    "half an entry": lambda data: data[:-6],
    "zeros for the last entry": lambda data: data[:-12] + bytes(12),
    "a time that is too small": lambda data: data[:-12] + packed([(T0 + 2, 2)]),
    "a time that is too large": lambda data: data[:-12] + packed([(T0 + 10**9, 2)]),
    "an offset that is too large": lambda data: data[:-12] + packed([(T0 + 1000, 4)]),
    "another segment's": lambda _: packed([(T0 + 7, 0), (T0 + 9, 1)]),
}


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("lost", LOST)
def test_a_segment_is_as_young_as_its_batches_whatever_its_time_index_has_lost(
    tmp_path: Path, lost: str, is_reopened: bool, is_rolled: bool
) -> None:
    log = Log(tmp_path).append(*ROW)
    path = times_file(log.directory)
    data = LOST[lost](path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    if is_reopened:
        log.reopen()
    log.append(T0 + 1999)
    if is_rolled:
        log.roll().append(T0 + 3000)
    log.check(T0 + 501_000)
    log.check(T0 + 501_001)


@pytest.mark.parametrize("lost", LOST)
def test_the_next_append_gives_a_time_index_what_it_has_lost(tmp_path: Path, lost: str) -> None:
    log = Log(tmp_path).append(*ROW)
    path = times_file(log.directory)
    data = LOST[lost](path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    log.reopen()
    log.append(T0 + 1999).roll()
    assert time_index_entries(log.engine)[-1] == (T0 + 500_000, 2)


@pytest.mark.parametrize("lost", ["the last entry", "all entries"])
def test_verify_sees_a_time_index_that_ends_early_until_the_next_append(
    tmp_path: Path, lost: str
) -> None:
    log = Log(tmp_path).append(*ROW)
    path = times_file(log.directory)
    path.write_bytes(LOST[lost](path.read_bytes()) or b"")
    (found,) = verify(tmp_path)
    assert (found.path, found.is_damage) == (path, False)
    assert f"the largest timestamp, {T0 + 500_000}" in found.expected
    log.reopen()
    log.append(T0)
    assert list(verify(tmp_path)) == []


@pytest.mark.parametrize("entries", [[], [(1000, 1)], [(1000, 1), (1999, 5)], [(1999, 5)]])
def test_an_adopted_segment_is_as_young_as_its_batches(tmp_path: Path, entries: Times) -> None:
    """A broker that has lost an entry writes a smaller time with a larger offset."""
    broker = BrokerRoot(tmp_path / "kafka")
    directory = broker.path / "t-0"
    directory.mkdir()
    ages = [*ROW, T0 + 1999]
    write_segment(directory, 0, [at_times(n, [ms]) for n, ms in enumerate(ages)], interval=0)
    write_segment(directory, 6, [at_times(6, [T0 + 2500])], interval=0)
    broker.shut_down()
    times_file(directory).write_bytes(packed((T0 + ms, offset) for ms, offset in entries))
    config = {"cleanup.policy": "delete", "retention.ms": "1000"}
    adopt(broker.path, config={"t": config}, now_ms=T0)
    engine = DirectoryLog(broker.path)
    found = {ms: engine.offset_for_time("t", T0 + ms)[0] for ms in (1000, 2000, 500_000, 500_001)}
    offsets = {ms: None if each is None else each.offset for ms, each in found.items()}
    assert offsets == {1000: 1, 2000: 2, 500_000: 2, 500_001: None}
    assert engine.apply_retention("t", now_ms=T0 + 501_000) == []
    assert len(engine.apply_retention("t", now_ms=T0 + 501_001)) == 1


# --- what the batches say ------------------------------------------------------------------------


MIXED = [
    at_times(0, [-1]),
    at_times(1, [-7]),
    at_times(2, [40, 30]),
    at_times(4, [50], attributes=LOG_APPEND_TIME, max_timestamp=60),
    at_times(5, [20], value_size=20_000),
    empty(6, 7, max_timestamp=60),
    at_times(8, [55], value_size=9_000),
]


@pytest.mark.parametrize("count", range(len(MIXED) + 1))
def test_the_times_of_a_segment_are_those_of_its_headers(tmp_path: Path, count: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(joined(MIXED[:count]) + bytes(30))
    with log.open("rb") as file:
        source = FileBytes(file.fileno())
        found = SegmentTimes().extended(source, log.stat().st_size)
        times = [item.max_timestamp for item in MIXED[:count]]
        sizes = [len(item.data) for item in MIXED[:count]]
        assert (found.end, found.largest) == (sum(sizes), max([-1, *times]))
        for ms in range(-8, 62):
            first = next((n for n, time in enumerate(times) if time >= ms), count)
            assert found.position_since(source, ms) == sum(sizes[:first])


def test_a_compressed_message_may_have_a_record_of_any_time(tmp_path: Path) -> None:
    told = [Record(1, 5, None, None)]
    wrapped = wrapper(1, GZIP, told, offset=1, payload=messages(1, [Record(1, 90, b"k", b"v")]))
    single = message(0, 0, b"k", b"v"), message(1, 2, b"k", b"v", timestamp=8)
    log = tmp_path / "log"
    log.write_bytes(single[0] + wrapped + single[1])
    with log.open("rb") as file:
        source = FileBytes(file.fileno())
        found = SegmentTimes().extended(source, log.stat().st_size)
        assert (found.end, found.largest, found.largest_offset) == (log.stat().st_size, 8, 2)
        assert found.position_since(source, 1000) == len(single[0])


def test_what_is_known_of_a_file_is_forgotten_when_it_changes(tmp_path: Path) -> None:
    segment = SegmentFiles(tmp_path, 0, 0)
    for times in ([5, 7], [5, 7, 9], [5, 3, 9], [1], [1, 2], [8, 2]):
        data = joined([at_times(n, [ms]) for n, ms in enumerate(times)])
        with segment.log.open("r+b" if segment.log.exists() else "wb") as file:
            file.write(data)
            file.truncate()
        time.sleep(0.02)  # so that the file system's clock goes on
        assert largest_timestamp(segment, len(data)) == max(times)


def test_a_header_that_was_damaged_deletes_no_young_record(tmp_path: Path) -> None:
    """The time index still has the time that the header has lost."""
    log = Log(tmp_path).append(T0, T0 + 500_000).roll().append(T0 + 600_000)
    path = log.directory / name(0, ".log")
    data = bytearray(path.read_bytes())
    place = len(data) // 2 + MAX_TIMESTAMP_POSITION
    data[place : place + 8] = struct.pack(">q", T0)
    path.write_bytes(data)
    log.engine.apply_retention("t", now_ms=T0 + 400_000)
    assert segment_bases(log.engine) == [0, 2]


# --- any log, spoiled at any time -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.chosen
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    interval=st.sampled_from([0, 80, 200]),
    acts=st.lists(st.sampled_from("aaaarsso"), min_size=3, max_size=14),
)
def test_spoiled_time_indexes_change_no_lookup_no_lag_and_no_retention(
    tmp_path_factory: pytest.TempPathFactory, seed: int, interval: int, acts: list[str]
) -> None:
    rng = random.Random(seed)
    log = Log(tmp_path_factory.mktemp("log"), interval)
    for act in ["a", *acts]:
        if act == "a":
            log.append(*(T0 + 10 * rng.randrange(9) for _ in range(rng.randrange(1, 5))))
        elif act == "r":
            log.roll()
        elif act == "o":
            log.reopen()
        else:
            rng.choice(SPOILS)(times_file(log.directory, rng.choice([*log.segments])), rng)
    log.check(T0 + 1000 + 10 * rng.randrange(10) + rng.randrange(2))
    log.engine.close()
