"""How many files the cleaner, and a view of the latest records, have open at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.errors import StorageError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.layout import SEGMENT_SUFFIXES
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.swaps import retire
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.naive import dump, offsets

SEGMENTS = 60


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    """A partition of many segments of one record."""
    log = LogBuilder(tmp_path, now_ms=1).topic(segment_bytes=14)
    return log.append_each(*((f"k{i % 3}", f"{i}") for i in range(SEGMENTS))).engine


def open_files(directory: Path) -> int:
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return sum(link.startswith(str(directory)) for link in links)


def held_snapshot(engine: DirectoryLog) -> DirectorySnapshot:
    return open_snapshot(
        engine.partition_directory("t", 0),
        "t",
        0,
        lambda: engine.describe("t").partitions[0],
        held=True,
    )


def test_a_cleaning_has_one_segment_open_and_one_that_it_writes(engine: DirectoryLog) -> None:
    found: list[int] = []
    count = partial(open_files, engine.partition_directory("t", 0))
    (stats,) = clean(engine, force=True, now_ms=1, check_abort=lambda: found.append(count()))
    assert stats.error is None and stats.segments_before == SEGMENTS
    assert offsets(dump(engine)) == [57, 58, 59]
    assert len(found) == 2 * SEGMENTS
    assert max(found) <= 3  # and the cleaner lock
    assert count() == 0


def test_a_held_view_reads_what_a_whole_one_does(engine: DirectoryLog) -> None:
    with held_snapshot(engine) as held, engine.snapshot("t", 0, whole=True) as whole:
        for start, end in [(0, 60), (17, 43), (59, 60), (60, 60)]:
            for snapshot in (held, whole):
                batches = snapshot.read(start, end, schema=changelog_schema())
                found = [offset for rows in batches for offset in rows["offset"].to_pylist()]
                assert found == list(range(start, end))


def test_a_segment_that_was_deleted_meanwhile_is_passed_over(engine: DirectoryLog) -> None:
    with held_snapshot(engine) as snapshot:
        retire(engine.partition_directory("t", 0), [0, 1], suffixes=SEGMENT_SUFFIXES)
        with engine.transaction() as transaction:
            transaction.change_partition("t", 0, log_start_offset=2)
            transaction.publish(1)
        assert [chunk.segment_base for chunk in snapshot.chunks(0, 60)] == list(range(2, 60))


def test_a_segment_that_is_lost_is_not_a_deleted_one(engine: DirectoryLog) -> None:
    with held_snapshot(engine) as snapshot:
        retire(engine.partition_directory("t", 0), [30], suffixes=SEGMENT_SUFFIXES)
        with pytest.raises(StorageError, match="segment of offset 30 is missing"):
            list(snapshot.chunks(0, 60))


def test_the_soft_limit_of_open_files_is_raised_when_it_is_met(engine: DirectoryLog) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(len(taken) + SEGMENTS) if number not in taken]
    # So many are free below the limit: enough to begin with, and not for all.
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[SEGMENTS // 2], hard))
    try:
        with engine.snapshot("t", 0, whole=True) as snapshot:
            assert len(list(snapshot.chunks(0, 60))) == SEGMENTS
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_at_the_hard_limit_the_latest_records_come_with_advice_and_cleaning_works(
    engine: DirectoryLog,
) -> None:
    program = f"""
import resource, kafkalog
log = kafkalog.open({str(engine.root)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
try:
    list(log.latest("t"))
except kafkalog.errors.StorageError as fault:
    print(fault)
print(log.clean("t", force=True)[0].error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    advice, error = run.stdout.splitlines()
    assert "ulimit -n" in advice and "clean the topic" in advice
    assert error == "None"
