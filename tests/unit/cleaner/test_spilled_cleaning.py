"""Whole cleanings whose keys do not fit the memory: one rewrite, any death, any full disk."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.offset_map import OffsetMap
from kafkalog.cleaner.dedup.spill.spilled import Spilled
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.naive import (
    dump,
    latest_values,
    records_of,
)
from tests.unit.storage_engine.faults import Died, each_act

SMALL = CleanerConfig(dedupe_buffer_size=24 * 30, merge_batches=False)
"""27 keys."""


def written(root: Path, seed: int, *, keys: int = 300, commits: int = 30) -> DirectoryLog:
    config = {"segment_bytes": 2_500, "delete_retention_ms": 500, "file_delete_delay_ms": 0}
    log = LogBuilder(root, now_ms=1).topic(**config)
    return log.random_commits(random.Random(seed), commits, keys=keys, rows_max=24).engine


def cleaned(engine: DirectoryLog, now_ms: int, config: CleanerConfig = SMALL) -> CleanerStats:
    (stats,) = clean(engine, "t", force=True, now_ms=now_ms, config=config)
    return stats


def spill_files(engine: DirectoryLog) -> list[str]:
    directory = engine.partition_directory("t", 0)
    return sorted(path.name for path in directory.glob("kl-spill*"))


def log_bytes(engine: DirectoryLog) -> dict[str, bytes]:
    directory = engine.partition_directory("t", 0)
    return {path.name: path.read_bytes() for path in directory.glob("*.log")}


def test_the_memory_of_the_offset_map_is_free_when_the_segments_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps: list[weakref.ref[OffsetMap]] = []
    left: set[bool] = set()
    make, obsolete = OffsetMap.for_records, Spilled.obsolete

    def made(*args: Any, **options: Any) -> OffsetMap:
        maps.append(weakref.ref(offset_map := make(*args, **options)))
        return offset_map

    def noted(latest: Spilled, *args: Any) -> Any:
        left.update(each() is not None for each in maps)
        return obsolete(latest, *args)

    monkeypatch.setattr(OffsetMap, "for_records", made)
    monkeypatch.setattr(Spilled, "obsolete", noted)
    engine = written(tmp_path, 1)
    gc.disable()  # nothing waits for a search for circles
    try:
        assert cleaned(engine, 2).spilled_bytes
    finally:
        gc.enable()
    assert left == {False}


# --- deaths --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cleaner_may_die_at_any_act_and_the_next_one_ends_the_work(tmp_path: Path) -> None:
    n, stride = 1, 1
    while True:
        engine = written(tmp_path / str(n), 2, commits=20)
        before = latest_values(records_of(dump(engine)))

        def work(engine: DirectoryLog = engine) -> None:
            cleaned(engine, 1_000)

        if not each_act(work, n, Died()):
            break
        assert latest_values(records_of(dump(engine))) == before, n
        for stats in clean(engine, "t", force=True, now_ms=1_000, config=SMALL):
            assert (stats.error, stats.rounds) == (None, 1), n
        after = records_of(dump(engine))
        assert (len(after), latest_values(after)) == (len(before), before), n
        assert spill_files(engine) == [], n
        n += stride
        stride = 1 + n // 8
    assert n > 40


@pytest.mark.slow
def test_a_cleaner_killed_twice_while_it_spills_is_followed_by_progress(tmp_path: Path) -> None:
    engine = written(tmp_path, 3, keys=10_000, commits=100)
    before = latest_values(records_of(dump(engine)))
    for _ in range(2):
        kill_while_it_spills(tmp_path, engine)
    config = CleanerConfig(dedupe_buffer_size=24 * 200, merge_batches=False)
    stats = cleaned(engine, 1_000, config)
    # The first round was a bounded one; the rest then spills again, and comes to its end.
    assert (stats.error, stats.rounds) == (None, 2)
    after = records_of(dump(engine))
    assert (len(after), latest_values(after)) == (len(before), before)
    assert spill_files(engine) == []


CLEANER = """
import os, sys, time
from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.dedup.spill.spilled import Spill
from kafkalog.storage_engine.directory.directory_log import DirectoryLog

def stuck(self, *_):
    print("spilled", flush=True)
    time.sleep(60)

Spill.resolve = stuck
config = CleanerConfig(dedupe_buffer_size=24 * 200, merge_batches=False)
clean(DirectoryLog(sys.argv[1]), "t", force=True, now_ms=1_000, config=config)
"""


def kill_while_it_spills(root: Path, engine: DirectoryLog) -> None:
    command = [sys.executable, "-c", CLEANER, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "spilled\n"
        assert "kl-spill-dirty" in spill_files(engine)
        os.kill(process.pid, signal.SIGKILL)


# --- a full disk ---------------------------------------------------------------------------------


def test_a_disk_that_is_full_of_keys_leaves_the_log_as_it_is_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = written(tmp_path, 4)
    engine_bytes = log_bytes(engine)
    written_to_spill = 0
    write_at = files.write_at

    def full(fd: int, data: files.Buffer, position: int) -> None:
        nonlocal written_to_spill
        if "kl-spill-" in os.readlink(f"/proc/self/fd/{fd}"):
            written_to_spill += len(data)
            if written_to_spill > 3_000:
                raise OSError(errno.ENOSPC, "No space left on device")
        write_at(fd, data, position)

    monkeypatch.setattr(files, "write_at", full)
    stats = cleaned(engine, 1_000)
    assert stats.error is not None
    assert "the disk is full" in stats.error
    assert "log.cleaner.dedupe.buffer.size" in stats.error
    assert "\n" not in stats.error
    found = log_bytes(engine)
    assert {name: found[name] for name in engine_bytes} == engine_bytes
    assert [name for name in spill_files(engine) if name != "kl-spilling"] == []
    monkeypatch.setattr(files, "write_at", write_at)
    assert cleaned(engine, 2_000).error is None
    assert spill_files(engine) == []


# --- more keys than the map, as in the faults that Kafka had -------------------------------------
