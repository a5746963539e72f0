"""One record is the commit: all or nothing, once, whatever fails and wherever the process dies."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from kafkalog.errors import (
    CommitConflictError,
    InvalidInputError,
    LockedByBrokerError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.storage_engine.directory import commit, staged_directory
from kafkalog.storage_engine.directory.active_segment import ActiveSegment
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.writing import staging
from kafkalog.storage_engine.writing.staged_message import Run, StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.builders.batch_builder import at_times
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import pairs
from tests.unit.storage_engine.faults import Died, each_act

NOW_MS = 1_700_000_000_000


def offsets_are_dense(engine: DirectoryLog, topic: str = "t") -> bool:
    for partition, (start, end) in engine.offsets(topic).items():
        found = [o for b in engine.read(topic, partition) for o in b["offset"].to_pylist()]
        if found != list(range(start, end)):
            return False
    return True


def rows(*pairs: tuple[str, str | None], **columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([k.encode() for k, _ in pairs], pa.binary()),
            "value": pa.array([None if v is None else v.encode() for _, v in pairs], pa.binary()),
            **columns,
        }
    )


def stage(
    engine: DirectoryLog,
    batch: pa.RecordBatch,
    batch_id: int = 0,
    spark_partition: int = 0,
    topic: str = "t",
    **options: object,
) -> StagedMessage:
    number = {"batch_id": batch_id, "spark_partition": spark_partition}
    slug = writer_slug("query", "t")
    return LogBuilder(engine).to(topic).stage_tables([batch], writer_slug=slug, **number, **options)


def writer_at(batch_id: int) -> Writer:
    return Writer("query", "t", batch_id)


@pytest.fixture
def engine(tmp_path: Path) -> DirectoryLog:
    log = LogBuilder(tmp_path / "log")
    return log.topic("t", 3, segment_bytes=600, index_interval_bytes=100).engine


BATCH = rows(*[(f"k{n}", f"v{n}") for n in range(20)])


def test_committed_rows_are_read_by_another_process(engine: DirectoryLog) -> None:
    result = engine.commit([stage(engine, BATCH)], writer=writer_at(0), now_ms=NOW_MS)
    assert result.rows == 20 and not result.skipped
    other = DirectoryLog(engine.root, read_only=True)
    assert sorted(pairs(other)) == sorted((f"k{n}".encode(), f"v{n}".encode()) for n in range(20))


def test_a_batch_that_was_committed_is_dropped(
    engine: DirectoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    engine.commit([stage(engine, BATCH)], writer=writer_at(4), now_ms=NOW_MS)
    again = engine.commit([stage(engine, BATCH, 4)], writer=writer_at(4), now_ms=NOW_MS)
    assert again.skipped
    assert len(pairs(engine)) == 20
    assert not staged_names(engine)
    assert "committed already" in caplog.text


def test_a_retry_with_other_rows_is_warned_of(
    engine: DirectoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    engine.commit([stage(engine, BATCH)], writer=writer_at(4), now_ms=NOW_MS)
    engine.commit([stage(engine, rows(("a", "b")), 4)], writer=writer_at(4), now_ms=NOW_MS)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert "had 20 rows when it was committed, the retry has 1" in caplog.text


def test_a_batch_below_the_last_is_refused_with_both_ids_and_the_time(engine: DirectoryLog) -> None:
    engine.commit([stage(engine, BATCH)], writer=writer_at(57), now_ms=NOW_MS)
    with pytest.raises(
        CommitConflictError,
        match=r"this checkpoint is older than the log: committed 57 at \d\d:\d\d, got 3 \(",
    ):
        engine.commit([stage(engine, BATCH, 3)], writer=writer_at(3), now_ms=NOW_MS)
    assert len(pairs(engine)) == 20


def test_an_older_batch_is_written_when_told_to(engine: DirectoryLog) -> None:
    engine.commit([stage(engine, BATCH)], writer=writer_at(57), now_ms=NOW_MS)
    staged = [stage(engine, BATCH, 3)]
    assert not engine.commit(staged, writer=writer_at(3), reset_writer=True, now_ms=NOW_MS).skipped
    assert len(pairs(engine)) == 40
    assert engine.state().writers["query t"].batch_id == 3


def test_without_a_writer_every_commit_lands(engine: DirectoryLog) -> None:
    for _ in range(2):
        engine.commit([stage(engine, BATCH)], now_ms=NOW_MS)
    assert len(pairs(engine)) == 40


def test_writers_to_different_targets_do_not_know_of_each_other(engine: DirectoryLog) -> None:
    engine.commit([stage(engine, BATCH)], writer=Writer("app", "t", 1), now_ms=NOW_MS)
    result = engine.commit([stage(engine, BATCH)], writer=Writer("app", "u", 1), now_ms=NOW_MS)
    assert not result.skipped


def test_an_empty_batch_writes_nothing(engine: DirectoryLog) -> None:
    before = engine.state().number
    writer = StagedWriter(engine, engine.state(), now_ms=lambda: NOW_MS)
    engine.commit([writer.finish()], writer=writer_at(1), now_ms=NOW_MS)
    assert engine.state().number == before


def test_tasks_are_appended_in_ascending_spark_partition(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t")
    staged = [stage(engine, rows((f"k{n}", f"v{n}")), 0, n) for n in (2, 0, 1)]
    engine.commit(staged, now_ms=NOW_MS)
    assert [key for key, _ in pairs(engine)] == [b"k0", b"k1", b"k2"]


def test_rows_of_a_task_keep_their_order_within_a_partition(engine: DirectoryLog) -> None:
    engine.commit([stage(engine, rows(*[("k", f"{n}") for n in range(500)]))], now_ms=NOW_MS)
    assert [int(v) for _, v in pairs(engine) if v is not None] == list(range(500))


def test_a_damaged_staged_file_is_refused_before_anything_is_appended(engine: DirectoryLog) -> None:
    good, bad = stage(engine, BATCH, 0, 0), stage(engine, BATCH, 0, 1)
    path = engine.root / bad.files[0].name
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"the task staged .* CRC-32C .* run the batch again"):
        engine.commit([good, bad], now_ms=NOW_MS)
    assert pairs(engine) == []


def test_a_missing_staged_file_is_named(engine: DirectoryLog) -> None:
    staged = stage(engine, BATCH)
    (engine.root / staged.files[0].name).unlink()
    with pytest.raises(StorageError, match="the staged file is missing"):
        engine.commit([staged], now_ms=NOW_MS)


def test_a_topic_is_created_by_the_commit_that_first_writes_to_it(engine: DirectoryLog) -> None:
    new = NewTopic(2, {"cleanup.policy": "compact"})
    staged = stage(engine, BATCH, topic="u", new_topic=new)
    assert engine.topics() == ["t"]
    engine.commit([staged], create=new, now_ms=NOW_MS)
    assert len(pairs(engine, "u")) == 20
    assert len(engine.describe("u").partitions) == 2


def test_a_topic_created_meanwhile_with_other_partitions_is_an_error(engine: DirectoryLog) -> None:
    new = NewTopic(2, {})
    staged = stage(engine, BATCH, topic="u", new_topic=new)
    engine.create_topic("u", 3)
    with pytest.raises(StorageError, match="created meanwhile with 3 partitions"):
        engine.commit([staged], create=new, now_ms=NOW_MS)


def test_a_missing_key_on_a_compacted_topic_names_the_way_out(engine: DirectoryLog) -> None:
    keyless = pa.RecordBatch.from_pydict({"value": pa.array([b"v"], pa.binary())})
    with pytest.raises(InvalidInputError, match=r"topic\.cleanup\.policy=delete"):
        stage(engine, keyless)


def test_keyless_rows_are_refused_if_the_topic_has_become_compacted_since(
    engine: DirectoryLog,
) -> None:
    engine.create_topic("d", 1, {"cleanup.policy": "delete"})
    keyless = pa.RecordBatch.from_pydict({"value": pa.array([b"v"], pa.binary())})
    staged = stage(engine, keyless, topic="d")
    engine.alter_topic("d", {"cleanup.policy": "compact"})
    with pytest.raises(InvalidInputError, match="was made compacted while the batch was written"):
        engine.commit([staged], now_ms=NOW_MS)
    assert pairs(engine, "d") == []


def test_batches_that_hold_other_rows_than_announced_are_refused(engine: DirectoryLog) -> None:
    staged = stage(engine, BATCH)
    runs = tuple(run._replace(rows=run.rows + 1) for run in staged.runs)
    with pytest.raises(StorageError, match=r"a task announced \d+ rows, its batches hold \d+"):
        engine.commit([dataclasses.replace(staged, runs=runs)], now_ms=NOW_MS)
    assert pairs(engine) == []


@pytest.mark.parametrize("base_offset", [-(2**48), -1, 0, 1, 3, 2**40])
def test_a_batch_that_leaves_offsets_out_or_takes_them_twice_is_refused(
    engine: DirectoryLog, base_offset: int
) -> None:
    first, second = at_times(0, (1, 2)), at_times(base_offset, (3,))
    data = first.data + second.data
    run = Run("t", 0, -1, 0, len(data), max(1, base_offset + 1))
    ids = {"t": engine.describe("t").topic_id}
    staged = StagedMessage(topic_ids=ids, runs=(run,), rows=run.rows, data=data)
    with pytest.raises(StorageError, match=r"bytes that are no batch from offset 2 on"):
        engine.commit([staged], now_ms=NOW_MS)
    assert pairs(engine) == []


@pytest.mark.parametrize("large", [False, True], ids=["appended", "adopted"])
def test_where_offsets_end_the_commit_is_refused_and_the_log_goes_on_as_it_was(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    last = at_times(layout.INT64_MAX - 2, (5,))
    for partition in range(3):
        engine.append_raw("t", partition, last.data, now_ms=NOW_MS)
    before = pairs(engine)
    if large:
        monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 1)
        monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    staged = stage(engine, BATCH)
    assert {run.is_segment for run in staged.runs} == {large}
    expected = f"expected a log end of at most {layout.INT64_MAX}, found"
    with pytest.raises(StorageError, match=expected):
        engine.commit([staged], now_ms=NOW_MS)
    assert pairs(engine) == before
    engine.append("t", [("one", "more")], now_ms=NOW_MS)
    assert sorted(pairs(engine)) == sorted([*before, (b"one", b"more")])


def test_a_commit_whose_clean_up_fails_has_succeeded(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(engine, BATCH)

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(files, "remove", fail)
    assert engine.commit([staged], writer=writer_at(1), now_ms=NOW_MS).rows == 20


def test_a_time_before_1970_is_refused(engine: DirectoryLog) -> None:
    early = pa.array([-5000], pa.timestamp("us", tz="UTC"))
    with pytest.raises(InvalidInputError, match="-5 ms is before 1970"):
        engine.append("t", rows(("k", "v"), timestamp=early))


@pytest.mark.parametrize(
    ("config", "shift_ms", "is_taken"),
    [
        ({}, 3_600_000, True),
        ({}, 3_600_001, False),
        ({}, -NOW_MS, True),
        ({"message.timestamp.before.max.ms": "10"}, -10, True),
        ({"message.timestamp.before.max.ms": "10"}, -11, False),
        ({"message.timestamp.after.max.ms": "0"}, 1, False),
        ({"message.timestamp.after.max.ms": str(2**63 - 1)}, NOW_MS, True),
        ({"message.timestamp.type": "LogAppendTime"}, NOW_MS, True),
    ],
)
def test_rows_whose_time_is_too_far_from_the_clock_are_refused_with_the_range(
    tmp_path: Path, config: dict[str, str], shift_ms: int, is_taken: bool
) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, config)
    times = pa.array([NOW_MS, NOW_MS + shift_ms], pa.int64())
    batch = rows(("a", "1"), ("b", "2"), timestamp=times)
    if is_taken:
        engine.append("t", batch, now_ms=NOW_MS)
        return
    with pytest.raises(
        InvalidInputError, match=r"message\.timestamp\..*\.max\.ms allows \[\d+, \d+\]"
    ):
        engine.append("t", batch, now_ms=NOW_MS)
    assert pairs(engine) == []


def test_keyless_rows_are_spread_evenly_elsewhere(engine: DirectoryLog) -> None:
    engine.create_topic("d", 4, {"cleanup.policy": "delete"})
    keyless = pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 40, pa.binary())})
    engine.append("d", keyless)
    assert set(engine.offsets("d").values()) == {(0, 10)}


def test_a_partition_out_of_range_names_the_valid_ones(engine: DirectoryLog) -> None:
    with pytest.raises(InvalidInputError, match=r"3 is out of range.*partitions 0 to 2"):
        stage(engine, rows(("k", "v"), partition=pa.array([3], pa.int32())))


def test_a_given_partition_beats_the_partitioner(engine: DirectoryLog) -> None:
    given = pa.array([2, 2, None], pa.int32())
    engine.append("t", rows(("a", "1"), ("b", "2"), ("c", "3"), partition=given))
    assert engine.offsets("t")[2][1] >= 2


def test_an_unknown_topic_lists_those_there_are(engine: DirectoryLog) -> None:
    with pytest.raises(UnknownTopicError, match=r"topic 'nope' does not exist.*: t$"):
        engine.append("nope", [("k", "v")])


def test_timestamps_are_the_rows_own_or_now(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t")
    given = pa.array([1_234_000, None], pa.timestamp("us", tz="UTC"))
    engine.append("t", rows(("a", "1"), ("b", "2"), timestamp=given), now_ms=NOW_MS)
    (batch,) = engine.read("t", 0)
    assert batch["timestamp"].cast(pa.int64()).to_pylist() == [1_234_000, NOW_MS * 1000]


def test_log_append_time_is_the_clock_of_the_encoding_task(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 1, {"message.timestamp.type": "LogAppendTime"})
    given = pa.array([1_234_000], pa.timestamp("us", tz="UTC"))
    engine.append("t", rows(("a", "1"), timestamp=given), now_ms=NOW_MS)
    (batch,) = engine.read("t", 0)
    assert batch["timestamp"].cast(pa.int64()).to_pylist() == [NOW_MS * 1000]
    assert batch["timestampType"].to_pylist() == [1]


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_type_reads_back(tmp_path: Path, codec: str) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 2, {"compression.type": codec})
    engine.append("t", BATCH)
    assert len(pairs(engine)) == 20


# --- abort ---------------------------------------------------------------------------------------


def staged_names(engine: DirectoryLog) -> list[str]:
    return [path.name for path in engine.root.rglob(f"*{layout.STAGED}*")]


def test_abort_removes_what_was_staged_also_by_attempts_that_sent_no_message(
    engine: DirectoryLog,
) -> None:
    stage(engine, BATCH, 5, 1)
    message = stage(engine, BATCH, 5, 2)
    assert engine.abort([message, None], writer=writer_at(5))
    assert staged_names(engine) == []


def test_abort_never_undoes_what_is_published(engine: DirectoryLog) -> None:
    message = stage(engine, BATCH, 5)
    engine.commit([message], writer=writer_at(5), now_ms=NOW_MS)
    assert not engine.abort([message], writer=writer_at(5), now_ms=NOW_MS)
    assert len(pairs(engine)) == 20


@pytest.mark.parametrize("large", [False, True], ids=["appended", "adopted"])
def test_a_batch_that_comes_again_removes_what_the_attempt_that_committed_it_has_left(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 1)
        monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    stage(engine, BATCH, 5, 9)  # of an attempt that sent no message
    with monkeypatch.context() as died:
        died.setattr(commit, "remove_done", lambda *_: None)
        engine.commit([stage(engine, BATCH, 5, 1)], writer=writer_at(5), now_ms=NOW_MS)
    assert staged_names(engine)
    later = stage(engine, BATCH, 6, 1)
    kept = sorted(name for name in staged_names(engine) if "-6-" in name)
    assert engine.commit([stage(engine, BATCH, 5, 2)], writer=writer_at(5), now_ms=NOW_MS).skipped
    assert sorted(staged_names(engine)) == kept
    engine.commit([later], writer=writer_at(6), now_ms=NOW_MS)
    assert staged_names(engine) == []


def test_a_commit_removes_what_earlier_attempts_left_but_not_other_queries_files(
    engine: DirectoryLog,
) -> None:
    stage(engine, BATCH, 3, 9)
    kept = LogBuilder(engine).stage_tables([BATCH], writer_slug=writer_slug("other", "t"))
    engine.commit([stage(engine, BATCH, 4)], writer=writer_at(4), now_ms=NOW_MS)
    assert staged_names(engine) == [kept.files[0].name]


def test_old_staged_files_are_swept_after_seven_days(engine: DirectoryLog) -> None:
    stage(engine, BATCH)
    path = next(engine.root.glob(f"*{layout.STAGED}"))
    written_ms = int(path.stat().st_mtime * 1000)
    assert engine.sweep_staged(now_ms=written_ms + 6 * 86_400_000) == 0
    assert engine.sweep_staged(now_ms=written_ms + 8 * 86_400_000) == 1


# --- large runs ----------------------------------------------------------------------------------


@pytest.fixture
def large_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 500)
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)


def big(first: int, count: int = 60) -> pa.RecordBatch:
    return rows(*[(f"k{n}", f"v{n}" * 3) for n in range(first, first + count)])


@pytest.mark.usefixtures("large_runs")
def test_a_large_run_is_renamed_into_place_with_its_indexes(engine: DirectoryLog) -> None:
    engine.append("t", rows(("first", "1")))
    writer = StagedWriter(
        engine, engine.state(), now_ms=lambda: NOW_MS, writer_slug="a" * 32, batch_size=200
    )
    for n in range(5):
        writer.append("t", big(n * 60))
    message = writer.finish()
    assert any(run.is_segment for run in message.runs)
    engine.commit([message], now_ms=NOW_MS)
    assert staged_names(engine) == []
    assert offsets_are_dense(engine)
    assert len(pairs(engine)) == 301
    indexed = [path for path in engine.root.glob("t-*/*.index") if path.stat().st_size]
    assert indexed
    engine.append("t", rows(("last", "1")))
    assert offsets_are_dense(engine)


def test_what_is_published_stays_where_a_file_cannot_be_closed(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = ActiveSegment.close

    def fail(segment: ActiveSegment) -> None:
        close(segment)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ActiveSegment, "close", fail)
        engine.append("t", [("k", "v")])
    assert [value for _, value in pairs(engine)] == [b"v"]
    engine.append("t", [("k", "w")])
    assert [value for _, value in pairs(engine)] == [b"v", b"w"]


# --- dying and failing at every step -------------------------------------------------------------


def commit_batch(root: Path, batch_id: int, first: int) -> Callable[[], None]:
    engine = DirectoryLog(root)
    messages = [stage(engine, big(first + 30 * n, 30), batch_id, n) for n in range(2)]

    def work() -> None:
        engine.commit(messages, writer=writer_at(batch_id), now_ms=NOW_MS)

    return work


def prepare(root: Path) -> None:
    engine = LogBuilder(root).topic("t", 3, segment_bytes=900, index_interval_bytes=100).engine
    engine.commit([stage(engine, big(0), 0)], writer=writer_at(0), now_ms=NOW_MS)


EXPECTED = sorted((f"k{n}".encode(), (f"v{n}" * 3).encode()) for n in range(120))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("large", [False, True], ids=["appended", "adopted"])
@pytest.mark.parametrize("is_side_by_side", [False, True])
def test_a_process_that_dies_at_any_act_of_a_commit_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_side_by_side: bool, large: bool
) -> None:
    if is_side_by_side:
        monkeypatch.setattr(files, "_SIDE_BY_SIDE_MIN", 1)
    if large:
        monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 300)
        monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    prepare(tmp_path / "start")
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        if not each_act(commit_batch(root, 1, 60), n, Died(), after=True):
            break
        engine = DirectoryLog(root, read_only=True)
        assert len(pairs(engine)) in (60, 120), n
        commit_batch(root, 1, 60)()  # Spark runs the micro-batch again
        engine = DirectoryLog(root)
        assert sorted(pairs(engine)) == EXPECTED, n
        assert offsets_are_dense(engine), n
        shutil.rmtree(root)
    assert n > 10


@pytest.mark.parametrize("is_side_by_side", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_any_act_of_a_commit_that_fails_once_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_side_by_side: bool
) -> None:
    if is_side_by_side:
        monkeypatch.setattr(files, "_SIDE_BY_SIDE_MIN", 1)
    prepare(tmp_path / "start")
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        if not each_act(commit_batch(root, 1, 60), n, OSError(code, "failed")):
            break
        engine = DirectoryLog(root)
        assert len(pairs(engine)) in (60, 120), n
        engine.abort([], writer=writer_at(1), now_ms=NOW_MS)
        commit_batch(root, 1, 60)()
        assert sorted(pairs(engine)) == EXPECTED, n
        assert offsets_are_dense(engine), n
        shutil.rmtree(root)
    assert n > 10


def test_after_a_failed_sync_the_partition_goes_on_in_a_new_segment(
    engine: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.append("t", [("k", "v")] * 3)
    (partition,) = (p for p, (_, end) in engine.offsets("t").items() if end)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_file", fail)
        with pytest.raises(StorageError, match="Input/output"):
            engine.append("t", [("k", "w")])
    engine.append("t", [("k", "x")])
    assert engine.describe("t").partitions[partition].active_base == 3
    assert [v for _, v in pairs(engine)] == [b"v"] * 3 + [b"x"]


def test_a_segment_at_the_high_watermark_is_emptied_and_appended_to(engine: DirectoryLog) -> None:
    engine.append("t", [("k", "v")])
    (partition,) = (p for p, (_, end) in engine.offsets("t").items() if end)
    directory = engine.partition_directory("t", partition)
    (directory / layout.segment_file(1, layout.LOG)).write_bytes(b"left by a process that died")
    (directory / layout.segment_file(7, layout.LOG)).write_bytes(b"left by it, too")
    assert engine._journal.begin_work()  # as that process did
    engine.append("t", [("k", "w")])
    assert engine.describe("t").partitions[partition].active_base == 1
    assert not (directory / layout.segment_file(7, layout.LOG)).exists()
    assert [v for _, v in pairs(engine)] == [b"v", b"w"]


def test_a_file_shorter_than_recorded_is_a_storage_error(engine: DirectoryLog) -> None:
    engine.append("t", [("k", "v")])
    (partition,) = (p for p, (_, end) in engine.offsets("t").items() if end)
    log = engine.partition_directory("t", partition) / layout.segment_file(0, layout.LOG)
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"the journal records \d+ bytes, the file has \d+"):
        engine.append("t", [("k", "w")])
    with pytest.raises(StorageError):
        pairs(engine)


def test_a_partition_that_a_broker_has_loaded_is_not_written_to(engine: DirectoryLog) -> None:
    for partition in range(3):
        (engine.partition_directory("t", partition) / layout.CANARY).unlink()
    with pytest.raises(LockedByBrokerError, match="a Kafka broker has loaded this partition"):
        engine.append("t", [("k", "v")])
    assert pairs(engine) == []


def test_relaxed_topics_are_synced_when_so_many_rows_are_not(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 1, {"flush.messages": "3"})
    engine.append("t", [("k", "1")])
    engine.append("t", [("k", "2")])
    assert engine.state().unsynced == {("t", 0): (0, 0)}
    assert len(pairs(engine)) == 2
    engine.append("t", [("k", "3")])
    assert engine.state().unsynced == {}


def test_relaxed_topics_are_synced_by_the_first_commit_after_flush_ms(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 1, {"flush.ms": "1000"}, now_ms=NOW_MS)
    engine.append("t", [("k", "1")], now_ms=NOW_MS + 1)
    engine.append("t", [("k", "2")], now_ms=NOW_MS + 999)
    assert engine.state().unsynced
    engine.append("t", [("k", "3")], now_ms=NOW_MS + 1000)
    assert not engine.state().unsynced


def test_flush_ms_counts_too_for_topics_that_others_are_committed_after(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 1, {"flush.ms": "1000"}, now_ms=NOW_MS)
    engine.create_topic("patient", 1, {"flush.messages": "1000"}, now_ms=NOW_MS)
    engine.append("patient", [("k", "1")], now_ms=NOW_MS + 3000)
    assert set(engine.state().unsynced) == {("patient", 0)}
    engine.append("t", [("k", "1")], now_ms=NOW_MS + 3001)
    assert not engine.state().unsynced
    engine.append("t", [("k", "1")], now_ms=NOW_MS + 3002)
    assert set(engine.state().unsynced) == {("t", 0)}
    engine.append("patient", [("k", "1")], now_ms=NOW_MS + 4001)
    assert not engine.state().unsynced


def test_flush_ms_holds_when_a_clock_that_was_ahead_is_back(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path / "log")
    engine.create_topic("t", 1, {"flush.ms": "1000"}, now_ms=NOW_MS + 10 * 86_400_000)
    engine.append("t", [("k", "1")], now_ms=NOW_MS)
    assert not engine.state().unsynced


def test_close_syncs_what_relaxed_commits_left(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path / "log") as engine:
        engine.create_topic("t", 1, {"flush.ms": "100000"})
        engine.append("t", [("k", "1")])
        assert engine.state().unsynced
    assert not DirectoryLog(tmp_path / "log").state().unsynced
