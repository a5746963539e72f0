"""Batches appended as they are: what stays, what is refused, and that it is all or nothing."""

from __future__ import annotations

import errno
import io
import os
import shutil
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import CorruptBatchError, InvalidInputError, KafkaLogError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory import raw_append
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.transactions import producer_snapshot
from tests.builders.batch_builder import ABORT, COMMIT, BuiltBatch, at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import offsets, state_of
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.raw_log import Model

NOW_MS = 1_700_000_000_000
UNSTABLE = ("read_committed", "read_uncommitted")


def raw(engine: DirectoryLog, *batches: BuiltBatch) -> tuple[int, int]:
    result = engine.append_raw("t", 0, joined(batches), now_ms=NOW_MS)
    return result.offsets["t", 0]


def own(engine: DirectoryLog, count: int = 1) -> None:
    engine.append("t", [("k", "own")] * count, now_ms=NOW_MS)


def segment_bytes(engine: DirectoryLog, suffix: str = ".log") -> dict[int, bytes]:
    return {
        int(path.name.split(".")[0]): path.read_bytes()
        for path in sorted((engine.root / "t-0").glob(f"*{suffix}"))
    }


def txn_entries(engine: DirectoryLog) -> list[tuple[int, int, int, int]]:
    return [
        entry[1:]
        for data in segment_bytes(engine, ".txnindex").values()
        for entry in struct.iter_unpack(">hqqqq", data)
    ]


def epochs(engine: DirectoryLog) -> list[tuple[int, int]]:
    return checkpoints.read_leader_epochs(engine.root / "t-0")


def snapshots(engine: DirectoryLog) -> list[int]:
    return producer_snapshot.snapshot_offsets(engine.root / "t-0")


def named(engine: DirectoryLog) -> dict[int, tuple[int, ...]]:
    """What the snapshot that the journal names says of each producer."""
    offset = state_of(engine).producer_snapshot
    if offset < 0:
        return {}
    data = (engine.root / "t-0" / f"{offset:020d}.snapshot").read_bytes()
    return {entry[0]: entry[1:] for entry in struct.iter_unpack(">qhiqiqiq", data[10:])}


# --- what stays as it is -------------------------------------------------------------------------


def test_batches_are_appended_byte_by_byte(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    batches = [at_times(0, (5, 6), 9, 3, 40), at_times(2, (7,), leader_epoch=4)]
    assert raw(engine, *batches) == (0, 3)
    assert segment_bytes(engine) == {0: joined(batches)}
    assert offsets(engine) == [0, 1, 2]


def test_rows_are_the_records_of_data_batches(tmp_path: Path) -> None:
    source = joined([at_times(0, (5, 6), 9, transactional=True), marker(2, COMMIT, 9)])
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    assert engine.append_raw("t", 0, source, now_ms=NOW_MS).rows == 2


def test_gaps_in_the_offsets_stay(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(7), at_times(100, (1, 2)))
    own(engine)
    raw(engine, at_times(10_000_000_000))
    assert offsets(engine) == [7, 100, 101, 102, 10_000_000_000]
    assert state_of(engine).high_watermark == 10_000_000_001


def test_a_file_a_stream_and_bytes_are_sources(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path / "log").topic(policy="delete").engine
    path = tmp_path / "backup.log"
    path.write_bytes(at_times(0).data)
    engine.append_raw("t", 0, path)
    engine.append_raw("t", 0, io.BytesIO(at_times(1).data))
    engine.append_raw("t", 0, memoryview(at_times(2).data))
    assert offsets(engine) == [0, 1, 2]
    assert not list(tmp_path.rglob("*.staged"))


def test_a_compacted_topic_takes_records_without_a_key_as_a_follower_does(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="compact").engine
    raw(engine, at_times(0, keyless=True))
    assert offsets(engine) == [0]


def test_an_empty_source_appends_nothing(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    number = engine.state().number
    for source in (b"", io.BytesIO()):
        result = engine.append_raw("t", 0, source)
        assert (result.rows, result.offsets) == (0, {})
    assert engine.state().number == number


# --- what is refused -----------------------------------------------------------------------------


def refused(
    engine: DirectoryLog, source: raw_append.Source, kind: type[Exception], words: str
) -> None:
    before = files_of(engine)
    with pytest.raises(kind, match=words):
        engine.append_raw("t", 0, source, now_ms=NOW_MS)
    assert files_of(engine) == before


def files_of(engine: DirectoryLog) -> dict[str, bytes]:
    """Every file but locks; an index without entries is as good as none."""
    return {
        path.name: data
        for path in (engine.root / "t-0").iterdir()
        if (data := path.read_bytes()) or path.suffix == ".log"
    }


def test_a_batch_below_the_log_end_is_refused_with_both_offsets(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    own(engine, 5)
    words = "at byte 0: the batch begins at offset 3, below the log end 5 of t-0"
    refused(engine, at_times(3).data, InvalidInputError, words)


def test_a_source_whose_offsets_fall_is_damaged(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    size = len(at_times(8).data)
    source = joined([at_times(8), at_times(8)])
    refused(engine, source, CorruptBatchError, f"at byte {size}: expected offsets from 9 on")


def test_a_wrong_checksum_is_refused_with_its_position(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    first = at_times(0).data
    second = bytearray(at_times(1).data)
    second[-1] ^= 1
    path = tmp_path / "backup"
    path.write_bytes(first + second)
    refused(engine, path, CorruptBatchError, f"backup: at byte {len(first)}: expected checksum")


def test_a_source_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    own(engine)
    first = at_times(1).data
    source = first + at_times(2).data
    for size in range(1, len(source)):
        if size != len(first):
            refused(engine, source[:size], CorruptBatchError, "at byte ")
    engine.append_raw("t", 0, source)
    assert offsets(engine) == [0, 1, 2]


def test_a_byte_that_is_flipped_is_refused_unless_it_lies_outside_the_checksum(
    tmp_path: Path,
) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    good = at_times(0, (1, 2)).data
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x81
        if place < 8 or 12 <= place < 16:
            continue  # base offset and leader epoch: any may be right
        with pytest.raises(KafkaLogError):
            engine.append_raw("t", 0, bytes(bad))
    assert state_of(engine).high_watermark == 0


@pytest.mark.parametrize("magic", [0, 1])
def test_old_messages_are_refused_with_the_way_out(tmp_path: Path, magic: int) -> None:
    message = struct.pack(">qiIbb", 0, 22 + 8 * magic, 0, magic, 0) + bytes(16)
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    refused(engine, message, InvalidInputError, f"format v{magic}.*kafkalog append")


def test_a_later_magic_is_refused(tmp_path: Path) -> None:
    data = bytearray(at_times(0).data)
    data[16] = 3
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    refused(engine, bytes(data), CorruptBatchError, "expected magic 2, found magic 3")


def test_what_no_broker_could_load_is_refused(tmp_path: Path) -> None:
    batches = [at_times(0, producer_id=5, transactional=True), at_times(1, producer_id=5)]
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    refused(engine, joined(batches), InvalidInputError, "is not transactional, while")


def test_a_source_that_is_not_a_binary_file_is_refused(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    refused(engine, tmp_path / "none", InvalidInputError, "none: cannot be read: No such file")
    refused(engine, tmp_path, InvalidInputError, "expected a file of record batches")
    text: io.StringIO = io.StringIO("text")
    refused(engine, text, InvalidInputError, "open it in binary mode")


def test_a_partition_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no 3"):
        LogBuilder(tmp_path).topic(policy="delete").engine.append_raw("t", 3, at_times(0).data)


def test_the_copy_of_a_stream_that_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise Died

    with pytest.raises(Died), pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "remove", lambda _: None)
        engine.append_raw("t", 0, Stream())
    staged = list(tmp_path.glob("kl-*.staged"))
    assert len(staged) == 1
    os.utime(staged[0], (0, 0))
    assert engine.sweep_staged(now_ms=NOW_MS) == 1


# --- large sources -------------------------------------------------------------------------------


def test_a_batch_larger_than_a_piece_is_checked_as_it_is_written(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    large = at_times(1, (1, 2), value_size=1_700_000, leader_epoch=3)
    batches = [at_times(0), large, at_times(3)]
    raw(engine, *batches)
    assert segment_bytes(engine) == {0: joined(batches)}
    assert offsets(engine) == [0, 1, 2, 3]
    bad = bytearray(at_times(4, (1, 2), value_size=1_700_000).data)
    bad[-5] ^= 1
    refused(engine, bytes(bad), CorruptBatchError, "at byte 0: expected checksum")


@pytest.mark.slow
def test_memory_is_bounded_by_the_piece_not_by_the_source(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path / "log").topic(policy="delete", segment_bytes=4_000_000).engine
    path = tmp_path / "backup"
    with path.open("wb") as file:
        for base in range(60):
            file.write(at_times(base, value_size=700_000).data)
        file.write(at_times(60, value_size=30_000_000).data)
    engine.append_raw("t", 0, path)
    engine = LogBuilder(tmp_path / "other").topic(policy="delete", segment_bytes=4_000_000).engine
    tracemalloc.start()
    engine.append_raw("t", 0, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert state_of(engine).high_watermark == 61


# --- segments ------------------------------------------------------------------------------------


def test_a_new_segment_is_named_by_the_first_offset_of_the_batch(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=100).engine
    raw(engine, at_times(0), at_times(50), at_times(90))
    assert sorted(segment_bytes(engine)) == [0, 50, 90]
    assert state_of(engine).active_base == 90


def test_time_rolls(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_ms=1000).engine
    raw(engine, at_times(0, (5,)), at_times(10, (1005,)), at_times(20, (1006,)))
    assert sorted(segment_bytes(engine)) == [0, 20]


def test_an_offset_span_that_no_index_can_count_rolls(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(3_000_000_000), at_times(3_000_000_000 + 2**31 - 1))
    assert sorted(segment_bytes(engine)) == [0, 3_000_000_000]
    raw(engine, at_times(3_000_000_000 + 2**31))
    assert sorted(segment_bytes(engine)) == [0, 3_000_000_000, 3_000_000_000 + 2**31]
    assert len(offsets(engine)) == 3


def test_a_full_index_rolls(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(policy="delete", index_interval_bytes=0, segment_index_bytes=36)
        .engine
    )
    raw(engine, *(at_times(base, (base,)) for base in range(20)))
    assert len(segment_bytes(engine)) > 3


def test_every_batch_may_have_an_index_entry(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", index_interval_bytes=0).engine
    batches = [at_times(base, (base, base + 1)) for base in range(0, 40, 4)]
    raw(engine, *batches)
    size = len(batches[0].data)
    found = list(struct.iter_unpack(">ii", segment_bytes(engine, ".index")[0]))
    assert found == [(b.last_offset, i * size) for i, b in enumerate(batches)][1:]


# --- transactions --------------------------------------------------------------------------------


def test_our_own_appends_do_not_end_a_transaction(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    own(engine, 2)
    raw(engine, at_times(2, (1, 2), 5, transactional=True))
    own(engine, 3)
    assert (state_of(engine).last_stable_offset, state_of(engine).high_watermark) == (2, 7)
    assert offsets(engine) == [0, 1]
    assert offsets(engine, isolation_level="read_uncommitted") == list(range(7))
    raw(engine, marker(7, COMMIT, 5))
    own(engine)
    assert state_of(engine).last_stable_offset == 9
    assert offsets(engine) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_only_an_abort_makes_a_transaction_index(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=200).engine
    raw(engine, at_times(0, producer_id=5, transactional=True), marker(1, COMMIT, 5))
    assert segment_bytes(engine, ".txnindex") == {}
    raw(engine, at_times(2, producer_id=6, transactional=True))
    raw(engine, at_times(3, producer_id=5, transactional=True))
    raw(engine, marker(4, ABORT, 5), marker(5, ABORT, 6))
    assert txn_entries(engine) == [(5, 3, 4, 2), (6, 2, 5, 6)]
    assert offsets(engine) == [0]
    assert offsets(engine, isolation_level="read_uncommitted") == [0, 2, 3]


def test_a_transaction_stays_open_when_all_its_records_are_deleted(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (1, 2), 5, transactional=True))
    engine.delete_records("t", 0, -1)
    assert state_of(engine).last_stable_offset == 2
    own(engine, 3)
    assert (state_of(engine).last_stable_offset, state_of(engine).high_watermark) == (2, 5)
    assert offsets(engine) == []
    raw(engine, marker(5, ABORT, 5))
    assert offsets(engine) == [2, 3, 4]


def test_reading_ends_at_the_last_stable_offset(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    own(engine, 2)
    raw(engine, at_times(2, (1, 2), 5, transactional=True))
    assert list(engine.read("t", 0, 3)) == []
    assert list(engine.read("t", 0, 3, 4)) == []
    assert sum(batch.num_rows for batch in engine.read("t", 0, 1, 4)) == 1
    with pytest.raises(KafkaLogError, match="offset 5 is out of range"):
        list(engine.read("t", 0, 1, 5))
    with pytest.raises(InvalidInputError, match="found 'serializable'"):
        list(engine.read("t", 0, isolation_level="serializable"))


def test_an_entry_of_a_commit_that_is_not_recorded_aborts_nothing(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (1, 2), 5, transactional=True))
    before = state_of(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._journal, "append", lambda *_, **__: (_ for _ in ()).throw(Died()))
        with pytest.raises(Died):
            raw(engine, marker(2, ABORT, 5))
    assert txn_entries(engine) == [(5, 0, 2, 3)]
    assert state_of(engine) == before
    assert offsets(engine, isolation_level="read_uncommitted") == [0, 1]
    with DirectoryLog(tmp_path).snapshot("t", 0) as snapshot:
        from kafkalog.schema import changelog_schema

        assert sum(b.num_rows for b in snapshot.read(0, 2, schema=changelog_schema())) == 2
    own(engine)
    assert segment_bytes(engine, ".txnindex") == {}


def test_the_cleaner_does_not_go_past_the_last_stable_offset(tmp_path: Path) -> None:
    from kafkalog.cleaner.schedule.manager import clean

    engine = LogBuilder(tmp_path).topic(policy="compact", segment_bytes=150).engine
    for _ in range(4):
        own(engine)
    raw(engine, at_times(4, (NOW_MS,), 5, transactional=True))
    for _ in range(4):
        own(engine)
    assert [stats.error for stats in clean(engine, force=True, now_ms=NOW_MS)] == [None]
    assert 0 < state_of(engine).first_dirty_offset <= 4
    assert offsets(engine, isolation_level="read_uncommitted")[-5:] == [4, 5, 6, 7, 8]


# --- producers -----------------------------------------------------------------------------------


def test_the_journal_names_a_snapshot_at_the_high_watermark(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (NOW_MS,)))
    assert (state_of(engine).producer_snapshot, snapshots(engine)) == (-1, [])
    raw(engine, at_times(1, (NOW_MS, NOW_MS), 5, 2, 30))
    assert named(engine) == {5: (2, 31, 2, 1, NOW_MS, -1, -1)}
    own(engine, 4)
    assert (state_of(engine).producer_snapshot, snapshots(engine)) == (3, [3])
    raw(engine, at_times(7, (NOW_MS,), 6))
    assert sorted(named(engine)) == [5, 6]
    assert (state_of(engine).producer_snapshot, snapshots(engine)) == (8, [8])


def test_a_producer_expires_a_day_after_its_last_batch(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    day = 86_400_000
    raw(engine, at_times(0, (NOW_MS - day,), 5), at_times(1, (NOW_MS - day + 1,), 6))
    raw(engine, at_times(2, (NOW_MS - day,), 7, transactional=True))
    raw(engine, at_times(3, (NOW_MS,)))
    assert sorted(named(engine)) == [6, 7]


def test_a_roll_takes_a_snapshot_where_the_segment_begins(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=250).engine
    raw(engine, at_times(0, (NOW_MS,), 5))
    for _ in range(6):
        own(engine)
    rolled = sorted(segment_bytes(engine))[1:]
    assert rolled and snapshots(engine) == [1, *rolled]
    contents = [data[6:] for data in segment_bytes(engine, ".snapshot").values()]
    assert len(set(contents)) == 1
    # In a raw append each tells what lies below its segment.
    batches = [at_times(7 + n, (NOW_MS,), 10 + n) for n in range(6)]
    raw(engine, *batches)
    for offset, data in segment_bytes(engine, ".snapshot").items():
        producers = [entry[0] for entry in struct.iter_unpack(">qhiqiqiq", data[10:])]
        below = [b.producer[0] for b in batches if b.base_offset < offset]
        assert producers == [5, *below]
    assert snapshots(engine)[-1] == 13


def test_the_snapshot_that_is_named_outlives_retention_and_cleaning(tmp_path: Path) -> None:
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.schedule.manager import clean

    engine = LogBuilder(tmp_path).topic(segment_bytes=150, policy="compact,delete").engine
    raw(engine, *(at_times(n, (NOW_MS,), 5, sequence=n) for n in range(4)))
    expected = named(engine)
    for _ in range(4):
        own(engine)
    for stats in clean(engine, force=True, now_ms=NOW_MS, config=CleanerConfig()):
        assert stats.error is None
    assert named(engine) == expected
    assert [s.error for s in engine.apply_retention(now_ms=2 * NOW_MS)] == [None]
    assert named(engine) == expected
    assert state_of(engine).log_start_offset == 8
    assert snapshots(engine) == [4, 8]
    assert engine.apply_retention(now_ms=2 * NOW_MS) == []
    raw(engine, at_times(8, (NOW_MS,), 6))
    assert sorted(named(engine)) == [5, 6]
    assert snapshots(engine) == [8, 9]


def test_a_raw_append_is_synced_also_where_commits_are_not(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", flush_messages=1_000_000).engine
    own(engine)
    assert engine.state().unsynced
    raw(engine, at_times(1, (NOW_MS,), 5))
    assert not engine.state().unsynced


def snapshot_path(engine: DirectoryLog, offset: int) -> Path:
    return engine.root / "t-0" / f"{offset:020d}.snapshot"


def lose(engine: DirectoryLog, how: str = "gone") -> Path:
    """Take away the snapshot that the journal names, or its content."""
    path = snapshot_path(engine, state_of(engine).producer_snapshot)
    content = path.read_bytes()
    path.unlink()
    if how == "damaged":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut off":
        path.write_bytes(content[:5])
    elif how == "a directory":
        path.mkdir()
    return path


def lose_all(engine: DirectoryLog) -> None:
    for offset in snapshots(engine):
        snapshot_path(engine, offset).unlink()


def damage(engine: DirectoryLog) -> list[str]:
    return [found.path.name for found in verify(engine.root) if found.is_damage]


PREALLOCATED = {"preallocate": "true", "segment_bytes": "65536"}


@pytest.mark.parametrize("config", [{}, {"segment_bytes": "230"}, PREALLOCATED])
@pytest.mark.parametrize("how", ["gone", "damaged", "cut off", "a directory"])
def test_a_raw_append_tells_the_producers_from_the_log_when_their_snapshot_is_lost(
    tmp_path: Path, how: str, config: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = LogBuilder(tmp_path).topic(policy="delete", **config).engine, Model()
    run_steps(engine, model, STEPS)
    assert damage(engine) == []
    path = lose(engine, how)
    assert path.name in damage(engine)
    run_steps(engine, model, [1])
    assert path.name in damage(engine)
    run_steps(engine, model, [last(11)])
    check_cut(engine, model)
    assert len([line for line in caplog.messages if str(path) in line]) == 1
    assert {record.levelname for record in caplog.records if str(path) in record.message} == {
        "WARNING"
    }
    if how != "a directory":
        assert damage(engine) == []


def test_a_roll_after_a_lost_snapshot_takes_what_the_log_says(tmp_path: Path) -> None:
    engine, model = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=230).engine, Model()
    run_steps(engine, model, STEPS)
    expected = segment_bytes(engine, ".snapshot")[state_of(engine).producer_snapshot]
    lose_all(engine)
    run_steps(engine, model, [1] * 6)
    taken = segment_bytes(engine, ".snapshot")
    assert sorted(taken) == [base for base in segment_bytes(engine) if base > 8]
    assert set(taken.values()) == {expected}


def test_a_roll_where_the_lost_snapshot_was_puts_it_back(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (NOW_MS,), 5))
    expected = named(engine)
    path = lose(engine, "damaged")
    LogBuilder(engine).roll()
    assert path == snapshot_path(engine, 1)
    assert named(engine) == expected
    raw(engine, at_times(1, (NOW_MS,), 6))
    assert sorted(named(engine)) == [5, 6]
    assert snapshots(engine) == [1, 2]


def test_the_latest_sound_snapshot_before_a_lost_one_is_gone_on_from(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=150).engine
    raw(engine, *(at_times(n, (NOW_MS,), 10 + n) for n in range(4)))
    before = producer_snapshot.read_snapshot(tmp_path / "t-0", 2)
    before.append(parse_header(at_times(1, (NOW_MS,), 99).data))
    producer_snapshot.write_snapshot(tmp_path / "t-0", before)
    snapshot_path(engine, 3).write_bytes(b"damaged")
    lose(engine)
    raw(engine, at_times(4, (NOW_MS,), 20))
    assert sorted(named(engine)) == [10, 11, 12, 13, 20, 99]


def test_only_a_damaged_log_stops_a_raw_append_and_none_our_own(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete", segment_bytes=150).engine
    raw(engine, at_times(0, (NOW_MS,), 5), at_times(1, (NOW_MS,), 5, sequence=1))
    path = tmp_path / "t-0" / f"{0:020d}.log"
    sound = path.read_bytes()
    path.write_bytes(sound[:16] + b"\x07" + sound[17:])
    lose_all(engine)
    own(engine, 4)
    own(engine, 4)
    assert snapshots(engine) == []
    with pytest.raises(CorruptBatchError, match=f"{path}: at byte 0: .* found magic 7"):
        raw(engine, at_times(10, (NOW_MS,), 6))
    assert state_of(engine).high_watermark == 10
    own(engine)
    path.write_bytes(sound)
    raw(engine, at_times(11, (NOW_MS,), 6))
    assert sorted(named(engine)) == [5, 6]


def test_an_empty_log_whose_snapshot_is_lost_has_no_producers(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (1, 2), 5, transactional=True))
    engine.delete_records("t", 0, -1)
    lose(engine)
    own(engine, 3)
    assert (state_of(engine).last_stable_offset, state_of(engine).high_watermark) == (5, 5)
    raw(engine, at_times(5, (NOW_MS,), 6))
    assert sorted(named(engine)) == [6]


@pytest.mark.slow
def test_a_raw_append_that_died_over_a_lost_snapshot_is_done_again(tmp_path: Path) -> None:
    template = tmp_path / "template"
    engine, old = LogBuilder(template).topic(policy="delete", segment_bytes=230).engine, Model()
    run_steps(engine, old, STEPS)
    lose(engine, "damaged")
    n, is_cut_short = 0, True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(template, root)
        dying = DirectoryLog(root)

        def work(engine: DirectoryLog = dying) -> None:
            raw(engine, *LAST)

        is_cut_short = each_act(work, n, Died(), after=True)
        survivor, model = DirectoryLog(root), Model(list(old.batches), old.end)
        if state_of(survivor).high_watermark > old.end:
            model.add(LAST)
        run_steps(survivor, model, [1, [at_times(model.end + 1, (NOW_MS,), 9, leader_epoch=7)], 1])
        check_cut(survivor, model)
        shutil.rmtree(root)
    assert n > 12


# --- leader epochs -------------------------------------------------------------------------------


def test_an_epoch_is_assigned_from_its_first_offset(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    own(engine)
    raw(
        engine,
        at_times(1, leader_epoch=0),
        at_times(2, leader_epoch=3),
        at_times(9, leader_epoch=4),
    )
    assert epochs(engine) == [(0, 0), (3, 2), (4, 9)]
    assert state_of(engine).leader_epoch == 4
    own(engine)
    with engine.snapshot("t", 0) as snapshot:
        chunks = list(snapshot.chunks(10, 11))
    assert chunks[-1].table.leader_epochs.tolist()[-1] == 4


def test_an_epoch_below_the_last_one_replaces_it_as_with_kafka(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, leader_epoch=2), at_times(1, leader_epoch=5))
    raw(engine, at_times(2, leader_epoch=3))
    assert epochs(engine) == [(2, 0), (3, 2)]


def test_a_batch_without_epoch_assigns_none(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, leader_epoch=-1))
    assert epochs(engine) == []
    own(engine)
    assert epochs(engine) == [(0, 1)]


def test_an_epoch_of_a_commit_that_died_does_not_stay(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, leader_epoch=2), at_times(1, leader_epoch=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._journal, "append", lambda *_, **__: (_ for _ in ()).throw(Died()))
        with pytest.raises(Died):
            raw(engine, at_times(2, leader_epoch=3))
    own(engine)
    assert epochs(engine) == [(2, 0), (5, 1)]


def test_deleting_records_drops_the_epochs_below(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, *(at_times(n, leader_epoch=n) for n in range(6)))
    engine.delete_records("t", 0, 4)
    assert epochs(engine) == [(4, 4), (5, 5)]
    engine.delete_records("t", 0, 6)
    own(engine)
    assert epochs(engine) == [(5, 6)]


# --- all or nothing ------------------------------------------------------------------------------

STEPS: list[Sequence[BuiltBatch] | int] = [
    2,
    [
        at_times(2, (NOW_MS, NOW_MS), 5, transactional=True, leader_epoch=1),
        at_times(6, (NOW_MS,), 6, transactional=True, leader_epoch=1),
        marker(7, ABORT, 5, timestamp=NOW_MS),
    ],
    2,
]


def last(base: int) -> list[BuiltBatch]:
    return [
        at_times(base, (NOW_MS + 9,), 5, sequence=2, transactional=True, leader_epoch=2),
        marker(base + 1, ABORT, 6, timestamp=NOW_MS),
        at_times(base + 10, (NOW_MS,), 7, leader_epoch=1),
        marker(base + 11, ABORT, 5, timestamp=NOW_MS),
    ]


LAST = last(10)


def run_steps(
    engine: DirectoryLog, model: Model, steps: Sequence[Sequence[BuiltBatch] | int]
) -> None:
    for step in steps:
        if isinstance(step, int):
            epoch = state_of(engine).leader_epoch
            batch = at_times(model.end, (NOW_MS,) * step, leader_epoch=epoch)
            own(engine, step)
            model.add([batch])
        elif step:
            raw(engine, *step)
            model.add(step)


def check(engine: DirectoryLog, model: Model) -> None:
    found = state_of(engine)
    assert found.high_watermark == model.end
    assert found.last_stable_offset == model.last_stable_offset
    assert offsets(engine) == model.offsets(committed=True)
    assert offsets(engine, isolation_level="read_uncommitted") == model.offsets(committed=False)
    assert named(engine) == model.producers()
    # What lies above the high watermark belongs to a dead commit, until the next one cuts it.
    assert [e for e in txn_entries(engine) if e[2] < model.end] == model.aborted()


def check_cut(engine: DirectoryLog, model: Model) -> None:
    """After another commit nothing of a dead one is left."""
    check(engine, model)
    assert txn_entries(engine) == model.aborted()
    assert epochs(engine) == model.epochs()
    assert max(snapshots(engine), default=0) <= model.end
    assert sum(map(len, segment_bytes(engine).values())) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "after"),
    [
        (Died, True),
        (lambda: OSError(errno.EIO, "disk"), False),
        (lambda: OSError(errno.EIO, "disk"), True),
    ],
)
def test_a_raw_append_cut_short_at_any_act_is_there_or_is_not(
    tmp_path: Path, fault: type[BaseException], after: bool
) -> None:
    template = tmp_path / "template"
    engine = LogBuilder(template).topic(policy="delete", segment_bytes=230).engine
    old = Model()
    run_steps(engine, old, STEPS)
    n, is_cut_short, outcomes = 0, True, set()
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(template, root)
        dying = DirectoryLog(root)

        def work(engine: DirectoryLog = dying) -> None:
            raw(engine, *LAST)

        is_cut_short = each_act(work, n, fault(), after=after)
        survivor = DirectoryLog(root)
        model = Model(list(old.batches), old.end)
        if state_of(survivor).high_watermark > old.end:
            model.add(LAST)
        outcomes.add(model.end)
        check(survivor, model)
        run_steps(survivor, model, [1, [at_times(model.end + 1, (NOW_MS,), 9, leader_epoch=7)], 1])
        check_cut(survivor, model)
        shutil.rmtree(root)
    assert n > 12
    assert outcomes == {old.end, 22}


def test_old_snapshots_are_swept_and_one_above_the_cut_goes(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(policy="delete").engine
    raw(engine, at_times(0, (NOW_MS,), 5))
    (tmp_path / "t-0" / f"{77:020d}.snapshot").write_bytes(b"of a commit that died")
    own(DirectoryLog(tmp_path))
    assert snapshots(engine) == [1]
    raw(engine, at_times(2, (NOW_MS,), 5))
    assert snapshots(engine) == [3]


# --- any sequence --------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> list[list[BuiltBatch] | int]:
    steps: list[list[BuiltBatch] | int] = []
    end, epoch, sequences = 0, 0, dict.fromkeys(range(4), 0)
    is_open: set[int] = set()
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.integers(0, 2)) == 0:
            count = draw(st.integers(1, 3))
            steps.append(count)
            end += count
            continue
        batches: list[BuiltBatch] = []
        for _ in range(draw(st.integers(1, 6))):
            end += draw(st.sampled_from([0, 0, 0, 1, 5]))
            epoch += draw(st.sampled_from([0, 0, 0, 1, 2]))
            producer = draw(st.integers(-1, 3))
            times = tuple(draw(st.lists(st.integers(0, 50), min_size=1, max_size=3)))
            times = tuple(NOW_MS + time for time in times)
            if producer >= 2 and draw(st.booleans()):
                kind = draw(st.sampled_from([ABORT, COMMIT]))
                batch = marker(end, kind, producer, timestamp=times[0], leader_epoch=epoch)
                is_open.discard(producer)
            else:
                is_transactional = producer >= 2
                sequence = sequences.get(producer, 0)
                if producer >= 0:
                    sequences[producer] += len(times)
                batch = at_times(
                    end, times, producer, 0, sequence, is_transactional, leader_epoch=epoch
                )
            batches.append(batch)
            end = batch.last_offset + 1
        steps.append(batches)
    return steps


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs(), st.sampled_from(["150", "400", "100000"]), st.booleans())
def test_any_sequence_of_appends_is_what_a_plain_model_says(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[BuiltBatch] | int],
    segment_size: str,
    is_preallocated: bool,
) -> None:
    root = tmp_path_factory.mktemp("log")
    engine = (
        LogBuilder(root)
        .topic(policy="delete", segment_bytes=segment_size, preallocate=is_preallocated)
        .engine
    )
    model = Model()
    for step in steps:
        run_steps(engine, model, [step])
        check(engine, model)
        assert epochs(engine) == model.epochs()
    for ms in (0, NOW_MS, NOW_MS + 20, NOW_MS + 50, -3):
        for level in UNSTABLE:
            end = model.end if level == "read_uncommitted" else model.last_stable_offset
            expected = first_of(model.times(), ms)
            found = engine.offset_for_time("t", ms, isolation_level=level)[0]
            wanted = expected if expected is not None and expected[0] < end else None
            assert (None if found is None else found[:2]) == wanted
    shutil.rmtree(root)


def first_of(times: list[tuple[int, int]], ms: int) -> tuple[int, int] | None:
    if ms == -3:
        latest = max((time for _, time in times), default=None)
        return next(((o, t) for o, t in times if t == latest), None)
    return next(((o, t) for o, t in times if t >= ms), None)
