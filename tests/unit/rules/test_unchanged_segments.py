"""Segments of which no key occurs again are neither read nor written."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerStats
from kafkalog.storage_engine.format import layout
from tests.builders.log_contents import pairs
from tests.unit.cleaner.naive import dump
from tests.unit.rules.places import Place

COUNT = 1_000
NEVER = 1 << 60
MODULE = "kafkalog.cleaner.rewrite.unchanged_segments"


@pytest.fixture
def filled(place: Place) -> Place:
    """Return a clean log of many segments with a key for each record."""
    return fill(place)


def fill(place: Place) -> Place:
    place.topic(segment_bytes=3_000, delete_retention_ms=500, file_delete_delay_ms=0)
    for start in range(0, COUNT, 100):
        rows = [(f"key-{n:05}", f"value-{n}") for n in range(start, start + 100)]
        place.append(*rows, now_ms=1_000)
    place.log.clean("t", force=True, now_ms=1_000)
    return place


def cleaned(place: Place, now_ms: int, **settings: object) -> CleanerStats:
    (stats,) = place.settings(**settings).log.clean("t", force=True, now_ms=now_ms)
    assert stats.error is None
    return stats


def test_a_segment_of_which_no_key_occurs_again_is_not_read(filled: Place) -> None:
    before = filled.content()
    assert len(before) > 8
    filled.append(("key-00003", "new"))
    stats = cleaned(filled, 2_000)
    assert stats.bytes_read < sum(filled.sizes()) / 4
    assert stats.records_removed == 1
    # That of the key, and the last one, to which the dirty one is added.
    assert len(before.items() & filled.content().items()) >= len(before) - 3
    assert dict(pairs(filled.log))[b"key-00003"] == b"new"


def test_what_is_left_alone_is_written_once_a_key_of_it_occurs_again(filled: Place) -> None:
    for now, number in ((2_000, 3), (2_100, 700), (2_200, 3), (2_300, COUNT - 1)):
        filled.append((f"key-{number:05}", str(now)))
        assert cleaned(filled, now).records_removed == 1
    assert len(pairs(filled.log)) == COUNT


@pytest.mark.parametrize(
    "rows",
    [
        [("key-00001", None)],
        [(f"key-{number:05}", None) for number in range(300, 310)],
    ],
)
def test_a_segment_with_tombstones_is_looked_at_until_they_are_gone(
    filled: Place, rows: list[tuple[str, None]]
) -> None:
    filled.append(*rows)
    assert cleaned(filled, 2_000).tombstones_kept == len(rows)
    filled.append(("key-00900", "x"))
    assert cleaned(filled, 2_100).tombstones_kept == len(rows)
    filled.append(("key-00901", "x"))
    assert cleaned(filled, 9_000).tombstones_kept == 0
    assert not {key.encode() for key, _ in rows} & set(dict(pairs(filled.log)))


def test_a_segment_whose_tombstones_are_gone_is_left_alone_again(filled: Place) -> None:
    filled.append(*((f"key-{n:05}", "new" if n % 50 else None) for n in range(COUNT)))
    assert cleaned(filled, 2_000).tombstones_kept == COUNT // 50
    filled.append(("of nobody", "x"))
    assert cleaned(filled, 9_000).tombstones_kept == 0
    assert any(batch.horizon is not None for batch in dump(filled.engine))
    size = sum(filled.sizes())
    filled.append(("of nobody", "x"))
    assert cleaned(filled, 9_100).bytes_read < size / 3


def test_damage_of_a_segment_that_is_left_alone_is_not_written_anew_and_verify_finds_it(
    filled: Place,
) -> None:
    filled.spoil(0, len(next(iter(filled.content().values()))) // 2)
    name, data = next(iter(filled.content().items()))
    filled.append(("of nobody", "new"))
    cleaned(filled, 2_000)
    assert filled.content()[name] == data
    assert any(name in found for found in filled.findings())
    filled.append(*((f"key-{number:05}", "new") for number in range(100)))
    (stats,) = filled.log.clean("t", force=True, now_ms=3_000)
    assert stats.error is not None and name in stats.error
    assert filled.content()[name] == data


def test_keys_beyond_the_buffer_and_batches_left_apart_are_cleaned_as_ever(filled: Place) -> None:
    rows = [(f"key-{n:05}", "new") for n in range(0, 500, 2)]
    filled.append(*rows)
    assert cleaned(filled, 2_000, dedupe_buffer_size=24 * 40).records_removed == 250
    filled.append(*rows[:9])
    assert cleaned(filled, 2_100, merge_batches=False).records_removed == 9
    filled.append(*rows[:9])
    assert cleaned(filled, 2_200, dedupe_buffer_size=24 * 4, spill=False).records_removed == 9
    assert len(dict(pairs(filled.log))) == COUNT


@pytest.mark.parametrize("seed", range(6))
def test_a_log_is_the_same_whether_segments_are_left_alone_or_written_again(
    place: Place, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("left", "again"):
        if name == "again":
            monkeypatch.setattr(f"{MODULE}.WORTHWHILE", NEVER)
        rng, read = random.Random(seed), 0
        with contextlib.closing(place.anew(tmp_path / name)) as log:
            fill(log)
            for now in (2_000, 2_200, 2_600, 4_000, 5_000):
                hot = rng.choice([10, 10, COUNT])
                rows = [
                    (f"key-{rng.randrange(hot):05}", None if rng.random() < 0.1 else f"{now}-{n}")
                    for n in range(rng.randrange(1, 60))
                ]
                log.append(*rows, now_ms=now)
                read += cleaned(log, now).bytes_read
            indexes = [log.sections(s) for s in (layout.INDEX, layout.TIME_INDEX)]
            found.append((log.bases(), [*log.content().values()], indexes, read))
    assert found[0][:3] == found[1][:3]
    assert found[0][3] < found[1][3]


def test_so_many_dirty_keys_that_asking_for_them_is_in_vain_are_not_held(
    filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.KEYS_MAX", 100)
    filled.append(*((f"key-{n:05}", "new") for n in range(300)), now_ms=2_000)
    assert cleaned(filled, 2_000).records_removed == 300
    assert len(dict(pairs(filled.log))) == COUNT
