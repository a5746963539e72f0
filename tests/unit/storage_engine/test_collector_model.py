"""The rules of the collector, checked in all interleavings of a model of its processes."""

from __future__ import annotations

import pytest

from tests.unit.storage_engine.collector_model import Model, Rules, Violation


def test_no_interleaving_lets_the_log_name_a_missing_object() -> None:
    assert Model(Rules.ALL, 1, rounds=3).explore() > 400


@pytest.mark.slow
def test_two_committers_lose_nothing_to_the_collector_either() -> None:
    assert Model(Rules.ALL, 2).explore() > 50_000


@pytest.mark.parametrize("rules", [each for each in Rules if each is not Rules.ALL])
def test_without_one_of_the_rules_an_object_is_missed(rules: Rules) -> None:
    with pytest.raises(Violation, match="is missing"):
        Model(rules, 1).explore()
