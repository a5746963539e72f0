"""What tasks stage is what a commit appends, however it is cut into portions, parts and pieces."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.directory import commit, staged_contents, staged_directory
from kafkalog.storage_engine.directory.appender import Appender
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.staged_contents import StagedContents
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.fs import file_system, files
from kafkalog.storage_engine.fs.file_system import FileSystem
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.writing import staged_topic, staging
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.builders.log_builder import LogBuilder

NOW_MS = 1_700_000_000_000
PARTITIONS = 5


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DirectoryLog]:
    with LogBuilder(tmp_path / "log").topic("t", PARTITIONS) as log:
        yield directory_log_of(log)


def rows(first: int, count: int, *, wrong: bool = False) -> pa.RecordBatch:
    numbers = range(first, first + count)
    partitions = [PARTITIONS if wrong else number * number % PARTITIONS for number in numbers]
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % number for number in numbers]),
            "value": pa.array([b"v%d" % number * 5 for number in numbers]),
            "partition": pa.array(partitions, pa.int32()),
        }
    )


def stage(
    engine: DirectoryLog, task: int, batches: Iterable[pa.RecordBatch], **options: Any
) -> StagedMessage:
    return LogBuilder(engine).stage_tables(
        batches, writer_slug="a" * 32, spark_partition=task, **options
    )


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_task_syncs_only_a_file_that_the_commit_renames(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    if is_renamed:
        monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 1)
        monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    synced = []

    class Noted(FileSystem):
        def fsync(self, fd: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
            super().fsync(fd)

    with file_system.replaced(Noted()):
        stage(engine, 0, [rows(0, 50)])
    assert (layout.STAGED in synced) == is_renamed


def keys(engine: DirectoryLog) -> list[list[bytes]]:
    """Return the keys of each partition, whose offsets must be dense."""
    found = []
    for partition, (_, end) in engine.offsets("t").items():
        batches = list(engine.read("t", partition))
        assert [o for b in batches for o in b["offset"].to_pylist()] == list(range(end))
        found.append([key for b in batches for key in b["key"].to_pylist()])
    return found


def expected(numbers: range) -> list[list[bytes]]:
    return [
        [b"k%d" % number for number in numbers if number * number % PARTITIONS == partition]
        for partition in range(PARTITIONS)
    ]


@pytest.mark.parametrize("portion", [1, 16 << 20])
@pytest.mark.parametrize("pending", [0, 128 << 20])
@pytest.mark.parametrize("piece", [200, 1 << 20])
@pytest.mark.parametrize("kept", [0, 1500, 32 << 20])
def test_rows_keep_their_order_however_they_are_cut(
    engine: DirectoryLog,
    monkeypatch: pytest.MonkeyPatch,
    portion: int,
    pending: int,
    piece: int,
    kept: int,
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE", portion)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", pending)
    monkeypatch.setattr(staged_contents, "_PIECE_SIZE", piece)
    monkeypatch.setattr(staged_contents, "_KEPT_SIZE", kept)
    if piece == 200:
        monkeypatch.setattr(commit, "_LARGE_SIZE", 0)  # partitions are appended to side by side
    messages = [
        stage(engine, task, [rows(task * 60 + n * 20, 20) for n in range(3)], batch_size=300)
        for task in range(4)
    ]
    engine.commit(list(reversed(messages)), now_ms=NOW_MS)
    assert keys(engine) == expected(range(240))


@pytest.mark.parametrize("limit", [8, 1_000])
def test_partitions_are_appended_to_side_by_side_if_so_many_files_may_be_open(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    threads = set[int]()
    append = Appender.append

    def noted(appender: Appender, runs: Iterable[tuple[int, Iterable[Buffer]]]) -> None:
        threads.add(threading.get_ident())
        waiting.wait()
        append(appender, runs)

    wanted = 1 if limit == 8 else len({number * number % PARTITIONS for number in range(240)})
    waiting = threading.Barrier(wanted, timeout=120)
    monkeypatch.setattr(commit, "_LARGE_SIZE", 0)
    monkeypatch.setattr(files, "descriptor_limit", lambda: limit)
    monkeypatch.setattr(Appender, "append", noted)
    engine.commit([stage(engine, 0, [rows(0, 240)])], now_ms=NOW_MS)
    assert len(threads) == wanted
    assert keys(engine) == expected(range(240))


def test_rows_that_are_refused_while_others_come_fail_the_task(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    with pytest.raises(InvalidInputError, match="out of range"):
        stage(engine, 0, [rows(0, 5), rows(5, 5, wrong=True), rows(10, 5), rows(15, 5)])
    assert list(engine.root.glob(f"*{layout.STAGED}")) == []


def test_a_task_leaves_one_file_whatever_its_partitions(engine: DirectoryLog) -> None:
    message = stage(engine, 0, [rows(0, 500)])
    assert len(message.files) == 1
    assert [run.partition for run in message.runs] == [0, 1, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=40)), min_size=1, max_size=30),
    st.sampled_from([0, 3]),
    st.integers(61, 300),
)
def test_groups_are_encoded_as_each_alone(
    items: list[tuple[int, bytes]], codec: int, batch_size: int
) -> None:
    numbers = np.array([group for group, _ in items])
    value = pa.array([content for _, content in items])
    times = np.arange(len(items)) * 1000
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "codec": codec,
        "level": None,
        "timestamp_type": 0,
        "max_message_bytes": 1 << 20,
    }
    chosen = [np.flatnonzero(numbers == group) for group in np.unique(numbers)]
    starts = np.cumsum([0, *(len(each) for each in chosen[:-1])])
    together = records.encode(
        None, value, None, times, np.concatenate(chosen), groups=starts, **options
    )
    alone = [records.encode(None, value, None, times, each, **options) for each in chosen]
    assert bytes(together.data) == b"".join(bytes(each.data) for each in alone)
    assert together.counts == [count for each in alone for count in each.counts]
    assert together.ends == np.cumsum([len(each.counts) for each in alone]).tolist()


@pytest.mark.parametrize("count", [1, 2, 7, 70_000])
def test_rows_are_sorted_by_partition_and_stay_in_order(count: int) -> None:
    from kafkalog.storage_engine.writing.staged_topic import _by_partition

    chosen = np.random.default_rng(1).integers(0, count, 500).astype(np.int32)
    order, numbers, counts = _by_partition(chosen, count)
    assert order.tolist() == sorted(range(500), key=lambda row: chosen[row])
    assert numbers == sorted(set(chosen.tolist()))
    assert counts.tolist() == [np.count_nonzero(chosen == n) for n in numbers]


@pytest.mark.parametrize("segment_run", [1, 400, 1500])
def test_rows_keep_their_order_where_some_partitions_become_segments(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, segment_run: int
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", segment_run)
    monkeypatch.setattr(staged_topic, "LARGE_RUN_SIZE", segment_run // 4)
    monkeypatch.setattr(staged_topic, "LARGE_BATCH_SIZE", 700)
    messages = [
        stage(engine, task, [rows(task * 80 + n * 8, 8) for n in range(10)], batch_size=200)
        for task in range(2)
    ]
    assert any(run.is_segment for message in messages for run in message.runs)
    engine.commit(messages, now_ms=NOW_MS)
    assert keys(engine) == expected(range(160))


def test_memory_that_runs_share_counts_as_long_as_one_of_them_waits(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is written leaves its memory to those that were encoded together with it."""
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 5_000)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 10_000)
    monkeypatch.setattr(staged_topic, "LARGE_RUN_SIZE", 500)
    writer = StagedWriter(engine, engine.state(), now_ms=lambda: NOW_MS, writer_slug="a" * 32)
    held = []
    for n in range(25):
        # Two large runs, of which one is a segment soon, and one stays below that for long.
        partitions = [0] * (10 if n == 0 else 80) + [1] * (20 if n == 0 else 1)
        value = pa.array([b"x" * 30] * len(partitions))
        writer.append(
            "t", pa.record_batch({"key": value, "value": value, "partition": pa.array(partitions)})
        )
        writer._wait()
        runs = writer._topics["t"].pending.values()
        blocks = {id(part.data.obj): part.data.obj for run in runs for part in run.parts}
        held.append(sum(memoryview(block).nbytes for block in blocks.values()))
    writer.discard()
    assert max(held) < 20_000


def test_what_is_appended_of_a_large_file_is_what_was_verified(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_contents, "_KEPT_SIZE", 0)
    monkeypatch.setattr(staged_contents, "_PIECE_SIZE", 150)
    message = stage(engine, 0, [rows(0, 50)], batch_size=200)
    path = engine.root / message.files[0].name
    whole = path.read_bytes()
    contents = StagedContents(engine.root)
    contents.verify(message)
    for run in message.runs:
        got = b"".join(bytes(piece) for piece in contents.pieces(message, run))
        assert got == whole[run.position : run.position + run.size]
        for changed in (run.position, run.position + run.size - 1):
            path.write_bytes(whole[:changed] + bytes([whole[changed] ^ 1]) + whole[changed + 1 :])
            with pytest.raises(StorageError, match="has changed while it was committed"):
                list(contents.pieces(message, run))
        path.write_bytes(whole)


def test_an_attempt_whose_segment_a_commit_has_removed_leaves_no_index(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 1)
    monkeypatch.setattr(staged_topic, "LARGE_RUN_SIZE", 1)
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    created = files.create

    def removed_meanwhile(path: Path, data: bytes) -> None:
        for staged in engine.root.rglob(f"kl-*{layout.STAGED}"):
            staged.unlink()
        created(path, data)

    monkeypatch.setattr(files, "create", removed_meanwhile)
    with pytest.raises(StorageError, match="was removed while it was written"):
        stage(engine, 0, [rows(0, 50), rows(50, 50)])
    assert list(engine.root.rglob("kl-*.staged*")) == []


def test_a_small_file_is_read_once(engine: DirectoryLog) -> None:
    message = stage(engine, 0, [rows(0, 50)])
    contents = StagedContents(engine.root)
    contents.verify(message)
    path = engine.root / message.files[0].name
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    got = b"".join(b"".join(contents.pieces(message, run)) for run in message.runs)
    assert got == whole


def is_encoding() -> bool:
    return any(thread.name.startswith("kafkalog-staging") for thread in threading.enumerate())


def nameless_header() -> pa.RecordBatch:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.record_batch(
        {
            "key": pa.array([b"k"]),
            "value": pa.array([b"v"]),
            "headers": pa.array([[{"key": None, "value": b"h"}]], headers),
        }
    )


def too_large() -> pa.RecordBatch:
    return pa.record_batch({"key": pa.array([b"k"]), "value": pa.array([bytes(2 << 20)])})


@pytest.mark.parametrize("wrong", [nameless_header, too_large])
def test_a_refused_record_ends_the_encoder_and_leaves_no_file(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    with pytest.raises(InvalidInputError, match=r"topic 't': row 0: "):
        stage(engine, 0, [rows(0, 50), rows(50, 50), wrong(), rows(100, 50)])
    assert not is_encoding()
    assert list(engine.root.rglob("kl-*.staged")) == []


def test_a_full_disk_ends_the_encoder_and_leaves_no_file(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, data: bytes, position: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", fail)
        with pytest.raises(OSError, match="No space left"):
            stage(engine, 0, [rows(n, 50) for n in range(5)])
    assert not is_encoding()
    assert list(engine.root.rglob("kl-*.staged")) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_task_that_is_stopped_waits_for_its_encoder_and_leaves_no_file(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Nothing may write to a descriptor that is closed, and another file's by then."""
    write_at, ended = files.write_at, list[int]()

    def slow(fd: int, data: bytes, position: int) -> None:
        time.sleep(0.3)
        write_at(fd, data, position)
        ended.append(position)

    def stopped() -> Iterator[pa.RecordBatch]:
        yield rows(0, 50)
        yield rows(50, 50)
        raise kind

    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", slow)
        with pytest.raises(kind):
            stage(engine, 0, stopped())
        assert not is_encoding()
        assert ended
    assert list(engine.root.rglob("kl-*.staged")) == []


def test_no_more_than_one_portion_waits_for_a_slow_disk(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_at, taken, written = files.write_at, list[int](), list[int]()

    def slow(fd: int, data: bytes, position: int) -> None:
        time.sleep(0.05)
        write_at(fd, data, position)
        written.append(len(taken))

    def given() -> Iterator[pa.RecordBatch]:
        for n in range(8):
            taken.append(n)
            yield rows(n * 50, 50)

    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    monkeypatch.setattr(files, "write_at", slow)
    stage(engine, 0, given())
    # While portion n is written, n + 1 has been taken, and n + 2 is asked for at most.
    assert all(count <= n + 3 for n, count in enumerate(written)), written


def test_a_partition_beyond_32_bits_is_out_of_range(engine: DirectoryLog) -> None:
    value = pa.array([b"v"])
    far = pa.record_batch({"key": value, "value": value, "partition": pa.array([1 << 32])})
    with pytest.raises(InvalidInputError, match="4294967296 is out of range"):
        stage(engine, 0, [far])
