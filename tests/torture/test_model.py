"""The model test on a few examples, the same ones each time; and that it finds what is planted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase

from kafkalog.storage_engine.directory import commit
from kafkalog.storage_engine.directory.appender import Appender
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.kept_appenders import Key
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot
from tests.builders.batch_builder import ABORT, BatchBuilder, marker
from tests.torture import model_hands
from tests.torture.model import examples
from tests.torture.model_copies import copied_log
from tests.torture.model_log import Part, Row, Topic
from tests.torture.model_machine import LogMachine

pytestmark = pytest.mark.slow
GENERATE = (Phase.generate,)


@pytest.fixture(scope="module", autouse=True)
def other_process() -> Iterator[None]:
    """One process serves all examples, and does not outlive them."""
    yield
    LogMachine.end()


def test_any_steps_in_any_order_leave_what_the_model_says() -> None:
    examples(1, 16)


def test_the_model_finds_a_batch_that_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "is_new", lambda *_, **__: True)
    with pytest.raises(AssertionError, match="skipped"):
        examples(1, 100, phases=GENERATE)


def test_the_model_finds_a_commit_of_which_a_death_leaves_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def publish_each(
        self: Transaction, keys: Sequence[Key], now_ms: int
    ) -> Iterator[dict[Key, Appender]]:
        """Commit one partition after the other, as somebody who has no journal would."""
        for key in keys:
            if self._appenders.known():
                self.publish(now_ms)
            yield {key: self.appender(*key, now_ms)}

    monkeypatch.setattr(Transaction, "appenders", publish_each)
    with pytest.raises(AssertionError, match=r"\[.*\], \[.*\]: \["):
        examples(1, 200, phases=GENERATE)


def test_the_model_finds_what_has_expired_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hands, "retain", lambda *_, **__: [])
    with pytest.raises(AssertionError, match="expired, and still there"):
        for seed in range(1, 9):  # what a seed draws changes with the constants in the sources
            examples(seed, 50, phases=GENERATE)


@pytest.mark.parametrize("is_planted", [False, True])
def test_the_model_finds_a_task_that_takes_an_unknown_marker_for_none(
    tmp_path: Path, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part()
    with DirectoryLog(tmp_path) as log:
        log.create_topic("t", 1, {"segment.bytes": "14"}, now_ms=5)
        for offset in range(3):
            builder = BatchBuilder(
                base_offset=offset, transactional=True, producer=(7, 0, offset), leader_epoch=0
            )
            built = builder.add(b"k%d" % offset, b"v", timestamp=5).build()
            log.append_raw("t", 0, built.data, now_ms=5)
            part.append([Row(offset, 5, b"k%d" % offset, b"v")], 7)
        log.append_raw("t", 0, marker(3, ABORT, 7, timestamp=5).data, now_ms=5)
        part.mark(7, commits=False)
        topics = {"t": Topic({}, [part])}
        told: AbstractContextManager[Any] = nullcontext()
        if is_planted:
            monkeypatch.setattr(ObjectSnapshot, "_chunks_ahead", lambda *_: iter(()))
            told = pytest.raises(AssertionError, match="expected")
        with told, copied_log(log, 1, 0, 5) as store:
            store.check(topics, 0, 4, 1 << 20)


ROWS = [Row(0, 5, b"a", b"1"), Row(1, 5, b"b", b"1"), Row(2, 5, b"a", None), Row(3, 5, b"c", b"1")]


@pytest.mark.parametrize(
    ("left", "clean_to", "told"),
    [
        ([1, 2, 3], 3, None),
        ([0, 1, 2, 3], 0, None),
        ([2, 3], 3, "the latest of its key"),
        ([0, 1, 2, 3], 3, "is not the latest of its key"),
        ([1, 2], 3, "is gone, and nothing is cleaned there"),
        ([1, 3], 3, "may go from 110 on"),
        ([2, 1, 3], 3, "do not rise"),
    ],
)
def test_the_model_refuses_a_log_that_differs_from_it(
    left: list[int], clean_to: int, told: str | None
) -> None:
    part = Part()
    part.append(ROWS)
    part.clean(100, 10)
    found = [ROWS[offset] for offset in left]
    if told is None:
        part.check_rows(found, clean_to, clean_to)
        return
    with pytest.raises(AssertionError, match=told):
        part.check_rows(found, clean_to, clean_to)
