"""The file of a key index, against a dictionary of what was put into it."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c

from kafkalog.cleaner.key_index.key_index import KeyIndex, KeyIndexWriter, _hashes, key_hashes
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from kafkalog.storage_engine.records.records import index_records, scan_batches
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile
from kafkalog.storage_engine.segment.segments import SegmentFiles
from tests.builders.batch_builder import Record, batch_data

SECRET = bytes(range(16))
Array = npt.NDArray[Any]


def _key_hash(key: bytes, secret: bytes) -> int:
    keys = ChosenKeys([key])
    return int(_hashes(keys.arena, keys.positions, keys.sizes, secret)[0])


def build_batch(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return batch_data(Record(offset, 1_000, *pair) for offset, pair in enumerate(pairs))


def segment(directory: Path, data: bytes) -> OpenSegmentFile:
    log = directory / layout.segment_file(0, layout.LOG)
    log.write_bytes(data)
    files = SegmentFiles(directory, 0, len(data))
    return OpenSegmentFile(files, end_offset=layout.INT64_MAX, committed=None)


def written(directory: Path, hashes: Array, positions: Array, *, run_entries: int) -> KeyIndex:
    """An index of one small segment with these entries, put in place and opened."""
    opened = segment(directory, build_batch([(b"k", b"v")]))
    writer = KeyIndexWriter(directory, 0, SECRET, run_entries=run_entries)
    for part in range(0, len(hashes), 1000):
        writer.add(hashes[part : part + 1000], positions[part : part + 1000])
    writer.finish(opened.files.log, opened.limit, [0])
    writer.temporary.rename(writer.path)
    index = KeyIndex.open(directory, opened)
    assert index is not None
    opened.close()
    assert {path.name for path in directory.iterdir()} == {opened.files.log.name, writer.path.name}
    return index


def keys_of(count: int) -> tuple[list[bytes], Array]:
    keys = [b"key-%d" % number for number in range(count)]
    return keys, np.array([_key_hash(key, SECRET) for key in keys], dtype=np.uint64)


@pytest.mark.parametrize("count", [0, 1, 2, 510, 511, 512, 1021, 1022, 1023, 20_000])
@pytest.mark.parametrize("run_entries", [1 << 20, 700])
def test_every_key_is_found_at_its_positions(tmp_path: Path, count: int, run_entries: int) -> None:
    keys, hashes = keys_of(count)
    positions = np.arange(count, dtype=np.int64) * 7
    index = written(tmp_path, hashes, positions, run_entries=run_entries)

    assert index.count == count
    for number in range(0, count, max(1, count // 200)):
        found = index.positions(keys[number])
        assert found is not None
        assert number * 7 in found
        assert len(found) <= 2
    assert index.positions(b"nobody") == []
    index.close()


@pytest.mark.parametrize("way", ["key by key", "a block at once", "three", "all", "held"])
@pytest.mark.parametrize("count", [0, 1, 511, 512, 3_000])
def test_the_positions_of_many_keys_are_those_of_each(
    tmp_path: Path, count: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "kafkalog.cleaner.key_index.key_index"
    blocks = {"a block at once": 1, "three": 3}.get(way, 256)
    monkeypatch.setattr(f"{place}._BLOCKS_AT_ONCE", blocks)
    monkeypatch.setattr(f"{place}._BLOCKS_PER_KEY", 0 if way == "key by key" else 1 << 40)
    hashes = keys_of(count)[1] if count < 3_000 else np.repeat(keys_of(3)[1], 1_000)
    positions = np.arange(count, dtype=np.int64) * 7
    index = written(tmp_path, hashes, positions, run_entries=1 << 20)
    assert way != "held" or index.hold()
    others = np.array([_key_hash(b"of nobody", SECRET), 0, (1 << 64) - (1 << 31)], dtype=np.uint64)
    for step in (1, 2, 700):
        asked = np.unique(np.concatenate((hashes[::step], others)))
        expected = positions[np.isin(hashes, asked)].tolist()
        found = index.positions_of(asked)
        assert found is not None
        assert found.tolist() == expected
        pairs = index.places_of(asked)
        assert pairs is not None
        wanted = [
            (number, position)
            for number, each in enumerate(asked.tolist())
            for position in positions[hashes == each].tolist()
        ]
        assert list(zip(*(each.tolist() for each in pairs), strict=True)) == wanted
    index.close()


def test_hashes_that_crowd_are_all_found(tmp_path: Path) -> None:
    """Thousands of entries of one hash fill several blocks; nothing of them is lost."""
    wanted = _key_hash(b"wanted", SECRET)
    rest = keys_of(3000)[1]
    hashes = np.concatenate((rest, np.full(2000, wanted, dtype=np.uint64)))
    positions = np.arange(len(hashes), dtype=np.int64)
    index = written(tmp_path, hashes, positions, run_entries=1 << 20)

    assert index.positions(b"wanted") == list(range(3000, 5000))
    index.close()


@pytest.mark.parametrize("word", [0, (1 << 64) - 1])
def test_hashes_at_either_end_are_found(tmp_path: Path, word: int) -> None:
    low = word & ~((1 << layout.KEYS_POSITION_BITS) - 1)
    hashes = np.concatenate((keys_of(600)[1], np.array([low], dtype=np.uint64)))
    index = written(tmp_path, hashes, np.arange(601, dtype=np.int64), run_entries=1 << 20)
    found = index.places_of(np.array([low], dtype=np.uint64))

    assert found is not None
    assert [each.tolist() for each in found] == [[0], [600]]
    index.close()


def test_uneven_hashes_are_found_too(tmp_path: Path) -> None:
    """As nobody can make them without the secret: the guesses are wrong, the search ends."""
    hashes = np.sort(keys_of(5000)[1] >> np.uint64(9)) & ~np.uint64(0x7FFFFFFF)
    index = written(tmp_path, hashes, np.arange(5000, dtype=np.int64), run_entries=1 << 20)
    for place in (0, 1, 2500, 4998, 4999):
        first = index._first_block(int(hashes[place]))
        assert first is not None
        block = index._blocks(first, 1)
        assert block is not None
        assert int(block[-1]) >= int(hashes[place])
        before = index._blocks(first - 1, 1) if first else None
        assert before is None or int(before[-1]) < int(hashes[place])
    index.close()


def test_entries_that_do_not_ascend_are_damage_though_their_checksum_is_right(
    tmp_path: Path,
) -> None:
    _, hashes = keys_of(1200)
    written(tmp_path, hashes, np.arange(1200, dtype=np.int64), run_entries=1 << 20).close()
    path = tmp_path / layout.key_index_file(0)
    data = bytearray(path.read_bytes())
    start, end = layout.KEYS_BLOCK, 2 * layout.KEYS_BLOCK - layout.CHECKSUM.size
    data[start : start + 16] = data[start + 8 : start + 16] + data[start : start + 8]
    layout.CHECKSUM.pack_into(data, end, crc32c(data[start:end]))
    path.write_bytes(data)
    opened = segment(tmp_path, build_batch([(b"k", b"v")]))
    index = KeyIndex.open(tmp_path, opened)
    opened.close()

    assert index is not None
    assert index.places_of(np.sort(hashes)) is None
    assert index.places_of(np.sort(hashes)[:1]) is None
    assert not index.hold()
    index.close()


def test_an_index_is_opened_for_its_own_segment_alone(tmp_path: Path) -> None:
    _, hashes = keys_of(10)
    written(tmp_path, hashes, np.arange(10, dtype=np.int64), run_entries=100).close()

    alike = build_batch([(b"k", b"w")])
    assert len(alike) == len(build_batch([(b"k", b"v")]))
    for data in (alike, alike * 2, b""):
        other = segment(tmp_path, data)
        assert KeyIndex.open(tmp_path, other) is None
        other.close()


def test_a_file_that_was_replaced_has_no_index(tmp_path: Path) -> None:
    """The index is that of the file of this name, and a reader may have the one before open."""
    opened = segment(tmp_path, build_batch([(b"k", b"v")]))
    writer = KeyIndexWriter(tmp_path, 0, SECRET)
    writer.finish(opened.files.log, opened.limit, [0])
    writer.temporary.rename(writer.path)
    assert KeyIndex.open(tmp_path, opened) is not None

    data = opened.files.log.read_bytes()
    opened.files.log.rename(tmp_path / "aside")
    opened.files.log.write_bytes(data)
    assert KeyIndex.open(tmp_path, opened) is None
    opened.files.log.unlink()
    assert KeyIndex.open(tmp_path, opened) is None
    opened.close()


def test_a_writer_that_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    writer = KeyIndexWriter(tmp_path, 0, SECRET, run_entries=100)
    writer.add(keys_of(1000)[1], np.arange(1000, dtype=np.int64))
    assert list(tmp_path.iterdir())
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_an_index_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    index = written(tmp_path, *keys_of_some(10), run_entries=100)
    source = index._source
    assert isinstance(source, FileBytes)
    fd = source.fd
    del source
    os.fstat(fd)
    del index
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def keys_of_some(count: int) -> tuple[Array, Array]:
    return keys_of(count)[1], np.arange(count, dtype=np.int64)


def test_keys_of_records_are_hashed_as_a_single_key_is() -> None:
    keys = [b"", b"a", b"12345678", b"123456789"]
    data = build_batch([(key, b"v") for key in keys])
    table, _, _ = scan_batches(data)
    records = index_records(data, table, path="log", file_position=0)

    found = key_hashes(records, np.arange(4), SECRET).tolist()
    assert found == [_key_hash(key, SECRET) for key in keys]
    assert len(set(found)) == 4
    assert all(word % (1 << layout.KEYS_POSITION_BITS) == 0 for word in found)
