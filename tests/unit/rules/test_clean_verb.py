"""`kafkalog clean` has the same exit status and words for a directory and for a store."""

from __future__ import annotations

import pytest

from kafkalog.storage_engine.fs import clock
from tests.unit.cli.conftest import Command, kafkalog
from tests.unit.rules.places import Place

__all__ = ["kafkalog"]

SKIPPED = "t-0 was skipped: it is uncleanable; a cleaner will try again later, and --force now"


@pytest.mark.parametrize(
    ("is_marked", "arguments", "status", "told"),
    [
        (True, [], 1, SKIPPED),
        (True, ["t"], 1, SKIPPED),
        (True, ["t", "--force"], 0, ""),
        (True, ["u"], 0, "nothing to clean"),
        (False, [], 0, "nothing to clean"),
    ],
)
def test_a_skipped_partition_is_reported_with_exit_status_1(
    place: Place,
    is_marked: bool,
    arguments: list[str],
    status: int,
    told: str,
    kafkalog: Command,
) -> None:
    for topic in ("t", "u"):
        place.topic(topic).append(("a", "1"), ("a", "2"))
    if is_marked:
        place.mark("a bad batch", now_ms=clock.now_ms())
    result = kafkalog("clean", place.where, *arguments)
    assert (result.status, told in result.err) == (status, True)
