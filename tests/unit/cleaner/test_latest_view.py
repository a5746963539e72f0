from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.errors import InvalidInputError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.cleaner.naive import Batch, batch, foreign_log


def singles(first: int, *names: str) -> list[Batch]:
    """One batch per record, as a producer without batching writes."""
    return [batch(first + i, [(name, f"v{first + i}")]) for i, name in enumerate(names)]


def view(engine: DirectoryLog) -> tuple[list[tuple[object, ...]], int]:
    """The latest records up to the end, and how many offsets were passed for them."""
    passed = [0]
    with engine.snapshot("t", 0, whole=True) as snapshot:
        rows = latest(
            snapshot,
            snapshot.state.high_watermark,
            budget_bytes=24_000,
            schema=changelog_schema(),
            progress=lambda _, of: passed.append(of),
        )
        columns = ("key", "value", "offset")
        found = [
            row
            for part in rows
            for row in zip(*(part[c].to_pylist() for c in columns), strict=True)
        ]
    return found, passed[-1]


def test_a_broker_is_not_believed_that_its_log_is_clean(tmp_path: Path) -> None:
    """Its checkpoint may be older than a truncation of the log."""
    segments = {0: singles(0, "a", "b", "a"), 3: []}
    engine = foreign_log(tmp_path, segments, first_dirty=3)
    assert view(engine) == ([(b"b", b"v1", 1), (b"a", b"v2", 2)], 2 * 3)


@pytest.mark.parametrize("budget", ["x", 1.5, float("nan"), True, 0, -1])
def test_a_budget_is_a_number_of_bytes(tmp_path: Path, budget: Any) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        with pytest.raises(InvalidInputError, match="budget_bytes: expected"):
            log.latest("t", budget_bytes=budget)


@pytest.mark.parametrize("budget", [1, 48, 72, 1000])
def test_the_smallest_budget_is_slow_and_finds_each_key(tmp_path: Path, budget: int) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.append("t", [(f"k{number % 8}", str(number)) for number in range(24)])
        found = [row for batch in log.latest("t", budget_bytes=budget) for row in batch.to_pylist()]
    assert sorted(int(row["value"]) for row in found) == [*range(16, 24)]
