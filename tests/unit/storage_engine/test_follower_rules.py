"""What Kafka guarantees of whole batches that are appended as they are, and of their log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    aborted_transactions,
)
from tests.builders.batch_builder import ABORT, COMMIT, BuiltBatch, batch, joined, marker
from tests.builders.segment_files import name

INT32_MAX = 2**31 - 1
NOW_MS = 1_700_000_000_000


def topic(root: Path, **config: str) -> DirectoryLog:
    engine = DirectoryLog(root)
    engine.create_topic("t", 1, {key.replace("_", "."): text for key, text in config.items()})
    return engine


def append(engine: DirectoryLog, *batches: BuiltBatch) -> None:
    engine.append_raw("t", 0, joined(batches), now_ms=NOW_MS)


def read(engine: DirectoryLog, isolation_level: str = "read_committed") -> list[int]:
    tables = engine.read("t", 0, isolation_level=isolation_level)
    return [offset for table in tables for offset in table["offset"].to_pylist()]


def directory(engine: DirectoryLog) -> Path:
    return engine.partition_directory("t", 0)


def bases(engine: DirectoryLog) -> list[int]:
    return [segment.base_offset for segment in list_segments(directory(engine))]


# --- offsets and segments ------------------------------------------------------------------------


def test_an_empty_segment_far_below_takes_no_offset_that_it_cannot_tell(tmp_path: Path) -> None:
    engine = topic(tmp_path, index_interval_bytes="1")
    append(engine, *(batch(2**40 + i, 1) for i in range(3)))
    assert 2**40 in bases(engine)
    assert read(engine) == [2**40, 2**40 + 1, 2**40 + 2]


def test_a_file_is_appended_whole_across_the_limits_of_segments(tmp_path: Path) -> None:
    offsets = [0, 500, INT32_MAX + 5, INT32_MAX + 6]
    sizes = [1024, 50_000, 1024, 10]
    batches = [batch(o, 1, size=size) for o, size in zip(offsets, sizes, strict=True)]
    source = tmp_path / "source.log"
    source.write_bytes(joined(batches))
    engine = topic(tmp_path / "log")
    engine.append_raw("t", 0, source, now_ms=NOW_MS)
    assert bases(engine) == [0, INT32_MAX + 5]
    assert read(engine) == offsets
    stored = [segment.log.read_bytes() for segment in list_segments(directory(engine))]
    assert stored == [joined(batches[:2]), joined(batches[2:])]


def test_a_batch_above_max_message_bytes_is_taken_as_the_leader_took_it(tmp_path: Path) -> None:
    engine = topic(tmp_path, max_message_bytes="100")
    append(engine, batch(0, 1, size=5000))
    assert read(engine) == [0]


# --- producers and transactions ------------------------------------------------------------------


def test_the_first_abort_makes_the_transaction_index_and_later_ones_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = topic(tmp_path)
    path = directory(engine) / name(0, ".txnindex")
    for offset, producer_id in ((0, 7), (1, 8)):
        append(engine, batch(offset, 1, of=producer_id))
    append(engine, marker(2, COMMIT, 8))
    assert not path.exists()
    synced: list[str] = []
    sync = files.sync_file

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(files, "sync_file", note)
    append(engine, marker(3, ABORT, 7))
    first = AbortedTransaction(7, 0, 3, 4)
    assert aborted_transactions(path) == [first]
    assert str(path) in synced
    engine.close()
    engine = DirectoryLog(tmp_path)
    append(engine, batch(4, 1, of=8), marker(5, ABORT, 8))
    assert aborted_transactions(path) == [first, AbortedTransaction(8, 4, 5, 6)]
    assert read(engine) == [1]


# --- preallocated files --------------------------------------------------------------------------


def test_a_preallocated_segment_is_read_up_to_what_is_committed(tmp_path: Path) -> None:
    engine = topic(tmp_path, preallocate="true", segment_bytes="100000")
    append(engine, batch(50, 1), batch(51, 1))
    append(engine, batch(60, 1), batch(61, 1))
    (segment,) = list_segments(directory(engine))
    assert segment.size == 100_000
    assert read(engine) == [50, 51, 60, 61]
    with engine.snapshot("t", 0) as snapshot:
        found = snapshot.position_of(55)
        assert found is not None
        assert found[1] == len(batch(50, 1).data) * 2


def test_a_preallocated_segment_is_trimmed_when_it_is_closed(tmp_path: Path) -> None:
    engine = topic(tmp_path, preallocate="true", segment_bytes="300")
    batches = [batch(i, 1) for i in range(9)]
    append(engine, *batches)
    assert len(bases(engine)) > 2
    sizes = [segment.size for segment in list_segments(directory(engine))]
    ends = [*bases(engine)[1:], 9]
    whole = [len(joined(batches[b:e])) for b, e in zip(bases(engine), ends, strict=True)]
    assert sizes[:-1] == whole[:-1]
    assert sizes[-1] == 300
    engine.close()
    engine = DirectoryLog(tmp_path)
    append(engine, batch(9, 1))
    assert read(engine) == list(range(10))
