"""The rule of the commit log, checked in all interleavings of a model of its processes."""

from __future__ import annotations

import pytest

from tests.unit.storage_engine.commit_log_model import Check, Model, Violation


def test_with_the_boundary_no_interleaving_loses_or_invents_a_commit() -> None:
    assert Model(Check.BOUNDARY, tries=(1, 2), commits=3).explore() > 5_000


@pytest.mark.slow
def test_with_the_boundary_three_committers_lose_nothing_either() -> None:
    model = Model(Check.BOUNDARY, tries=(1, 1, 3), commits=3, has_reader=False)
    assert model.explore() > 400_000


def test_without_a_check_a_stopped_committer_believes_in_a_lost_commit() -> None:
    with pytest.raises(Violation, match="believes that it made"):
        Model(Check.NOTHING, tries=(1, 2), commits=2).explore()


def test_a_commit_must_ask_the_boundary_for_the_commits_it_has_read_too() -> None:
    """A commit that was read on the way may be one that a stopped committer made again."""
    with pytest.raises(Violation, match="believes"):
        Model(Check.LATE_BOUNDARY, tries=(1, 1, 3), commits=4, has_reader=False).explore()


def test_a_commit_must_ask_for_more_than_the_commit_before() -> None:
    """A second stopped committer may have made that one again. SlateDB: issues 352 and 1622."""
    with pytest.raises(Violation, match="believes"):
        Model(Check.PREDECESSOR, tries=(1, 1, 3), commits=3, has_reader=False).explore()


def test_a_boundary_that_moves_after_the_deletion_is_too_late() -> None:
    with pytest.raises(Violation, match="believes"):
        Model(Check.BOUNDARY, tries=(1, 2), commits=2, is_boundary_first=False).explore()
