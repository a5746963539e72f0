"""Every old bug that is brought back is caught, and one that is not would be told."""

from __future__ import annotations

import pytest

from tests.torture.old_bug import OldBug
from tests.torture.old_bugs import BUGS, PROOFS, bring_back

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wrong(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What is wrong with the bugs of all tests that are run: one process is enough for them."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    found = [call.params["bug"].name for call in calls if call and "bug" in call.params]
    return bring_back(found)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_an_old_bug_is_caught(bug: OldBug, wrong: dict[str, list[str]]) -> None:
    assert wrong[bug.name] == []


def test_a_bug_that_is_not_caught_or_by_chance_is_told() -> None:
    found = bring_back([proof.name for proof in PROOFS])
    for proof, expected in zip(PROOFS, ("passed", "another reason", "no such test"), strict=True):
        assert expected in found[proof.name][0]


def test_no_bug_is_there_twice_or_has_a_sign_that_fits_all() -> None:
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names)
    assert not [bug.name for bug in BUGS if bug.is_sign("")]
