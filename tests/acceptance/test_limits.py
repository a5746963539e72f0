"""Few file descriptors and many partitions, and clocks that jump."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.cleaner.schedule.manager import sweep
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import Uncleanable, mark_uncleanable
from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, latest_records, records

NOW_MS = 1_750_000_000_000
A_DAY_MS = 86_400_000
A_YEAR_MS = 365 * A_DAY_MS


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, and syncs are what takes time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


# --- file descriptors ----------------------------------------------------------------------------

MANY = """
import os, resource, sys
import pyarrow as pa
import kafkalog
from tests.builders.log_contents import latest_records, records

root, soft, hard, partitions = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
os.fsync = os.fdatasync = lambda fd: None  # they are minutes on a disk, and take no descriptor
log = kafkalog.open(root)
log.create_topic("t", partitions)
for value in (b"old", b"new"):
    columns = {"key": pa.array([b"%d" % n for n in range(partitions)]),
               "value": pa.array([value] * partitions),
               "partition": pa.array(range(partitions), pa.int32())}
    assert log.append("t", pa.table(columns)).rows == partitions
assert set(log.offsets("t").values()) == {(0, 2)}
assert {stats.error for stats in log.clean("t", force=True)} == {None}
found = records(log, "t")
assert [(number, offset, value) for number, offset, _, value in found] == [
    (number, 1, b"new") for number in range(partitions)
]
assert len(latest_records(log, "t")) == partitions
assert {status.state for status in log.status()} == {"clean"}
log.close()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(root: Path, soft: int, hard: int, partitions: int) -> int:
    """Work on a log with few descriptors; return the soft limit in the end."""
    numbers = map(str, (soft, hard, partitions))
    command = [sys.executable, "-c", MANY, str(root), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_a_thousand_partitions_are_written_cleaned_and_read_with_256_descriptors(
    tmp_path: Path,
) -> None:
    assert limited(tmp_path / "log", 256, 256, 1000) == 256


@pytest.mark.slow
def test_many_partitions_leave_the_limit_of_the_process_as_it_is(tmp_path: Path) -> None:
    assert limited(tmp_path / "log", 64, 1024, 40) == 64


@contextlib.contextmanager
def descriptors(free: int, *, can_be_raised: bool) -> Iterator[None]:
    """Leave this process so many descriptors below its soft limit, and below the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    soft = held[-1] + 1
    for fd in held[:free]:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    with pytest.MonkeyPatch.context() as patch:
        if not can_be_raised:
            patch.setattr(files, "raise_descriptor_limit", lambda: False)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in held[free:]:
                os.close(fd)


def test_a_commit_closes_its_own_files_where_others_have_nearly_all(tmp_path: Path) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 20)
    rows = pa.table({
        "key": [b"k"] * 20, "value": [b"v"] * 20, "partition": pa.array(range(20), pa.int32())
    })  # fmt: skip
    log.append("t", rows)
    with descriptors(20, can_be_raised=False):
        assert log.append("t", rows).rows == 20
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert len(os.listdir("/proc/self/fd")) <= soft
    assert set(log.offsets("t").values()) == {(0, 2)}


@pytest.mark.parametrize("can_be_raised", [True, False])
def test_views_that_take_all_descriptors_raise_the_limit_or_say_how(
    tmp_path: Path, can_be_raised: bool
) -> None:
    """Whatever the file is that meets the limit: a lock's, the journal's, a segment's."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1)
    log.append("t", [("k", "v")])
    for free in range(6):
        with descriptors(free + 1, can_be_raised=can_be_raised), contextlib.ExitStack() as opened:
            advice = r"/log/.*cannot be opened: Too many open files; raise .*\(ulimit -n\)"
            expected = contextlib.nullcontext() if can_be_raised else None
            with expected or pytest.raises(StorageError, match=advice):
                for _ in range(10):
                    opened.enter_context(directory_log_of(log).snapshot("t", 0))
    assert [value for *_, value in records(log, "t")] == [b"v"]


def test_a_commit_that_closed_files_on_its_way_fails_and_succeeds_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of its partitions is refused, when others have been closed and opened again."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 10)
    monkeypatch.setattr("kafkalog.storage_engine.fs.files.descriptor_limit", lambda: 12)

    def rows(value: bytes) -> pa.Table:
        numbers = pa.array(range(10), pa.int32())
        columns = {"key": pa.array([value] * 10), "value": pa.array([value] * 10)}
        return pa.table({**columns, "partition": numbers})

    log.append("t", rows(b"first"))
    expected = records(log, "t")
    canary = directory_log_of(log).partition_directory("t", 9) / "kl-canary.deleted"
    content = canary.read_bytes()
    canary.unlink()
    with pytest.raises(kafkalog.errors.LockedByBrokerError):
        log.append("t", rows(b"second"))
    assert records(log, "t") == expected
    canary.write_bytes(content)
    log.append("t", rows(b"third"))
    with directory_log_of(log).transaction() as transaction:
        for _ in range(2):  # each of them is opened once more
            for number in range(10):
                transaction.roll("t", number, NOW_MS)
        transaction.publish(NOW_MS)
    log.append("t", rows(b"fourth"))
    assert [value for *_, value in records(log, "t")] == [b"first", b"third", b"fourth"] * 10
    log.close()
    assert damage(log.root) == []


# --- clocks --------------------------------------------------------------------------------------


def times(log: KafkaLog) -> list[int]:
    found: list[int] = []
    for rows in log.read("t", 0):
        found += rows["timestamp"].cast(pa.int64()).to_pylist()
    return [micros // 1000 for micros in found]


JUMPS = [
    [0, 1, -A_DAY_MS, -A_DAY_MS + 1, 2, 3],
    [0, 1, A_YEAR_MS, A_YEAR_MS + 1, 2, 3],
    [0, A_YEAR_MS, -A_DAY_MS, 1, A_YEAR_MS + 1, 2],
]


@pytest.mark.parametrize("jumps", JUMPS)
@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_a_time_is_found_where_the_first_record_as_young_is_whatever_the_clock_did(
    tmp_path: Path, jumps: list[int], kind: str
) -> None:
    """Offsets ascend, timestamps need not: Kafka promises none, but the first record since one."""
    log = kafkalog.open(tmp_path / "log")
    config = {"message.timestamp.type": kind, "segment.bytes": "150", "index.interval.bytes": "0"}
    log.create_topic("t", 1, {**config, "segment.ms": "3600000"})
    for jump in jumps:
        for _ in range(3):
            log.append("t", [("k", "v")], now_ms=NOW_MS + jump)
    assert times(log) == [NOW_MS + jump for jump in jumps for _ in range(3)]
    for asked in sorted({NOW_MS + jump + more for jump in jumps for more in (-1, 0, 1)}):
        first = next((offset for offset, at in enumerate(times(log)) if at >= asked), None)
        found = log.offset_for_time("t", asked)[0]
        assert (found and found.offset) == first
    log.close()
    assert damage(log.root) == []


def test_retention_takes_nothing_that_is_young_by_the_clock_that_came_back(tmp_path: Path) -> None:
    log = kafkalog.open(tmp_path / "log")
    config = {"cleanup.policy": "delete", "segment.bytes": "150", "retention.ms": str(7 * A_DAY_MS)}
    log.create_topic("t", 1, config)
    for jump in (0, -A_DAY_MS, A_YEAR_MS, 0, 0):
        log.append("t", [("k", "v" * 60)], now_ms=NOW_MS + jump)
        for now in (NOW_MS - A_DAY_MS, NOW_MS + jump):
            directory_log_of(log).apply_retention("t", now_ms=min(now, NOW_MS))
    assert log.offsets("t")[0] == (0, 5)
    # Younger than the clock holds back whatever follows it, as in Kafka, until the clock is there.
    directory_log_of(log).apply_retention("t", now_ms=NOW_MS + 30 * A_DAY_MS)
    assert log.offsets("t")[0] == (2, 5)
    directory_log_of(log).apply_retention("t", now_ms=NOW_MS + A_YEAR_MS + 8 * A_DAY_MS)
    assert log.offsets("t")[0] == (5, 5)


@pytest.mark.parametrize("first", [-A_DAY_MS, 0, A_YEAR_MS])
def test_a_tombstone_outlasts_its_time_but_never_goes_before_it(tmp_path: Path, first: int) -> None:
    """It stays for delete.retention.ms by the clock of the cleaning that met it first."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1, {"delete.retention.ms": "1000"})
    log.append("t", [("k", "v"), ("k", None)], now_ms=NOW_MS)
    log.clean("t", force=True, now_ms=NOW_MS + first)
    for jump in (-A_DAY_MS, 0, 999):
        log.clean("t", force=True, now_ms=NOW_MS + first + jump)
        assert len(records(log, "t")) == 1 and latest_records(log, "t") == {}
    log.append("t", [("other", "v")], now_ms=NOW_MS + first)
    log.clean("t", force=True, now_ms=NOW_MS + first + 1001)
    assert [key for _, _, key, _ in records(log, "t")] == [b"other"]


@pytest.mark.parametrize("jump", [-A_DAY_MS, A_YEAR_MS])
def test_a_reader_keeps_its_moment_whatever_the_cleaners_clock_says(
    tmp_path: Path, jump: int
) -> None:
    """Who reads holds the pin's lock; its lease, which is by the clock, is not what counts."""
    log = kafkalog.open(tmp_path / "log")
    config = {"min.cleanable.dirty.ratio": "0", "file.delete.delay.ms": "0"}
    log.create_topic("t", 1, {**config, "segment.bytes": "14"})  # each record has its segment
    log.append("t", [("k", "old")])
    log.append("t", [("k", "kept")])
    now_ms = clock.now_ms()
    with contextlib.ExitStack() as held:
        pinned = pins.pin(
            log.root, pins.Action("a", "b"), directory_log_of(log).state, now_ms, held=held
        )
        assert pinned is not None
        log.append("t", [("k", "new")])
        for force in (False, True):
            log.clean("t", force=force, now_ms=now_ms + jump)
            sweep(directory_log_of(log), now_ms=now_ms + jump)
            assert pinned.path.exists()
            assert [offset for _, offset, _, _ in records(log, "t")] == [1, 2]
    log.clean("t", force=True, now_ms=now_ms + jump)
    assert [offset for _, offset, _, _ in records(log, "t")] == [2]


def test_what_a_clock_a_year_ahead_has_swept_is_missed_by_name_and_staged_anew(
    tmp_path: Path,
) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1)
    builder = LogBuilder(log, now_ms=NOW_MS)
    message = builder.stage(("k", "v"), batch_id=1)
    assert sweep(directory_log_of(log), now_ms=clock.now_ms() - A_DAY_MS) == 0
    assert sweep(directory_log_of(log), now_ms=clock.now_ms() + A_YEAR_MS) == 1
    with pytest.raises(StorageError, match=r"staged file is missing.*run the batch again"):
        directory_log_of(log).commit([message])
    again = builder.stage(("k", "v"), batch_id=1)
    assert directory_log_of(log).commit([again]).rows == 1


@pytest.mark.parametrize("jump", [-A_YEAR_MS, -A_DAY_MS, 0, A_DAY_MS])
def test_a_retry_is_a_retry_though_the_clock_has_jumped(tmp_path: Path, jump: int) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1)
    builder = LogBuilder(log, now_ms=NOW_MS)
    writer = Writer("query", "t", 3)
    assert builder.commit(("k", "v"), writer=writer).rows == 1
    assert builder.commit(("k", "v"), writer=writer, now_ms=NOW_MS + jump).skipped
    assert len(records(log, "t")) == 1


def test_a_clock_that_skips_the_time_writers_are_remembered_forgets_them_until_it_is_back(
    tmp_path: Path,
) -> None:
    """As a broker forgets its producers; what no jump of the clock does is to lose rows."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1, now_ms=NOW_MS)
    builder = LogBuilder(log, now_ms=NOW_MS)
    first, second = Writer("first", "t", 3), Writer("second", "t", 3)
    for writer in (first, second):
        builder.commit(("k", "v"), writer=writer)
    later_ms = NOW_MS + A_YEAR_MS
    assert builder.commit(("k", "v"), writer=first, now_ms=later_ms).skipped, "nobody at once"
    log.append("t", [("k", "v")], now_ms=later_ms)
    assert not builder.commit(("k", "v"), writer=first, now_ms=later_ms).skipped
    assert builder.commit(("k", "v"), writer=second, now_ms=NOW_MS + 1).skipped
    assert builder.commit(("k", "v"), writer=first, now_ms=NOW_MS + 1).skipped
    assert len(records(log, "t")) == 4


def test_a_writer_is_not_forgotten_for_a_clock_that_was_behind(tmp_path: Path) -> None:
    """As that of a host that has no clock of its own before it has asked for the time."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1, now_ms=NOW_MS)
    builder = LogBuilder(log, now_ms=NOW_MS)
    log.append("t", [("k", "v")], now_ms=NOW_MS)
    for batch_id in (1, 2, 3):
        writer = Writer("first", "t", batch_id)
        assert builder.commit(("k", "v"), writer=writer, now_ms=NOW_MS - A_YEAR_MS).rows
        log.append("t", [("k", "v")], now_ms=NOW_MS - A_YEAR_MS)
    assert builder.commit(("k", "v"), writer=writer, now_ms=NOW_MS + 1).skipped
    rewrite_journal(log)
    assert builder.commit(("k", "v"), writer=writer, now_ms=NOW_MS + 3).skipped


def rewrite_journal(log: KafkaLog) -> None:
    journal = log.root / "commit"
    inode = journal.stat().st_ino
    while journal.stat().st_ino == inode:
        log.append("t", [("k", "v")], now_ms=NOW_MS + 2)


@pytest.mark.parametrize("first_ms", [0, A_YEAR_MS])
def test_one_commit_of_a_clock_ahead_forgets_no_writer_for_good(
    tmp_path: Path, first_ms: int
) -> None:
    """Not even where the journal is written anew behind it."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1, now_ms=NOW_MS)
    builder = LogBuilder(log, now_ms=NOW_MS)
    writer = Writer("first", "t", 3)
    builder.commit(("k", "v"), writer=writer)
    journal = tmp_path / "log" / "commit"
    inode = journal.stat().st_ino
    at = first_ms
    while journal.stat().st_ino == inode:  # each second commit is of that clock
        log.append("t", [("k", "v")], now_ms=NOW_MS + at)
        at = A_YEAR_MS - at
    assert builder.commit(("k", "v"), writer=writer, now_ms=NOW_MS + 2).skipped


def test_rows_of_a_clock_ahead_are_refused_and_those_of_one_behind_kept(tmp_path: Path) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1)

    def rows(at: int) -> pa.Table:
        timestamps = pa.array([at * 1000], pa.timestamp("us", tz="UTC"))
        return pa.table({"key": [b"k"], "value": [b"v"], "timestamp": timestamps})

    with pytest.raises(InvalidInputError, match="timestamp"):
        log.append("t", rows(NOW_MS + A_YEAR_MS), now_ms=NOW_MS)
    log.append("t", rows(NOW_MS - A_DAY_MS), now_ms=NOW_MS)
    assert times(log) == [NOW_MS - A_DAY_MS]


def test_a_clock_ahead_does_not_hold_off_cleaning_when_it_is_back(tmp_path: Path) -> None:
    """A failure's pause is an hour at most, by whichever clock it was told."""
    failed = mark_uncleanable(
        DirectoryNotes(tmp_path), KafkaLogError("no space"), {}, now_ms=NOW_MS + A_YEAR_MS
    )
    assert failed.is_due({}, NOW_MS)
    assert not failed.is_due({}, NOW_MS + A_YEAR_MS)
    assert not Uncleanable("written by a newer release").is_due({}, NOW_MS)


def test_a_deleted_topics_files_wait_for_the_clock_that_came_back(tmp_path: Path) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t", 1)
    log.append("t", [("k", "v")])
    log.delete_topic("t", now_ms=NOW_MS + A_YEAR_MS)
    sweep(directory_log_of(log), now_ms=NOW_MS)
    assert list(log.root.glob("t-0.*-delete"))
    log.create_topic("t", 1)
    sweep(directory_log_of(log), now_ms=NOW_MS + A_YEAR_MS + A_DAY_MS)
    assert not list(log.root.glob("t-0.*-delete"))
    assert log.topics() == ["t"]
