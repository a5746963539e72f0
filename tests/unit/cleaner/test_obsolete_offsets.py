"""The bits of obsolete offsets, against a set; and what the second pass need not look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.obsolete_offsets import SHARE, SIZE_MIN, ObsoleteOffsets
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import compression
from kafkalog.storage_engine.format.batch import Buffer
from kafkalog.storage_engine.records.tables import BatchTable


def test_the_bits_take_a_small_part_of_the_budget_or_there_are_none() -> None:
    budget = 1 << 24
    offsets_max = 8 * budget // SHARE
    assert ObsoleteOffsets.within(5, 5 + offsets_max, budget) is not None
    assert ObsoleteOffsets.within(5, 6 + offsets_max, budget) is None
    assert ObsoleteOffsets.within(0, 8 * SIZE_MIN, 24) is not None
    assert ObsoleteOffsets.within(0, 8 * SIZE_MIN + 1, 24) is None


def test_offsets_outside_the_section_are_not_obsolete() -> None:
    known = ObsoleteOffsets(100, 110)
    known.bits[:] = 255
    offsets = np.array([0, 99, 100, 109, 116, 10**12])
    assert known.contains(offsets).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("codec", ["uncompressed", "lz4", "zstd"])
def test_a_batch_of_obsolete_records_is_not_decompressed_for_the_second_pass(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    library = compression.decompressor

    def counting(codec: int, *, limit: int) -> Callable[[Buffer], bytes | memoryview]:
        read = library(codec, limit=limit)

        def one(data: Buffer) -> bytes | memoryview:
            counted.append(1)
            return read(data)

        return one

    monkeypatch.setattr(compression, "decompressor", counting)
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1, {"compression.type": codec})
        for round_ in range(20):
            rows = [(f"key-{number}", f"{round_}-{number}") for number in range(50)]
            engine.append("t", rows, now_ms=1_000)
        (stats,) = clean(engine, "t", force=True, now_ms=2_000, config=CleanerConfig())
        assert stats.error is None
        assert (stats.records_read, stats.records_kept) == (1_000, 50)
        if codec != "uncompressed":
            assert len(counted) == 20 + 1  # all of them once, and what stays once more
        assert [batch.num_rows for batch in engine.read("t", 0)] == [50]


def test_a_batch_with_one_record_that_stays_is_looked_into(tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        engine.append("t", [("a", "1"), ("b", "1"), ("c", "1")], now_ms=1_000)
        engine.append("t", [("a", "2"), ("c", "2")], now_ms=1_000)
        (stats,) = clean(engine, "t", force=True, now_ms=2_000)
        assert stats.records_kept == 3
        (found,) = engine.read("t", 0)
        assert found["offset"].to_pylist() == [1, 3, 4]


def test_a_gap_does_not_count_as_an_obsolete_record() -> None:
    known = ObsoleteOffsets(100, 200)
    known.bits[0] = 0b0000_1011  # 100, 101, 103
    header = {"positions": [0, 9], "sizes": [9, 9], "base_offsets": [100, 104]}
    header |= {"last_offsets": [103, 110], "counts": [3, 0]}
    columns = [header.get(field.name, [0, 0]) for field in dataclasses.fields(BatchTable)]
    table = BatchTable(*(np.array(column, dtype=np.int64) for column in columns))
    assert known.hold_all_of(table).tolist() == [True, False]
    table.counts[0] = 4
    assert known.hold_all_of(table).tolist() == [False, False]
