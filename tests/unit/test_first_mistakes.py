"""The page of first mistakes shows errors that its lines really cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import kafkalog  # noqa: F401 - a fixture
from tests.unit.first_mistakes import error_of, make_log, mistakes, says


def test_the_page_has_at_least_fifty_mistakes() -> None:
    assert len(mistakes(of_spark=False)) + len(mistakes(of_spark=True)) >= 50


def test_each_line_without_spark_fails_as_the_page_says(
    tmp_path: Path,
    kafkalog: Any,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KAFKALOG_PATH", raising=False)
    names = make_log(tmp_path)
    said = {line: error_of(line, names, tmp_path, kafkalog) for _, line in mistakes(of_spark=False)}
    wrong = [(shown, said[line]) for shown, line in mistakes(False) if not says(shown, said[line])]
    assert wrong == []
