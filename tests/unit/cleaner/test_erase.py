"""Keys that are erased: no file has them afterwards, as other tools see it, and others stay."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.record.memory_records import MemoryRecords

import kafkalog
from kafkalog.erasure.erase import Erasure
from kafkalog.erasure.topic_files import FileKind
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.directory.pins import Action
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import Record, batch_data
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import latest_records
from tests.torture.disk import Disk
from tests.torture.disk_states import states
from tests.torture.recorder import Recorder

KEY = "user-4711"
LONGER = f"{KEY}-2"
"""Another key that begins with it."""
NOW = 1_700_000_000_000
DAY = 86_400_000
MINUTE = 60_000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    with kafkalog.open(tmp_path / "log") as opened:
        yield opened


def fill(log: KafkaLog, **config: str) -> None:
    """A topic with the key in clean, dirty, retired and active segments, among many others."""
    builder = LogBuilder(log, now_ms=NOW).topic("t", 2, **{"segment_bytes": 3_000, **config})
    for turn in range(3):
        rows = [(f"user-{n}", f"turn {turn} " * 9) for n in range(4700, 4760)]
        builder.append(*rows, (LONGER, f"{turn}"))
    log.clean("t", force=True, now_ms=NOW)
    for turn in range(3, 6):
        builder.append((KEY, f"turn {turn} " * 9), (LONGER, f"{turn}"))


def files_with(root: Path, key: str) -> list[str]:
    """The files that have a key's bytes, as grep sees it."""
    found = subprocess.run(
        ["grep", "-rlaF", "--", key, str(root)], check=False, capture_output=True, text=True
    )
    return found.stdout.splitlines()


def decoded_keys(root: Path) -> set[bytes]:
    """All keys of all files of batches below a root, as aiokafka decodes them."""
    found: set[bytes] = set()
    for path in root.rglob("*"):
        if path.is_file() and (".log" in path.name or path.name.endswith(".staged")):
            records = MemoryRecords(path.read_bytes())
            while records.has_next():
                found.update(
                    record.key for record in records.next_batch() if record.key is not None
                )
    return found


def is_nowhere(log: KafkaLog, key: str = KEY) -> bool:
    others = [
        path for path in files_with(log.root, key) if LONGER not in Path(path).read_text("latin1")
    ]
    return not others and key.encode() not in decoded_keys(log.root)


def sentences(erasure: Erasure) -> str:
    return "\n".join(f"{one.path.name}: {one.sentence}" for one in erasure.after.residuals)


# --- it is gone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_died", [False, True])
def test_no_power_cut_brings_a_file_with_the_key_back(
    log: KafkaLog, has_died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if a process that died had done all but its syncs, so the next one finds no key."""
    fill(log, compression_type="uncompressed")
    with Recorder(log.root) as recorder:
        if has_died:
            with monkeypatch.context() as patched:
                patched.setattr(files, "sync_directory", lambda path: None)
                log.erase("t", [KEY], now=True, now_ms=NOW)
        assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    for state in states(disk, random.Random(1)):
        for name, data in state.tree().items():
            assert KEY.encode() not in (data or b"").replace(LONGER.encode(), b""), name


def test_a_partition_without_its_directory_holds_back_no_other(log: KafkaLog) -> None:
    fill(log)
    (number,) = {
        file.file.partition
        for file in log.erase("t", [KEY], now_ms=NOW).before.files
        if file.found and file.file.kind is FileKind.LOG
    }
    assert number is not None
    shutil.rmtree(log.root / f"t-{1 - number}")
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    assert is_nowhere(log)


# --- what was replaced ----------------------------------------------------------------------------


def test_replaced_files_are_waited_for(log: KafkaLog) -> None:
    fill(log, delete_retention_ms="0", file_delete_delay_ms=str(MINUTE))
    times: list[int] = []
    log.erase("t", [KEY], now_ms=NOW, wait=times.append)
    assert log.erase("t", [KEY], now_ms=NOW, wait=times.append).is_erased
    began_ms = time.time_ns() // 1_000_000
    assert all(abs(until_ms - began_ms - MINUTE) < 10 * MINUTE for until_ms in times)
    assert is_nowhere(log)


def test_replaced_files_that_are_not_waited_for_are_found(log: KafkaLog) -> None:
    fill(log, file_delete_delay_ms=str(MINUTE))
    erasure = log.erase("t", [KEY], now_ms=NOW)
    retired = [one for one in erasure.after.residuals if one.path.name.endswith(".deleted")]
    assert retired
    for one in retired:
        changed_ms = one.path.stat().st_ctime_ns // 1_000_000
        assert one.until_ms == changed_ms + MINUTE
        assert "file.delete.delay.ms (1 minute)" in one.sentence


def test_who_reads_a_file_that_goes_reads_on(log: KafkaLog) -> None:
    fill(log)
    with directory_log_of(log).snapshot("t", 0, whole=True) as snapshot:
        end = snapshot.state.high_watermark
        assert log.erase(
            "t", [f"user-{n}" for n in range(4700, 4760)], now=True, now_ms=NOW
        ).is_erased
        schema = changelog_schema()
        assert sum(one.num_rows for one in snapshot.read(0, end, schema=schema)) > 0


# --- what stands in the way -----------------------------------------------------------------------


def test_a_staged_file_is_named_and_its_commit_brings_the_key_back(log: KafkaLog) -> None:
    fill(log)
    slug = "ab" * 16
    staged = LogBuilder(log).stage((KEY, "staged"), ("another", "staged"), writer_slug=slug)
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    (left,) = erasure.after.residuals
    assert left.path.name == staged.files[0].name
    assert f"writer {slug}, batch 0" in left.sentence
    modified_ms = left.path.stat().st_mtime_ns // 1_000_000
    assert left.until_ms == modified_ms + STAGED_RETENTION_MS

    directory_log_of(log).commit([staged], now_ms=NOW)
    assert KEY.encode() in latest_records(log)
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    assert is_nowhere(log)


def test_a_moment_that_somebody_reads_is_named_and_kept(log: KafkaLog) -> None:
    fill(log)
    clock_ms = time.time_ns() // 1_000_000
    with contextlib.ExitStack() as held:
        assert (
            pins.pin(
                log.root, Action("app", "one"), directory_log_of(log).state, clock_ms, held=held
            )
            is not None
        )
        erasure = log.erase("t", [KEY], now=True)
        assert not erasure.is_erased
        assert "A reader has pinned a snapshot" in sentences(erasure)
        assert KEY.encode() in decoded_keys(log.root)
    assert log.erase("t", [KEY], now=True).is_erased
    assert is_nowhere(log)


def test_what_a_dead_cleaning_left_goes(log: KafkaLog) -> None:
    fill(log)
    log.erase("t", [KEY], now=True, now_ms=NOW)
    record = Record(777, NOW, KEY.encode(), b"v")
    path = directory_log_of(log).partition_directory("t", 1) / f"{777:020d}.log.cleaned"
    path.write_bytes(batch_data([record], base_offset=777))
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    assert is_nowhere(log)


def test_another_cleaner_is_waited_for(log: KafkaLog) -> None:
    fill(log)
    (number,) = {one.file.partition for one in log.occurrences("t", [KEY]).files if one.found}
    assert number is not None
    found: list[Erasure] = []
    cleaner_lock = locks.FileLock(
        directory_log_of(log).partition_directory("t", number) / layout.CLEANER_LOCK
    )
    before = log.offsets("t")[number][1]
    with cleaner_lock.exclusive():
        erasing = threading.Thread(
            target=lambda: found.append(log.erase("t", [KEY], now=True, now_ms=NOW))
        )
        erasing.start()
        while log.offsets("t")[number][1] == before:  # its deletion comes before its cleaning
            time.sleep(0.01)
    erasing.join()
    assert found[0].is_erased
