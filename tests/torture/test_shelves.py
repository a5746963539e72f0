"""A difference between a directory and a store is found, unless docs/limits.md explains it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.cleaner.state.notes import StoredNotes
from kafkalog.storage_engine.object_store import object_retention
from tests import ROOT
from tests.torture import shelves
from tests.torture.shelf_views import SENTENCES


def test_what_differs_by_nature_is_in_the_limits() -> None:
    limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    assert [sentence for sentence in SENTENCES if sentence not in limits] == []


def test_drawn_jobs_have_the_same_answers(tmp_path: Path) -> None:
    found = shelves.judged((1,), 1, str(tmp_path))
    assert (found.count, found.faults) == (1, [])


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (object_retention, "count_oldest", lambda *_, **__: 0),
        (ObjectMoment, "notes", lambda moment, *_: StoredNotes(moment.root)),
    ],
    ids=["a store that retains all", "a store that forgets its cleanings"],
)
def test_a_planted_difference_is_found(
    place: object, name: str, wrong: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong)
    assert any(shelves.judged((case,), 1, str(tmp_path)).faults for case in range(9))
