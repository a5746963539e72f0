"""Partitions that hold messages v0 or v1 are read, and left alone by the cleaner."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner import clean, status
from kafkalog.cleaner.survivors import latest
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.engine import Engine
from tests.storage_engine.naive_messages import GZIP, Message, message, wrapper


def messages(magic: int, *offsets: int) -> list[Message]:
    return [Message(i, 5 if magic else -1, b"ab"[i % 2 : i % 2 + 1], b"old") for i in offsets]


def plain(magic: int, *offsets: int) -> bytes:
    return b"".join(
        message(magic, m.offset, m.key, m.value, timestamp=m.timestamp)
        for m in messages(magic, *offsets)
    )


def upgraded(root: Path, place: int, data: bytes) -> Engine:
    """Segments of two records; the one at `place` holds `data` instead."""
    engine = Engine(root)
    engine.create_topic("t", 1, {"segment.bytes": "100"})
    for i in range(5):
        engine.append("t", [("a", f"{i}"), ("b", f"{i}")], now_ms=1000)
    logs = sorted(engine.partition_directory("t", 0).glob("*.log"))
    logs[place].write_bytes(data)
    return engine


def stored(engine: Engine) -> dict[str, bytes]:
    logs = engine.partition_directory("t", 0).glob("*.log*")
    return {path.name: path.read_bytes() for path in logs}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_partition_with_old_messages_stays_as_it_is_and_says_why(
    tmp_path: Path, place: int, magic: int, compressed: bool
) -> None:
    offsets = 2 * place, 2 * place + 1
    data = wrapper(magic, GZIP, messages(magic, *offsets)) if compressed else plain(magic, *offsets)
    engine = upgraded(tmp_path, place, data)
    before = stored(engine)
    (stats,) = clean(engine, now_ms=1)
    assert f"holds messages of format v{magic}" in str(stats.error)
    assert stored(engine) == before
    (found,) = status(engine, now_ms=2)
    assert (found.state, found.reason) == ("uncleanable", stats.error)
    values = [v for b in engine.read("t", 0) for v in b.column("value").to_pylist()]
    assert values == [b"old" if i in offsets else b"%d" % (i // 2) for i in range(10)]


def test_old_messages_behind_a_batch_are_met_before_their_segment_is_rewritten(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path)
    engine.create_topic("t", 1, {"segment.bytes": "250"})
    for i in range(5):
        engine.append("t", [("a", f"{i}")], now_ms=1000)
    first, second, *_ = sorted(engine.partition_directory("t", 0).glob("*.log"))
    data, end = first.read_bytes(), int(second.name[:20])
    assert end > 1
    first.write_bytes(data[: 12 + int.from_bytes(data[8:12], "big")] + plain(1, *range(1, end)))
    before = stored(engine)
    (stats,) = clean(engine, now_ms=1)
    assert "holds messages of format v1" in str(stats.error)
    assert stored(engine) == before


def test_the_newest_records_are_found_across_formats(tmp_path: Path) -> None:
    engine = upgraded(tmp_path, 4, wrapper(0, GZIP, messages(0, 8, 9)))
    with engine.view("t", 0) as view:
        found = list(latest(view, 8, budget_bytes=1 << 20, schema=changelog_schema()))
    assert [v for b in found for v in b.column("value").to_pylist()] == [b"3", b"3"]
