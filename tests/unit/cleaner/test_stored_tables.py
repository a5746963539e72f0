"""Latest records, lookups of keys and of times give for an object store what a directory gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.key_index.latest_view import latest_of_topic
from kafkalog.datasource.ktable import KTable
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.reading import time_offsets
from tests.unit.datasource.logs import NOW_MS
from tests.unit.datasource.two_logs import TwoLogs, sorted_rows

TIMES = [-1, -2, -3, -4, -5, 0, NOW_MS, NOW_MS + 1, NOW_MS + 55, NOW_MS + 63, NOW_MS + 10**6]


@pytest.fixture
def two(tmp_path: Path) -> TwoLogs:
    made = TwoLogs(tmp_path).topic()
    for count in (20, 1, 40, 3):
        made.append(count)
    return made


@pytest.mark.parametrize("budget_bytes", [1 << 20, 200])
def test_the_latest_records_are_those_of_a_directory(two: TwoLogs, budget_bytes: int) -> None:
    ours, stored = (
        sorted_rows(
            [
                row
                for batch in latest_of_topic(
                    log, "t", include_headers=True, budget_bytes=budget_bytes
                )
                for row in batch.to_pylist()
            ]
        )
        for log in two.logs
    )
    assert stored == ours
    assert ours


def test_a_key_is_looked_up_as_in_a_directory(two: TwoLogs) -> None:
    directory, stored = (KeyLookup(log, "t") for log in two.logs)
    with directory, stored:
        for _ in range(2):
            for key in ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "no such key"):
                for partition in (None, 0, 1, 2):
                    expected = directory.get(key, partition=partition)
                    assert stored.get(key, partition=partition) == expected
            two.append(9)  # which a lookup sees


def test_a_lookup_asks_for_the_extents_from_the_last_one_on(two: TwoLogs) -> None:
    log = two.logs[1]
    with KeyLookup(log, "t") as lookup:
        before = dict(log.client.counts)
        assert lookup.get("k6", partition=2) is not None  # number 62, in the last object
        once = log.client.counts["GET"] - before["GET"]
        assert lookup.get("k6", partition=2) is not None
        again = log.client.counts["GET"] - before["GET"] - once
    # Two polls and an object; then a poll.
    assert (once, again) == (3, 1)


@pytest.mark.parametrize("level", [time_offsets.READ_COMMITTED, time_offsets.READ_UNCOMMITTED])
@pytest.mark.parametrize("ms", TIMES)
def test_the_offset_of_a_time_is_that_of_a_directory(two: TwoLogs, ms: int, level: str) -> None:
    ours, stored = (log.offset_for_time("t", ms, isolation_level=level) for log in two.logs)
    assert stored == ours


def test_times_out_of_order_are_looked_up_as_in_a_directory(tmp_path: Path) -> None:
    two, rng = TwoLogs(tmp_path).topic("t", 1), random.Random(5)
    for _ in range(8):
        times = [NOW_MS + rng.randrange(100) for _ in range(5)]
        two.append_at(times)
    for ms in [-3, *(NOW_MS + shift for shift in range(-1, 102))]:
        ours, stored = (log.offset_for_time("t", ms) for log in two.logs)
        assert stored == ours


def test_the_largest_time_is_looked_up_in_one_object(tmp_path: Path) -> None:
    two = TwoLogs(tmp_path).topic("t", 1)
    for number in range(6):
        two.append_at([NOW_MS + 10 * number, NOW_MS + 10 * number + 3])
    log = two.logs[1]
    before = log.client.counts["GET"]
    found = log.offset_for_time("t", time_offsets.MAX_TIMESTAMP)[0]
    assert found is not None and (found.offset, found.timestamp) == (11, NOW_MS + 53)
    polls = 3
    assert log.client.counts["GET"] - before == polls + 1


def test_a_ktable_looks_keys_up_in_an_object_store(two: TwoLogs) -> None:
    with KTable(None, two.url, "t") as stored, KTable(None, two.directory, "t") as directory:
        for key in (b"k1", b"k2", "no such key"):
            assert stored.lookup(key, partition=1) == directory.lookup(key, partition=1)
    with pytest.raises(UnknownTopicError):
        KTable(None, two.url, "no such topic")
    with pytest.raises(InvalidInputError, match="there is no log"):
        KTable(None, "memory://nobody/log", "t")
