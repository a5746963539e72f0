"""Partitions that hold messages v0 or v1 are read, and converted by the cleaner."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import GZIP, Record
from tests.builders.log_builder import LogBuilder
from tests.builders.message_builder import messages, wrapper
from tests.unit.cleaner.naive import Batch, dump, latest_values, offsets, records_of

ALONE = CleanerConfig(merge_batches=False)


def old(magic: int, *offsets: int) -> list[Record]:
    return [Record(i, 5 if magic else -1, b"ab"[i % 2 : i % 2 + 1], b"old") for i in offsets]


def upgraded(root: Path, place: int, data: bytes) -> DirectoryLog:
    """Segments of two records; the one at `place` holds `data` instead."""
    log = LogBuilder(root, now_ms=1000).topic(segment_bytes=100, delete_retention_ms=10)
    engine = log.rounds(5, "ab").engine
    logs = sorted(engine.partition_directory("t", 0).glob("*.log"))
    logs[place].write_bytes(data)
    return engine


def magics(engine: DirectoryLog) -> set[int]:
    with engine.snapshot("t", 0) as snapshot:
        end = snapshot.state.high_watermark
        return {int(m) for chunk in snapshot.chunks(0, end) for m in chunk.table.magics}


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("config", [CleanerConfig(), ALONE])
def test_what_stays_of_old_messages_becomes_batches_v2(
    tmp_path: Path, place: int, magic: int, compressed: bool, config: CleanerConfig
) -> None:
    items = old(magic, 2 * place, 2 * place + 1)
    items[1] = Record(items[1].offset, items[1].timestamp, b"c", b"only")
    data = wrapper(magic, GZIP, items) if compressed else messages(magic, items)
    engine = upgraded(tmp_path, place, data)
    before = latest_values(records_of(dump(engine)))
    (stats,) = clean(engine, now_ms=1, config=config)
    assert stats.error is None
    assert magics(engine) == {2}
    after = dump(engine)
    assert latest_values(records_of(after)) == before
    assert len(offsets(after)) == 5  # c, a and b once, and the active segment
    (only,) = [r for r in records_of(after) if r.key == b"c"]
    assert (only.offset, only.timestamp) == (2 * place + 1, 5 if magic else -1)
    assert {b.horizon for b in after} == {None}


@pytest.mark.parametrize("magic", [0, 1])
def test_an_old_tombstone_goes_in_two_stages_like_any_other(tmp_path: Path, magic: int) -> None:
    gone = Record(0, 5 if magic else -1, b"gone", None)
    engine = upgraded(tmp_path, 0, messages(magic, [gone, *old(magic, 1)]))
    for now, stays in ((100, True), (109, True), (110, False)):
        assert [s.error for s in clean(engine, now_ms=now)] in ([None], [])
        found = [(b.horizon, b.base) for b in dump(engine) if b.base == 0]
        assert found == ([(110, 0)] if stays else [])


def test_old_messages_behind_a_batch_of_the_same_segment_are_converted(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"segment.bytes": "250"})
    for i in range(5):
        engine.append("t", [(f"k{i}", "new")], now_ms=1000)
    first, second, *_ = sorted(engine.partition_directory("t", 0).glob("*.log"))
    data, end = first.read_bytes(), int(second.name[:20])
    assert end > 1
    size = 12 + int.from_bytes(data[8:12], "big")
    first.write_bytes(data[:size] + messages(1, old(1, *range(1, end))))
    (stats,) = clean(engine, now_ms=1)
    assert stats.error is None
    assert magics(engine) == {2}
    assert [r.key for r in records_of(dump(engine))][:2] == [b"k0", b"b"]


@pytest.mark.parametrize("magic", [0, 1])
def test_a_wrapper_of_the_other_format_is_converted_with_all_its_records(
    tmp_path: Path, magic: int
) -> None:
    """KAFKA-4298: a wrapper of one format around messages of the other one."""
    items = [Record(i, -1 if magic else 5, b"key%d" % i, b"value%d" % i) for i in range(2)]
    engine = upgraded(tmp_path, 0, wrapper(magic, GZIP, items, inner_magic=1 - magic))
    (stats,) = clean(engine, now_ms=1, config=ALONE)
    assert stats.error is None
    assert magics(engine) == {2}
    found = [(r.offset, r.key, r.value) for r in records_of(dump(engine))[:2]]
    assert found == [(m.offset, m.key, m.value) for m in items]


def test_a_log_that_was_converted_is_not_written_again(tmp_path: Path) -> None:
    engine = upgraded(tmp_path, 0, wrapper(1, GZIP, old(1, 0, 1)))
    clean(engine, now_ms=1, force=True)
    before: list[Batch] = dump(engine)
    for stats in clean(engine, now_ms=2, force=True):
        assert stats.batches_rewritten == 0
    assert dump(engine) == before


def test_the_latest_records_are_found_across_formats(tmp_path: Path) -> None:
    engine = upgraded(tmp_path, 4, wrapper(0, GZIP, old(0, 8, 9)))
    with engine.snapshot("t", 0) as snapshot:
        found = list(latest(snapshot, 8, budget_bytes=1 << 20, schema=changelog_schema()))
    assert [v for b in found for v in b.column("value").to_pylist()] == [b"3", b"3"]
