from pathlib import Path

import pyarrow as pa
import pytest

from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.datasource.task_ranges import SPLIT_BYTES, split_by_bytes
from kafkalog.storage_engine.directory.directory_log import DirectoryLog

PLACE = TopicPartition("t", 0)
SIZE = 100


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A partition of 10,000 records of 100 bytes, in segments of about 64 KiB."""
    root = tmp_path_factory.mktemp("log")
    config = {"segment.bytes": "65536", "index.interval.bytes": "1024", "cleanup.policy": "delete"}
    with DirectoryLog(root) as engine:
        engine.create_topic("t", 1, config)
        values = pa.array([bytes(SIZE)] * 10_000, pa.binary())
        for start in range(0, 10_000, 500):
            engine.append("t", pa.table({"value": values[start : start + 500]}), batch_size=2048)
    return root


def split(root: Path, start: int, end: int, max_bytes: int = SPLIT_BYTES) -> list[OffsetRange]:
    with DirectoryLog(root, read_only=True) as engine:
        return split_by_bytes(engine, OffsetRange(PLACE, start, end), max_bytes)


def joined(pieces: list[OffsetRange]) -> list[int]:
    return [offset for piece in pieces for offset in range(piece.start, piece.end)]


def size_of(root: Path, piece: OffsetRange) -> int:
    """The bytes of all batches that a piece looks into."""
    with DirectoryLog(root, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        chunks = snapshot.chunks(piece.start, piece.end)
        return sum(int(chunk.table.sizes.sum()) for chunk in chunks)


def test_what_is_small_stays_whole(built: Path) -> None:
    assert split(built, 0, 10_000) == [OffsetRange(PLACE, 0, 10_000)]


@pytest.mark.parametrize(("start", "end"), [(0, 10_000), (137, 9_000), (2_000, 2_600)])
@pytest.mark.parametrize("max_bytes", [16 << 10, 100_000, 300_000])
def test_pieces_have_about_equal_bytes_and_hold_every_offset_once(
    built: Path, start: int, end: int, max_bytes: int
) -> None:
    pieces = split(built, start, end, max_bytes)

    assert joined(pieces) == list(range(start, end))
    total = size_of(built, OffsetRange(PLACE, start, end))
    assert abs(len(pieces) - total / max_bytes) <= 1.2
    sizes = [size_of(built, piece) for piece in pieces]
    assert max(sizes) <= max_bytes + 8192
    assert max(sizes) - min(sizes) <= 12_000 or len(sizes) == 1


def test_cuts_lie_between_batches(built: Path) -> None:
    with DirectoryLog(built, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        bases = {
            int(base) for chunk in snapshot.chunks(0, 10_000) for base in chunk.table.base_offsets
        }

    assert {piece.start for piece in split(built, 0, 10_000, 50_000)} <= bases


@pytest.mark.parametrize("damage", ["missing", "garbage", "empty"])
def test_a_damaged_index_moves_cuts_and_loses_nothing(tmp_path: Path, damage: str) -> None:
    config = {"index.interval.bytes": "1024", "cleanup.policy": "delete"}
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1, config)
        values = pa.array([bytes(SIZE)] * 5_000, pa.binary())
        engine.append("t", pa.table({"value": values}), batch_size=2048)
    for index in (tmp_path / "t-0").glob("*.index"):
        if damage == "missing":
            index.unlink()
        else:
            size = index.stat().st_size
            index.write_bytes(bytes(range(256)) * (size // 256) if damage == "garbage" else b"")

    pieces = split(tmp_path, 0, 5_000, 50_000)

    assert joined(pieces) == list(range(5_000))
    assert damage == "garbage" or len(pieces) > 5


def test_an_empty_range_has_no_pieces(built: Path) -> None:
    assert split(built, 7, 7) == []


def test_a_range_beyond_the_log_keeps_its_end(built: Path) -> None:
    pieces = split(built, 9_000, 20_000, 16 << 10)

    assert (pieces[0].start, pieces[-1].end) == (9_000, 20_000)


def test_of_a_topic_that_is_gone_the_task_tells(tmp_path: Path) -> None:
    range_ = OffsetRange(PLACE, 0, 9)

    with DirectoryLog(tmp_path) as engine:
        assert split_by_bytes(engine, range_) == [range_]
