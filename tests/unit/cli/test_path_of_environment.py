"""KAFKALOG_PATH stands for a PATH that is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

import kafkalog as library
from tests.unit.cli.conftest import Command

NOW_MS = 1_700_000_000_000


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with library.open(tmp_path / "shop") as log:
        log.create_topic("stock")
        log.append("stock", [("apple", "3")], now_ms=NOW_MS)
    with library.open(tmp_path / "other") as log:
        log.create_topic("stock")
    monkeypatch.setenv("KAFKALOG_PATH", str(tmp_path / "shop"))
    return tmp_path / "shop"


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    "line",
    [
        "read stock --json",
        "read --partition 0 stock --json",
        "tail stock",
        "status",
        "status stock",
        "explain",
        "topics list",
        "topics describe stock",
        "topics create prices --partitions 2",
        "clean --force",
        "verify",
        "writers",
        "erase stock apple --dry-run --json",
    ],
)
def test_a_path_that_is_left_out_is_that_of_the_environment(kafkalog: Command, line: str) -> None:
    result = kafkalog(*line.split())
    assert result.status == (1 if "erase" in line else 0), result.err


def test_a_path_that_is_given_counts(kafkalog: Command, shop: Path) -> None:
    assert len(kafkalog("read", "stock").lines) == 1
    for other in (shop.parent / "other", "./other"):
        assert kafkalog("read", other, "stock").lines == []
    changes = Path("changes.jsonl")
    changes.write_text('{"key": "fig", "value": "1"}\n')
    assert kafkalog("append", "stock", changes).status == 0
    assert len(kafkalog("read", "stock").lines) == 2
    assert len(kafkalog("read", "./shop", "stock").lines) == 2


def test_help_and_errors_are_those_of_any_other_line(kafkalog: Command, shop: Path) -> None:
    assert "KAFKALOG_PATH" in kafkalog("read", "--help").out
    result = kafkalog("read")
    assert (result.status, "TOPIC" in result.err) == (2, True)
    assert kafkalog("read", "none").err.startswith("kafkalog: topic 'none' does not exist")


def test_without_it_a_path_has_to_be_given(
    kafkalog: Command, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAFKALOG_PATH")
    assert kafkalog("read", "stock").status == 2
    assert len(kafkalog("read", "shop", "stock").lines) == 1
