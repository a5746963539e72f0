"""`kafkalog clean` has the same exit status and words for a directory and for a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import Cleaned
from tests.unit.cli.conftest import Command
from tests.unit.storage_engine.store_log import memory_address

SKIPPED = "t-0 was skipped: it is uncleanable; a cleaner will try again later, and --force now"


def mark(log: KafkaLog, directory: Path) -> None:
    """Let `t-0` be marked, as a cleaning that failed does."""
    known, engine = log.describe("t"), log._engine
    place = directory / "marked" if isinstance(engine, ObjectLog) else log.root / "t-0"
    place.mkdir(exist_ok=True)
    mark_uncleanable(
        DirectoryNotes(place), "a bad batch", dict(known.config), now_ms=clock.now_ms()
    )
    if isinstance(engine, ObjectLog):
        notes = {layout.UNCLEANABLE: (place / layout.UNCLEANABLE).read_text()}
        left = Cleaned(0, clock.now_ms(), notes)
        engine.change(
            lambda draft: draft.set_cleaned(known.topic_id, 0, left), now_ms=clock.now_ms()
        )


@pytest.mark.parametrize("kind", ["directory", "store"])
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
def test_a_partition_that_was_skipped_is_told_and_gives_status_1(
    kind: str,
    is_marked: bool,
    arguments: list[str],
    status: int,
    told: str,
    tmp_path: Path,
    kafkalog: Command,
) -> None:
    place = str(memory_address()) if kind == "store" else str(tmp_path / "log")
    with KafkaLog(place) as log:
        for topic in ("t", "u"):
            log.create_topic(topic)
            log.append(topic, [("a", "1"), ("a", "2")])
        if is_marked:
            mark(log, tmp_path)
        result = kafkalog("clean", place, *arguments)
    assert (result.status, told in result.err) == (status, True)
