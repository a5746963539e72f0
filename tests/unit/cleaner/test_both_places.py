"""Retention, the compaction lag, status and explain: one rule in a directory and in a store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cleaner.schedule import manager
from kafkalog.log import KafkaLog

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000


@pytest.fixture(params=["directory", "store"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KafkaLog]:
    is_store = request.param == "store"
    place = f"memory://{secrets.token_hex(8)}/log" if is_store else str(tmp_path / "log")
    with kafkalog.open(place) as opened:
        yield opened


def turn(log: KafkaLog, now_ms: int) -> None:
    """Do what the background cleaner does."""
    manager.clean_filthiest(log._engine, now_ms=now_ms)
    manager.retain(log._engine, now_ms=now_ms, is_skipped=lambda _: False)
    manager.sweep(log._engine, now_ms=now_ms)


@pytest.mark.parametrize(
    ("keep", "segment", "config"),
    [
        (30, 7, {}),
        (10, 3, {"segment.ms": str(3 * DAY_MS)}),
        (20, 1, {"segment.bytes": "100"}),
        (5, 7, {"cleanup.policy": "compact,delete"}),
    ],
)
def test_records_go_with_their_segment_once_its_last_one_is_too_old(
    log: KafkaLog, keep: int, segment: int, config: dict[str, str]
) -> None:
    """A record a day; a segment takes those of at most `segment` days after its first one."""
    policy = {"cleanup.policy": "delete", "retention.ms": str(keep * DAY_MS)}
    log.create_topic("t", 1, policy | config, now_ms=NOW_MS)
    starts = []
    for day in range(keep + 2 * segment + 3):
        log.append("t", [(f"k{day}", "v")], now_ms=NOW_MS + day * DAY_MS)
        turn(log, NOW_MS + day * DAY_MS + 1)
        starts.append(log.offsets("t")[0][0])
    for day, start in enumerate(starts):
        assert day - keep - segment <= start <= max(0, day - keep + 1)
    assert starts[-1] > 0


@pytest.mark.parametrize(
    ("lag", "config", "wanted"),
    [
        (30, {}, 31),
        (5, {}, 7),
        (12, {"segment.ms": str(2 * DAY_MS)}, 13),
        (9, {"segment.bytes": "200"}, 10),
    ],
)
def test_a_deleted_key_is_gone_once_the_largest_lag_has_passed(
    log: KafkaLog, lag: int, config: dict[str, str], wanted: int
) -> None:
    """It was deleted on day 1; an active segment is closed by the first record after its time."""
    lags = {"max.compaction.lag.ms": str(lag * DAY_MS), "min.cleanable.dirty.ratio": "0.9"}
    log.create_topic("t", 1, lags | config, now_ms=NOW_MS)
    users = [(f"user-{number}", "x" * 200) for number in range(90)]
    log.append("t", users, now_ms=NOW_MS)
    log.clean("t", force=True, now_ms=NOW_MS + 1)
    gone = None
    for day in range(1, lag + 4):
        log.append("t", [(f"user-{day}", None)], now_ms=NOW_MS + day * DAY_MS)
        log.clean(now_ms=NOW_MS + day * DAY_MS + 1_000)
        keys = [row["key"] for rows in log.read("t", 0) for row in rows.to_pylist() if row["value"]]
        if gone is None and b"user-1" not in keys:
            gone = day
    assert gone == wanted


@pytest.mark.parametrize(
    ("rows", "kept", "tombstones"),
    [
        ([("a", "1"), ("b", "1"), ("a", None)], 2, 1),
        ([("a", "1"), ("a", "2"), ("a", "3")], 1, 0),
        ([("a", None), ("b", None)], 2, 2),
        ([("a", "1")], 1, 0),
    ],
)
def test_status_tells_the_last_cleaning_and_what_waits(
    log: KafkaLog, rows: list[tuple[str, str | None]], kept: int, tombstones: int
) -> None:
    log.create_topic("t", 1, now_ms=NOW_MS)
    log.append("t", rows, now_ms=NOW_MS)
    log.clean("t", force=True, now_ms=NOW_MS + 1_000)
    log.append("t", [("c", "1")], now_ms=NOW_MS + 2_000)
    (status,) = log.status(now_ms=NOW_MS + 3_000)
    last = status.last_cleaning
    assert last is not None
    assert (last.end_offset, last.records_read, last.records_kept) == (len(rows), len(rows), kept)
    assert status.tombstones_waiting == tombstones
    horizon = NOW_MS + 1_000 + DAY_MS if tombstones else None
    assert status.earliest_delete_horizon_ms == horizon
    assert (status.state, status.reason_code) == ("not due", "active segment")
    assert (status.first_dirty_offset, status.first_uncleanable_offset) == (len(rows), len(rows))


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"cleanup.policy": "delete"}, "policy"),
        ({"segment.bytes": "100", "min.compaction.lag.ms": str(DAY_MS)}, "lag"),
        ({"segment.bytes": "100", "min.cleanable.dirty.ratio": "1"}, "ratio"),
        ({}, "active segment"),
    ],
)
def test_explain_says_what_a_partition_waits_for(
    log: KafkaLog, config: dict[str, str], code: str
) -> None:
    log.create_topic("t", 1, config, now_ms=NOW_MS)
    for number in range(8):
        log.append("t", [(f"k{number}", "v" * 40)], now_ms=NOW_MS + number)
    (found,) = log.explain("t", now_ms=NOW_MS + 20_000)
    assert (found.is_due, found.findings[0].code) == (False, code)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_batch_without_records_stays_only_at_the_end_of_the_log(
    log: KafkaLog, goes_on: bool
) -> None:
    log.create_topic("t", 1, now_ms=NOW_MS)
    log.append("t", [("a", None)], now_ms=NOW_MS)
    log.clean("t", force=True, now_ms=NOW_MS + 1)
    if goes_on:
        log.append("t", [("b", "1")], now_ms=NOW_MS + 2 * DAY_MS)
    log.clean("t", now_ms=NOW_MS + 2 * DAY_MS)
    (status,) = log.status(now_ms=NOW_MS + 2 * DAY_MS)
    assert status.last_cleaning is not None
    header = 0 if goes_on else 61
    assert (status.last_cleaning.bytes_written, status.clean_bytes) == (header, header)


def test_a_cleaning_leaves_the_last_clean_segment_alone_if_nothing_in_it_has_changed(
    log: KafkaLog,
) -> None:
    log.create_topic("t", 1, {"delete.retention.ms": "0", "segment.bytes": "100"}, now_ms=NOW_MS)
    log.append("t", [("a", None)], now_ms=NOW_MS)
    log.append("t", [("b", "v" * 300)], now_ms=NOW_MS)
    log.clean("t", force=True, now_ms=NOW_MS + 1)
    log.clean("t", now_ms=NOW_MS + 2)
    (status,) = log.status(now_ms=NOW_MS + 3)
    assert status.last_cleaning is not None
    assert (status.last_cleaning.records_read, status.last_cleaning.bytes_written) == (1, 0)
