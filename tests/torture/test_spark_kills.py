"""What the tests that kill Spark say of themselves is added up, and a failure is a violation."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.torture import spark_kills

LINES = [
    "kill  1: 9 processes",
    '{"kills": {"of whole queries": 60}, "beside": {"PostgreSQL ended": 1}}',
    '{"kills": {"of whole queries": 40, "of one process of theirs": 5}}',
    '{"beside": {"PostgreSQL ended": 2}}',
    '{"key": "value"}',
]


def test_all_that_is_told_is_added_up() -> None:
    assert spark_kills.counted(LINES, "kills") == {
        "of whole queries": 100,
        "of one process of theirs": 5,
    }
    assert spark_kills.counted(LINES, "beside") == {"PostgreSQL ended": 3}


@pytest.mark.parametrize(
    ("kills", "status", "fails"), [(70, 0, False), (60, 0, True), (70, 1, True)]
)
def test_a_run_fails_by_a_failure_or_by_too_few_kills(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kills: int,
    status: int,
    fails: bool,
) -> None:
    def kill(name: str, more: Mapping[str, str]) -> tuple[int, list[str]]:
        assert more["KAFKALOG_SEED"] == "7"
        return status if name == "steps" else 0, [json.dumps({"kills": {name: kills}}), "the end"]

    monkeypatch.setattr(spark_kills, "kill", kill)
    try:
        spark_kills.main(["--seed", "7", "--json"])
        has_failed = False
    except SystemExit:
        has_failed = True
    assert has_failed == fails
    told = capsys.readouterr()
    assert json.loads(told.out)["count"] == 3 * kills
    assert ("--seed 7 --only 'steps'" in told.err) == bool(status)
