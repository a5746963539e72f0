"""Keys and offsets on disk, against sets and dicts in memory."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kafkalog.cleaner.dedup.offset_map import OffsetMap
from kafkalog.cleaner.dedup.spill.key_runs import BUCKETS, KeyRuns
from kafkalog.cleaner.dedup.spill.offset_list import OffsetList
from kafkalog.cleaner.dedup.spill.spill_file import SpillFile, sweep_spill_files
from kafkalog.cleaner.dedup.spill.spilled import Spill
from kafkalog.errors import StorageError

Uint64s = npt.NDArray[np.uint64]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- files ---------------------------------------------------------------------------------------


def test_a_spill_file_gives_back_its_words_and_goes(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, "x")
    file.append(np.arange(10, dtype=np.int64))
    file.append(np.arange(10, 20, dtype=np.uint64).reshape(5, 2))
    file.append(np.empty(0, dtype=np.int64))
    file.write(np.array([7], dtype=np.int64), 3)
    assert file.count == 20
    assert file.read(2, 4).tolist() == [2, 7, 4, 5]
    assert file.read(18, 2).tolist() == [18, 19]
    assert names(tmp_path) == ["kl-spill-x"]
    file.close()
    file.close()
    assert names(tmp_path) == []


def test_a_spill_file_that_somebody_cut_is_noticed(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, "x")
    file.append(np.arange(10, dtype=np.int64))
    with file.path.open("r+b") as cut:
        cut.truncate(40)
    with pytest.raises(StorageError, match="expected 80 bytes"):
        file.read(0, 10)


def test_a_directory_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="kl-spill-x: cannot be written"):
        SpillFile(tmp_path / "absent", "x")


def test_what_a_dead_cleaner_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    SpillFile(tmp_path, "dirty")
    SpillFile(tmp_path, "dirty-1")
    for name in ("kl-spilling", "kl-cleaner.lock", f"{0:020d}.log"):
        (tmp_path / name).touch()
    assert sweep_spill_files(tmp_path) == 2
    assert names(tmp_path) == [f"{0:020d}.log", "kl-cleaner.lock", "kl-spilling"]


# --- keys ----------------------------------------------------------------------------------------


def test_the_rows_of_a_bucket_come_run_by_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    runs = KeyRuns(tmp_path, "keys")
    added = [rng.integers(0, 2**64, (count, 3), dtype=np.uint64) for count in (20_000, 0, 1, 700)]
    for rows in added:
        runs.add(rows.copy())
    everything = np.concatenate(added)
    buckets = everything[:, 1] >> np.uint64(56)
    assert runs.counts.tolist() == np.bincount(buckets.astype(int), minlength=BUCKETS).tolist()
    assert runs.size == everything.nbytes
    for first, last in ((0, 1), (3, 200), (255, 256), (0, 256), (9, 9)):
        pieces = list(runs.pieces(first, last))
        found = [tuple(row) for piece in pieces for row in piece.tolist()]
        wanted = everything[(buckets >= first) & (buckets < last)]
        assert sorted(found) == sorted(map(tuple, wanted.tolist()))
        assert all(len(piece) for piece in pieces)


# --- offsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [1, 7, 100, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_an_offset_list_is_a_set(tmp_path: Path, seed: int, memory: int) -> None:
    rng = random.Random(seed)
    members = rng.sample(range(3_000), 600)
    offsets = OffsetList(tmp_path, "x")
    for first in range(0, 600, 90):
        offsets.append(np.array(members[first : first + 90], dtype=np.int64))
    offsets.sort(np.empty(memory, dtype=np.int64), 100)
    known = set(members)
    asked = sorted(rng.sample(range(3_500), 2_000))
    for first in range(0, 2_000, 130):
        piece = asked[first : first + 130]
        found = offsets.contains(np.array(piece, dtype=np.int64)).tolist()
        assert found == [offset in known for offset in piece]
    for _ in range(3):  # in no order, and some twice
        piece = [rng.randrange(3_500) for _ in range(200)]
        found = offsets.contains(np.array(piece, dtype=np.int64)).tolist()
        assert found == [offset in known for offset in piece]
    assert offsets.contains(np.empty(0, dtype=np.int64)).tolist() == []
    offsets.close()
    assert names(tmp_path) == []


def test_windows_of_an_offset_list_are_small_and_it_is_right_all_the_same(tmp_path: Path) -> None:
    members = np.random.default_rng(1).permutation(200_000)[:100_000].astype(np.int64)
    offsets = OffsetList(tmp_path, "x")
    offsets.append(members)
    offsets.sort(np.empty(9_000, dtype=np.int64), 0)
    is_member = np.zeros(200_000, dtype=np.bool_)
    is_member[members] = True
    for first in range(0, 200_000, 3_000):
        asked = np.arange(first, min(first + 3_000, 200_000))
        assert (offsets.contains(asked) == is_member[asked]).all()
        assert all(len(run.window) <= 512 for run in offsets._runs)


# --- resolving -----------------------------------------------------------------------------------


def random_hashes(rng: np.random.Generator, count: int, crowded_bits: int) -> Uint64s:
    """Hashes that agree in so many bits of their bucket: far more keys than the map holds."""
    hashes = rng.integers(0, 2**64, (count, 2), dtype=np.uint64)
    if crowded_bits:
        hashes[:, 1] >>= np.uint64(crowded_bits)
    return hashes


@pytest.mark.parametrize("crowded_bits", [0, 8, 20, 40])
@pytest.mark.parametrize("slots", [3, 40, 5_000])
def test_dirty_and_clean_keys_are_resolved_however_many_share_a_bucket(
    tmp_path: Path, crowded_bits: int, slots: int
) -> None:
    rng = np.random.default_rng(slots + crowded_bits)
    keys = random_hashes(rng, 200, crowded_bits)
    clean = rng.integers(0, 200, 150)
    dirty = rng.integers(50, 200, 450)
    sizes = np.ones(450, dtype=np.int64)
    offsets = np.arange(150, 600)
    offset_map = OffsetMap(slots)
    spill = Spill(tmp_path, offset_map, lambda: None)
    first = 0
    while first < 450:
        first, _ = offset_map.put(keys[dirty], sizes, offsets, first=first)
        spill.take_map()
    for part in np.array_split(np.arange(150), 7):
        spill.take_clean(keys[clean[part]], part)
    assert spill.key_bytes > 0
    spilled = spill.resolve(150, 0.9, lambda: None)
    spill.close()
    assert names(tmp_path) == ["kl-spill-kept", "kl-spill-obsolete"]
    latest = {int(key): int(offset) for key, offset in zip(dirty, offsets, strict=True)}
    kept = set(latest.values())
    assert spilled.kept.contains(offsets).tolist() == [o in kept for o in offsets.tolist()]
    assert spilled.obsolete_clean.contains(np.arange(150)).tolist() == [
        key in latest for key in clean.tolist()
    ]
    spilled.close()
    assert names(tmp_path) == []


def test_a_spill_that_is_given_up_leaves_no_file(tmp_path: Path) -> None:
    offset_map = OffsetMap(20)
    spill = Spill(tmp_path, offset_map, lambda: None)
    offset_map.put(
        random_hashes(np.random.default_rng(1), 10, 0),
        np.ones(10, dtype=np.int64),
        np.arange(10, dtype=np.int64),
    )
    spill.take_map()
    assert len(names(tmp_path)) == 4
    spill.close()
    assert names(tmp_path) == []
