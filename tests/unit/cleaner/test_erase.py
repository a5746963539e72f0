"""Keys that are erased: no file has them afterwards, as other tools see it, and others stay."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from aiokafka.record.memory_records import MemoryRecords

import kafkalog
from kafkalog.erasure.erase import Erasure
from kafkalog.erasure.topic_files import FileKind
from kafkalog.errors import InvalidInputError
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
from tests.unit.cleaner.transactional_log import Log

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


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_nothing_has_the_key_afterwards(log: KafkaLog, codec: str) -> None:
    fill(log, compression_type=codec)
    before = latest_records(log)
    assert KEY.encode() in decoded_keys(log.root)
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    kinds = {file.file.kind for file in erasure.before.files if file.found}
    assert {FileKind.LOG, FileKind.RETIRED} <= kinds
    assert erasure.is_erased
    assert is_nowhere(log)
    before.pop(KEY.encode())
    assert latest_records(log) == before


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


def test_the_key_of_a_larger_one_stays(log: KafkaLog) -> None:
    fill(log)
    log.erase("t", [KEY], now=True, now_ms=NOW)
    assert LONGER.encode() in decoded_keys(log.root)
    erasure = log.erase("t", [LONGER], now=True, now_ms=NOW)
    assert erasure.is_erased
    assert files_with(log.root, KEY) == []


def test_many_keys_are_erased_at_once(log: KafkaLog) -> None:
    fill(log)
    keys = [f"user-{n}" for n in range(4700, 4730)]
    erasure = log.erase("t", keys, now=True, now_ms=NOW)
    assert erasure.is_erased
    assert len(erasure.digests) == 30
    assert sum(end - first for first, end in erasure.deletions.values()) == 30
    assert decoded_keys(log.root).isdisjoint(key.encode() for key in keys)
    assert b"user-4730" in decoded_keys(log.root)


def test_the_empty_key_is_a_key(log: KafkaLog) -> None:
    log.create_topic("t")
    log.append("t", [("", "of nobody"), ("a", "1")], now_ms=NOW)
    assert log.erase("t", [""], now=True, now_ms=NOW).is_erased
    assert decoded_keys(log.root) == {b"a"}


@pytest.mark.parametrize("keys", [[], [None], "key", b"key"])
def test_what_is_no_list_of_keys_is_refused(log: KafkaLog, keys: list[str]) -> None:
    log.create_topic("t")
    with pytest.raises(InvalidInputError, match="key"):
        log.erase("t", keys, now_ms=NOW)


def test_keys_are_not_shown_in_the_clear(log: KafkaLog) -> None:
    fill(log)
    assert KEY not in repr(log.erase("t", [KEY], now_ms=NOW))


# --- the deletions --------------------------------------------------------------------------------


def test_a_key_is_deleted_wherever_it_was_written(log: KafkaLog) -> None:
    log.create_topic("t", 4)
    rows: Mapping[str, pa.Array] = {
        "key": pa.array([b"k", b"k", b"k", b"other"], pa.binary()),
        "value": pa.array([b"v"] * 4, pa.binary()),
        "partition": pa.array([0, 1, 3, 2], pa.int32()),
    }
    log.append("t", pa.RecordBatch.from_pydict(rows), now_ms=NOW)
    number = directory_log_of(log).state().number
    erasure = log.erase("t", ["k"], now_ms=NOW)
    assert erasure.deletions == {0: (1, 2), 1: (1, 2), 3: (1, 2)}
    assert log.offsets("t")[2] == (0, 1)
    written = [one for one in range(4) if log.offsets("t")[one][1] == 2]
    assert written == [0, 1, 3]
    assert number < directory_log_of(log).state().number
    assert log.erase("t", ["k"], now=True, now_ms=NOW).is_erased


def test_nothing_is_written_for_a_key_that_is_nowhere(log: KafkaLog) -> None:
    fill(log)
    before = log.offsets("t")
    erasure = log.erase("t", ["user-9999"], now_ms=NOW)
    assert (erasure.deletions, erasure.cleanings, erasure.is_erased) == ({}, (), True)
    assert log.offsets("t") == before


def test_a_deletion_stays_until_its_horizon_and_is_not_written_again(log: KafkaLog) -> None:
    fill(log, delete_retention_ms=str(DAY))
    times: list[int] = []
    first = log.erase("t", [KEY], now_ms=NOW, wait=times.append)
    (left,) = first.after.residuals
    assert left.until_ms == NOW + DAY
    assert "the deletion itself" in left.sentence
    assert decoded_keys(log.root) & {KEY.encode()}
    assert latest_records(log).get(KEY.encode()) is None

    early = log.erase("t", [KEY], now_ms=NOW + DAY - 1, wait=times.append)
    assert early.deletions == {}
    assert [one.until_ms for one in early.after.residuals] == [NOW + DAY]

    late = log.erase("t", [KEY], now_ms=NOW + DAY, wait=times.append)
    assert (late.deletions, late.is_erased) == ({}, True)
    assert is_nowhere(log)


def test_with_now_the_deletions_of_other_keys_stay(log: KafkaLog) -> None:
    fill(log)
    log.append("t", [(f"user-{n}", None) for n in range(4712, 4740)], now_ms=NOW)
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    kept = decoded_keys(log.root)
    assert {f"user-{n}".encode() for n in range(4712, 4740)} <= kept
    assert KEY.encode() not in kept


def test_a_key_that_was_deleted_and_cleaned_before_goes_now(log: KafkaLog) -> None:
    """Its deletion lies in the clean section, and nothing is dirty."""
    fill(log)
    log.append("t", [(KEY, None)], now_ms=NOW)
    log.clean("t", force=True, now_ms=NOW)
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    assert (erasure.deletions, erasure.is_erased) == ({}, True)
    assert is_nowhere(log)


def test_a_key_that_comes_back_is_found(log: KafkaLog) -> None:
    fill(log)
    came_back: list[object] = []

    def progress(step: str, done: int, of: int) -> None:
        if step == "looking again" and not came_back:
            came_back.append(log.append("t", [(KEY, "back")], now_ms=NOW))

    # Files are read in the order of their paths: the partition's come after the root's.
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW, progress=progress)
    assert not erasure.is_erased
    assert "1 record of 1 key" in sentences(erasure)
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased


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


def test_a_staged_file_that_is_committed_during_the_last_look_is_no_proof(log: KafkaLog) -> None:
    fill(log)
    staged = LogBuilder(log).stage((KEY, "staged"), writer_slug="ab" * 16)
    committed: list[object] = []

    def progress(step: str, done: int, of: int) -> None:
        if step == "looking again" and done == of and not committed:
            committed.append(directory_log_of(log).commit([staged], now_ms=NOW))

    erasure = log.erase("t", [KEY], now=True, now_ms=NOW, progress=progress)
    assert committed
    (left,) = erasure.after.residuals
    assert left.path.name.endswith(".log")
    assert left.remedy == "stop the writers of the key, then erase again"
    assert erasure.after.record_number == directory_log_of(log).state().number


def test_a_staged_file_that_is_given_up_is_no_trace_any_more(log: KafkaLog) -> None:
    fill(log)
    staged = LogBuilder(log).stage((KEY, "staged"), writer_slug="ab" * 16)
    assert not log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    directory_log_of(log).abort([staged], now_ms=NOW)
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


def test_a_lag_is_named(log: KafkaLog) -> None:
    fill(log, min_compaction_lag_ms=str(DAY))
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    lags = [one for one in erasure.after.residuals if "min.compaction.lag.ms" in one.sentence]
    assert lags
    assert {one.until_ms for one in lags} == {NOW + DAY}
    assert log.erase("t", [KEY], now=True, now_ms=NOW + DAY).is_erased


def test_a_damaged_file_is_no_proof(log: KafkaLog) -> None:
    fill(log)
    path = max(
        directory_log_of(log).partition_directory("t", 0).glob("*.log"),
        key=lambda one: one.stat().st_size,
    )
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    erasure = log.erase("t", ["user-9999"], now=True, now_ms=NOW)
    assert not erasure.is_erased
    assert f"{path.name}: its content is unknown: at byte 0" in sentences(erasure)
    path.write_bytes(good)
    assert log.erase("t", ["user-9999"], now=True, now_ms=NOW).is_erased


def test_a_partition_that_cannot_be_cleaned_says_why(log: KafkaLog) -> None:
    fill(log)
    (number,) = {one.file.partition for one in log.occurrences("t", [KEY]).files if one.found}
    assert number is not None
    path = max(
        one
        for one in directory_log_of(log).partition_directory("t", number).glob("*.log")
        if one.stat().st_size
    )
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    assert not erasure.is_erased
    assert erasure.deletions == {}
    assert "It is uncleanable" in sentences(erasure)
    path.write_bytes(good)
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased


def test_records_of_aborted_transactions_go_and_control_records_are_none(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log")
    log.transact(1, 7, 8)
    log.abort(1)
    log.data(9)
    with kafkalog.open(tmp_path / "log") as opened:
        found = opened.occurrences("t", [b"7", b"\0\0\0\0"], now_ms=0)
        assert dict(found.by_key) == {0: 1}
        erasure = opened.erase("t", [b"7"], now=True, now_ms=0)
        assert (erasure.deletions, erasure.is_erased) == ({}, True)
    assert log.keys() == [9]


def test_an_open_transaction_is_named_and_outlives_no_deletion(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log")
    log.data(7)
    log.transact(1, 7)
    with kafkalog.open(tmp_path / "log") as opened:
        erasure = opened.erase("t", [b"7"], now=True, now_ms=0)
        assert not erasure.is_erased
        assert "The transaction of producer 1 is open from offset 1" in sentences(erasure)
        log.end += 1  # the deletion
        log.commit(1)
        assert opened.erase("t", [b"7"], now=True, now_ms=0).is_erased
        assert latest_records(opened) == {}


def test_an_aborted_deletion_is_none(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log")
    log.data(7)
    log.data(7, producer=1, transactional=True, tombstones=True)
    log.abort(1)
    with kafkalog.open(tmp_path / "log") as opened:
        erasure = opened.erase("t", [b"7"], now=True, now_ms=0)
        assert (erasure.deletions, erasure.is_erased) == ({0: (3, 4)}, True)


def test_what_a_dead_cleaning_left_goes(log: KafkaLog) -> None:
    fill(log)
    log.erase("t", [KEY], now=True, now_ms=NOW)
    record = Record(777, NOW, KEY.encode(), b"v")
    path = directory_log_of(log).partition_directory("t", 1) / f"{777:020d}.log.cleaned"
    path.write_bytes(batch_data([record], base_offset=777))
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    assert is_nowhere(log)


@pytest.mark.parametrize("step", ["cleaning", "looking again"])
def test_an_erasure_that_was_interrupted_goes_on(log: KafkaLog, step: str) -> None:
    fill(log)

    def interrupt(at: str, done: int, of: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.erase("t", [KEY], now=True, now_ms=NOW, progress=interrupt)
    erasure = log.erase("t", [KEY], now=True, now_ms=NOW)
    assert (erasure.deletions, erasure.is_erased) == ({}, True)
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


@pytest.mark.parametrize("policy", ["delete", ""])
def test_what_is_not_compacted_is_refused_in_one_line(log: KafkaLog, policy: str) -> None:
    log.create_topic("t", config={"cleanup.policy": policy})
    log.append("t", [(KEY, "1")], now_ms=NOW)
    with pytest.raises(InvalidInputError, match=r"t: its cleanup.policy is .*retention.ms") as told:
        log.erase("t", [KEY], now_ms=NOW)
    assert "\n" not in str(told.value)
    assert log.occurrences("t", [KEY], now_ms=NOW).found == 1


def test_records_below_the_log_start_go_too(log: KafkaLog) -> None:
    log.create_topic("t", config={"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    log.append("t", [(KEY, "1"), ("other", "1"), ("other", "2")], now_ms=NOW)
    log.delete_records("t", 0, 2, now_ms=NOW)
    assert KEY.encode() in decoded_keys(log.root)
    assert log.erase("t", [KEY], now=True, now_ms=NOW).is_erased
    assert is_nowhere(log)
