"""A difference from Kafka is found, unless a sentence of the limits explains it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kafkalog.storage_engine.reading import time_offsets
from tests import ROOT
from tests.conformance import twin_kafka
from tests.torture import twin
from tests.torture.twin_rules import ENDS, RULES

needs_kafka = pytest.mark.skipif(
    twin_kafka.fault() is not None and "CI" not in os.environ, reason=str(twin_kafka.fault())
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No Java process of one test is another's."""
    yield
    twin.kafka_of.cache_clear()


def test_each_rule_of_a_difference_has_its_sentence_in_the_limits() -> None:
    limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    assert [name for name, (sentence, _) in RULES.items() if sentence not in limits] == []
    assert {*ENDS} < {*RULES}


@needs_kafka
@pytest.mark.peers
def test_drawn_logs_differ_only_by_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    twin.main(["--only", "0 2 5 7 12 57"])
    assert "6 logs" in capsys.readouterr().out


@needs_kafka
@pytest.mark.peers
def test_a_wrong_answer_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_offsets, "latest", lambda snapshot: None)
    with pytest.raises(SystemExit):
        twin.main(["--only", "2 5 7"])
    told = capsys.readouterr()
    assert "3 violations" in told.out
    assert "times" in told.err
    assert "--only '2'" in told.err


def test_without_kafka_a_user_is_told_and_ci_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(twin_kafka, "fault", lambda: "no jars of Kafka")
    for is_ci, status in ((False, 0), (True, 1)):
        monkeypatch.setenv("CI", "1") if is_ci else monkeypatch.delenv("CI", raising=False)
        with pytest.raises(SystemExit) as ended:
            twin.main(["--quick"])
        assert ended.value.code == status
        assert "skipped: no jars of Kafka" in capsys.readouterr().err
