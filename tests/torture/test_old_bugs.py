"""Each old bug is noticed by its tests, and a test that does not notice a bug is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.old_bugs import HARMLESS, OLD_BUGS, OldBug, old_bug, unnoticed

pytestmark = pytest.mark.slow
LATEST = old_bug("latest-record")
ANOTHER = (
    "unit/rules/test_regressions.py::test_a_control_batch_without_a_record_is_accepted[objects]"
)


@pytest.mark.parametrize("bug", OLD_BUGS, ids=lambda bug: bug.name)
def test_the_tests_of_an_old_bug_fail_with_it(bug: OldBug) -> None:
    assert unnoticed(bug) == []


def test_a_test_that_passes_or_fails_for_another_reason_notices_no_bug() -> None:
    bug = replace(LATEST, tests=(ANOTHER, *LATEST.tests), sign="what no failure says")
    passed, *others = unnoticed(bug)
    assert passed == "test_a_control_batch_without_a_record_is_accepted[objects]: passed"
    assert len(others) == 4 and all(": failed for another reason: " in other for other in others)


def test_a_replacement_without_effect_is_not_noticed() -> None:
    assert unnoticed(HARMLESS) == ["test_the_name_of_an_emptied_segment_is_synced: passed"]


def test_an_unknown_bug_is_refused_with_those_there_are() -> None:
    with pytest.raises(RuntimeError, match=r"no old bug has this name .*found 'none'"):
        unnoticed(replace(LATEST, name="none"))


def test_a_test_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the tests did not run"):
        unnoticed(replace(LATEST, tests=("unit/cleaner/test_regressions.py::test_none",)))


@pytest.mark.parametrize(("before", "count"), [("no such text", "0"), ("import", "[0-9]{2}")])
def test_a_text_that_the_module_does_not_have_once_is_an_error(before: str, count: str) -> None:
    with pytest.raises(ValueError, match=f"expected 1, found {count} of '{before}'"):
        replace(LATEST, before=before).source()


def test_ten_old_bugs_have_ten_names_and_no_sign_fits_every_failure() -> None:
    assert len({bug.name for bug in OLD_BUGS}) == 10
    assert not [bug.name for bug in OLD_BUGS if re.search(bug.sign, "")]
