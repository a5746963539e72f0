"""Retention, the compaction lag, status and explain: one rule in a directory and in a store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.log import KafkaLog

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000


@pytest.fixture(params=["directory", "store"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KafkaLog]:
    is_store = request.param == "store"
    place = f"memory://{secrets.token_hex(8)}/log" if is_store else str(tmp_path / "log")
    with kafkalog.open(place) as opened:
        yield opened


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
