"""What a group of segments becomes on disk: outputs within their limits, with their indexes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.rewrite.cleaned_segment import CleanedSegment
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.open_segment import Chunk
from tests.unit.cleaner import naive_merge
from tests.unit.cleaner.naive_merge import Batch
from tests.unit.cleaner.test_merge import decided, small_batch, staying


def writer(directory: Path, base_offset: int = 0, *, merges: bool = False) -> BatchWriter:
    return BatchWriter(
        directory,
        base_offset,
        TopicConfig.parse({"index.interval.bytes": "0"}),
        new_delete_horizon_ms=None,
        merges=merges,
        stats=CleanerStats("t", 0),
    )


def add(target: BatchWriter, *batches: Batch) -> None:
    data = b"".join(batch.data for batch in batches)
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, path="x", file_position=0)
    fates = [fate for _, fate in staying(*batches)]
    chunk = Chunk(data, table, Path("x"), 0, 0, 0, 1 << 62)
    target.add(chunk, found, decided(table, found, fates))


def contents(outputs: list[CleanedSegment]) -> list[tuple[int, list[Batch]]]:
    return [
        (output.base_offset, naive_merge.read_log(output.path(layout.LOG).read_bytes()))
        for output in outputs
    ]


def entry(first: int, marker: int) -> bytes:
    return layout.TRANSACTION_INDEX_ENTRY.pack(0, 7, first, marker, marker + 1)


def test_another_output_begins_where_the_bytes_would_pass_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [small_batch(2 * i) for i in range(5)]
    size = len(batches[0].data)
    monkeypatch.setattr(layout, "INT32_MAX", 2 * size)
    target = writer(tmp_path)
    add(target, *batches)
    assert contents(target.finish(1)) == [(0, batches[:2]), (4, batches[2:4]), (8, batches[4:])]
    assert not target.is_changed


def test_an_output_whose_offsets_would_span_too_much_ends_before_its_next_batch(
    tmp_path: Path,
) -> None:
    batches = [small_batch(0), small_batch(2**31 - 2), small_batch(2**31 + 7), small_batch(2**33)]
    target = writer(tmp_path)
    add(target, *batches)
    found = contents(target.finish(1))
    assert found == [
        (0, batches[:2]),
        (2**31, batches[2:3]),
        (2**33, batches[3:]),  # from the end of the one before it would be too far again
    ]


def test_outputs_have_the_entries_of_the_transactions_whose_markers_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [small_batch(2 * i) for i in range(5)]
    monkeypatch.setattr(layout, "INT32_MAX", 2 * len(batches[0].data))
    target = writer(tmp_path)
    add(target, *batches)
    target.add_transactions(entry(0, 3) + entry(0, 4))
    target.add_transactions(entry(5, 9))
    outputs = target.finish(1)
    found = [
        output.path(layout.TRANSACTION_INDEX).read_bytes()
        if output.path(layout.TRANSACTION_INDEX).exists()
        else b""
        for output in outputs
    ]
    assert found == [entry(0, 3), entry(0, 4), entry(5, 9)]


def test_a_merged_batch_gets_one_index_entry_at_its_last_offset(tmp_path: Path) -> None:
    target = writer(tmp_path, merges=True)
    add(target, *(small_batch(2 * i) for i in range(4)), small_batch(8, epoch=1))
    (output,) = target.finish(1)
    assert [b.last for b in contents([output])[0][1]] == [7, 9]
    index = OffsetIndex(output.path(layout.INDEX), 0)
    size = output.path(layout.LOG).stat().st_size
    merged = size - len(small_batch(8, epoch=1).data)
    assert index.lookup(9) == merged


@pytest.mark.parametrize("held", [False, True])
def test_what_is_discarded_leaves_no_file(tmp_path: Path, held: bool) -> None:
    target = writer(tmp_path, merges=held)
    add(target, small_batch(0))
    target.discard()
    assert list(tmp_path.iterdir()) == []


def test_batches_that_go_change_the_segment(tmp_path: Path) -> None:
    target = writer(tmp_path)
    data = small_batch(0).data
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, path="x", file_position=0)
    chunk = Chunk(data, table, Path("x"), 0, 0, 0, 1 << 62)
    target.add(chunk, found, decided(table, found, [naive_merge.Fate(frozenset())]))
    (output,) = target.finish(1)
    assert target.is_changed
    assert output.path(layout.LOG).read_bytes() == b""


@pytest.mark.parametrize(
    ("sizes", "lasts", "count"),
    [
        ([10, 10], [1, 2], 2),
        ([2**31 - 1, 1], [1, 2], 1),
        ([2**31 - 1], [1], 1),
        ([2**30, 2**30, 5], [1, 2, 3], 1),
        ([10, 10], [2**31 + 99, 2**31 + 100], 1),
        ([10], [2**31 + 100], 0),
    ],
)
def test_a_segment_takes_in_what_keeps_within_two_to_the_31(
    tmp_path: Path, sizes: list[int], lasts: list[int], count: int
) -> None:
    segment = CleanedSegment(tmp_path, 100, TopicConfig())
    assert segment.count_fitting(np.array(sizes), np.array(lasts)) == count
    segment.discard()
