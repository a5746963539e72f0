"""Small segment objects of copies with transactions are merged, and nothing of these is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.schedule import manager
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.object_store import regroup
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.builders.batch_builder import ABORT, batch, marker
from tests.unit.storage_engine.copied_log import (
    NOW_MS,
    RandomBatches,
    batches,
    ends,
    fill,
    producers,
    records,
)
from tests.unit.storage_engine.store_log import new_object_log

CONFIG = {"cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": "1.0"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[DirectoryLog]:
    with DirectoryLog(tmp_path / "source") as log:
        log.create_topic("t", 1, CONFIG, now_ms=NOW_MS)
        yield log


@pytest.fixture
def store() -> ObjectLog:
    return new_object_log()


def merged(log: DirectoryLog, store: ObjectLog, seed: int) -> None:
    """Copy a random log without gaps, bit by bit, until segment objects are merged."""
    written = RandomBatches(random.Random(seed), gaps=(0,))
    for _ in range(40):
        fill(log, written, 1, NOW_MS)
        copy(log, store, now_ms=NOW_MS)
        if upkeep.merge_due(store, now_ms=NOW_MS):
            return
    raise AssertionError("nothing was merged")


def content(log: Any) -> tuple[Any, ...]:
    levels = ("read_committed", "read_uncommitted")
    return batches(log), ends(log), producers(log), *(records(log, level) for level in levels)


def check(log: DirectoryLog, store: ObjectLog, directory: Path) -> None:
    """The store has what the source has, and so has a copy of it; and it can be cleaned."""
    expected = content(log)
    assert content(store) == expected
    with DirectoryLog(directory) as back:
        copy(store, back, now_ms=NOW_MS)
        assert content(back) == expected
    cleanings = manager.clean(store, "t", force=True, now_ms=NOW_MS)
    assert [each.error for each in cleanings if each.error is not None] == []
    assert producers(store) == expected[2]


@pytest.mark.parametrize("seed", range(8))
def test_merged_segments_have_their_aborted_transactions_and_producers(
    tmp_path: Path, log: DirectoryLog, store: ObjectLog, seed: int
) -> None:
    merged(log, store, seed)
    assert [str(each) for each in verify_store(store, deep=True)] == []
    check(log, store, tmp_path / "back")
    assert [str(each) for each in verify_store(store, deep=True)] == []


@pytest.mark.parametrize("seed", range(8))
def test_producers_that_an_early_release_left_out_of_a_merge_are_replayed(
    tmp_path: Path, log: DirectoryLog, store: ObjectLog, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup._Transactions, "sections", lambda *_: {})
    merged(log, store, seed)
    check(log, store, tmp_path / "back")


def test_batches_below_the_log_start_are_replayed_while_they_are_there(
    log: DirectoryLog, store: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup._Transactions, "sections", lambda *_: {})
    plain = [batch(first, 2) for first in range(4, 16, 2)]
    for made in (batch(0, 2, of=1), batch(2, 2, producer=(12, 0, 0)), *plain):
        log.append_raw("t", 0, made.data, now_ms=NOW_MS)
        copy(log, store, now_ms=NOW_MS)
    assert upkeep.merge_due(store, now_ms=NOW_MS)
    expected = producers(store)
    assert sorted(expected) == [1, 12]
    store.delete_records("t", 0, 5, now_ms=NOW_MS)
    assert producers(store) == expected
    log.append_raw("t", 0, marker(16, ABORT, 1).data, now_ms=NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    assert [str(each) for each in verify_store(store, deep=True)] == []
