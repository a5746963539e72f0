"""Cleaning and the latest records, however few batches are decompressed at once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.segment import open_segment
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.naive import (
    Batch,
    dump,
    latest_values,
    naive_clean,
    offsets,
    records_of,
    runs,
)

SCHEMA = changelog_schema()
DRAWN = {"keys": 60, "rows_max": 11, "tombstones": 0.3}


@pytest.mark.parametrize("run_size", [1, 400, 1000])
def test_batches_are_cleaned_the_same_in_runs_of_any_size(
    tmp_path: Path, run_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", run_size)
    rng = random.Random(run_size)
    engine = DirectoryLog(tmp_path)
    config = {"compression.type": "zstd", "segment.bytes": "4000", "delete.retention.ms": "0"}
    engine.create_topic("t", 1, config)
    expected: list[Batch] = []
    first_dirty = 0
    for now in (1_000, 2_000):
        LogBuilder(engine, now_ms=now).random_commits(rng, 30, **DRAWN)
        expected += [b for b in dump(engine) if b.base >= first_dirty]
        end = engine.offsets("t")[0][1]
        expected = naive_clean(expected, first_dirty, end, now=now, retention=0, high_watermark=end)
        config = CleanerConfig(merge_batches=False)
        (stats,) = clean(engine, force=True, now_ms=now, config=config)
        assert stats.error is None
        assert dump(engine) == expected
        first_dirty = end


def test_a_map_that_fills_in_a_later_run_of_a_chunk_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", 1)
    found = []
    for codec in ("zstd", "uncompressed"):  # what is not compressed is one run
        engine = DirectoryLog(tmp_path / codec)
        engine.create_topic("t", 1, {"compression.type": codec})
        for i in range(12):
            engine.append("t", [(f"k{i % 5}", "a"), (f"k{i % 7}", "b")], now_ms=1)
        config = CleanerConfig(dedupe_buffer_size=24 * 4, spill=False)
        (stats,) = clean(engine, force=True, now_ms=1, config=config)
        found.append((stats.rounds, stats.map_records_read, offsets(dump(engine))))
    assert found[0][0] > 3
    assert found[0] == found[1]


def test_the_latest_records_are_the_same_in_runs_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"compression.type": "lz4"})
    LogBuilder(engine, now_ms=1).random_commits(random.Random(1), 30, **DRAWN)
    end = engine.offsets("t")[0][1]
    expected = {
        offset for offset, value in latest_values(records_of(dump(engine))).values() if value
    }
    for run_size in (1, 700, 1 << 20):
        monkeypatch.setattr(open_segment, "RUN_SIZE", run_size)
        with engine.snapshot("t", 0, whole=True) as snapshot:
            tables = list(latest(snapshot, end, budget_bytes=1 << 20, schema=SCHEMA))
        assert {o for table in tables for o in table["offset"].to_pylist()} == expected
        assert (len(tables) > 10) == (run_size == 1)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_what_is_decompressed_at_once_is_bounded(tmp_path: Path, codec: str) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"compression.type": codec})
    engine.append("t", [(f"{i}", "0" * 60_000) for i in range(300)], now_ms=1)
    found: list[int] = []
    bases: list[int] = []
    with engine.snapshot("t", 0) as snapshot:
        expected = [b for c in snapshot.chunks(0, 300) for b in c.table.base_offsets.tolist()]
        for run, records in runs(snapshot, 0, 300):
            # A batch may take a mebibyte (max.message.bytes), and one may exceed the size of a run.
            assert records.arena.size < open_segment.RUN_SIZE + (1 << 20)
            assert set(records.batch_index.tolist()) == set(range(len(run.table)))
            bases += run.table.base_offsets.tolist()
            found += records.offsets.tolist()
    assert found == list(range(300))
    assert bases == expected


def test_batches_that_are_not_looked_into_are_in_a_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", 1)
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"compression.type": "gzip"})
    for i in range(20):
        engine.append("t", [(f"{i}", "x")], now_ms=1)
    with engine.snapshot("t", 0) as snapshot:
        for wanted in ([], [0, 1, 19], [5, 7, 8], list(range(20))):
            found = [
                (run.table.base_offsets.tolist(), records.offsets.tolist())
                for chunk in snapshot.chunks(0, 20)
                for run, records in chunk.runs(np.isin(chunk.table.base_offsets, wanted))
            ]
            assert [base for bases, _ in found for base in bases] == list(range(20))
            assert [offset for _, inside in found for offset in inside] == wanted
            assert len(found) == max(1, len(wanted))
