"""What markers said is kept within bounds, and given to one reader at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.segments import SegmentFiles
from kafkalog.storage_engine.transactions import transaction_markers
from kafkalog.storage_engine.transactions.transaction_markers import (
    LogIdentity,
    MarkerCache,
    Markers,
    log_identity,
)


def segment(base_offset: int, size: int = 1000) -> SegmentFiles:
    return SegmentFiles(Path("x"), base_offset, size)


def moment(
    place: str = "p",
    *,
    epoch: int = 0,
    high_watermark: int = 10**6,
    segments: Iterable[SegmentFiles] = (),
) -> LogIdentity:
    return LogIdentity(Path(place), (place,), epoch, high_watermark, list(segments))


def markers(begin: int, end: int, *, producers: int = 1, step: int = 1) -> Markers:
    result = Markers(begin)
    offsets = range(begin, end, step)
    result.note(((o % producers, o, o % 3 == 0) for o in offsets), end)
    return result


def test_a_batch_ends_with_the_next_marker_of_its_producer() -> None:
    known = Markers(0)
    known.note([(7, 5, True), (8, 6, False), (7, 9, False)], 10)
    ends, is_aborted = known.outcomes(7, np.array([0, 4, 6, 8, 11]))
    assert ends.tolist() == [5, 5, 9, 9, -1]
    assert is_aborted.tolist() == [True, True, False, False, False]
    assert known.outcomes(9, np.array([1]))[0].tolist() == [-1]
    assert known.tells(7, 8) and not known.tells(7, 9) and not known.tells(9, 0)


def test_forgetting_moves_the_begin_and_leaves_what_comes() -> None:
    known = markers(0, 100, producers=10)
    known.forget_below(55)
    assert (known.begin, known.frontier, len(known)) == (55, 100, 45)
    known.note([(3, 120, True)], 121)
    ends, _ = known.outcomes(3, np.array([60, 94]))
    assert ends.tolist() == [63, 120]


def test_passed_markers_are_searched_for_only_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction_markers, "_SLACK", 1000)
    known = markers(0, 10)
    known._size_max = 1000
    known.pass_by(9)
    assert len(known) == 10
    known.note(((1, offset, False) for offset in range(10, 500)), 500)
    known.pass_by(490)
    assert len(known) == 10


def test_what_was_taken_is_the_takers_alone() -> None:
    cache = MarkerCache()
    given = markers(10, 20)
    cache.give(moment(), given, 10)
    assert cache.take(moment("q"), 10) is None
    assert cache.take(moment(), 9) is None
    assert cache.take(moment(), 21) is None
    assert cache.take(moment(), 20) is given
    assert cache.take(moment(), 20) is None


def test_the_markers_that_reach_furthest_are_taken_first() -> None:
    cache = MarkerCache()
    far, near = markers(0, 100), markers(0, 50)
    cache.give(moment(), far, 0)
    cache.give(moment(), near, 0)
    assert cache.take(moment(), 20) is far
    assert cache.take(moment(), 20) is near


@pytest.mark.parametrize("other", [moment(high_watermark=19), moment(epoch=1)])
def test_what_another_log_said_is_forgotten_wherever_one_reads(other: LogIdentity) -> None:
    cache = MarkerCache()
    cache.give(moment(), markers(10, 20), 10)
    assert cache.take(other, 0) is None
    assert len(cache) == 0


def test_segments_count_from_where_a_read_begins_and_up_to_the_active_one() -> None:
    closed = [segment(0), segment(10), segment(20)]

    def found(offset: int, segments: list[SegmentFiles]) -> bool:
        cache = MarkerCache()
        cache.give(moment(segments=closed), markers(0, 35), 0)
        return cache.take(moment(segments=segments), offset) is not None

    assert found(0, closed)
    assert found(0, [*closed, segment(30, 5)])  # was active then
    assert found(10, [segment(10), segment(20)])  # the first one was deleted
    assert found(12, [segment(0, 3), segment(10), segment(20)])
    assert not found(9, [segment(0, 3), segment(10), segment(20)])
    assert not found(12, [segment(0), segment(10), segment(20, 3)])
    assert not found(12, [segment(0, 900)])  # merged
    assert not found(12, [])


def test_only_so_many_logs_and_bytes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MarkerCache(entries_max=3, size_max=1 << 20)
    for place in "abcd":
        cache.give(moment(place), markers(0, 10), 0)
    assert len(cache) == 3
    assert cache.take(moment("a"), 0) is None
    known = cache.take(moment("b"), 0)
    assert known is not None
    cache.give(moment("b"), known, 0)  # the one used last
    cache.give(moment("e"), markers(0, 10), 0)
    assert cache.take(moment("c"), 0) is None
    assert cache.take(moment("b"), 0) is known
    cache.give(moment("f"), markers(0, 100_000), 99_990)  # of so many what is passed goes
    known = cache.take(moment("f"), 99_990)
    assert known is not None and len(known) == 10
    cache.give(moment("g"), markers(0, 200_000), 10)
    assert cache.take(moment("g"), 10) is None


def test_a_log_that_cannot_be_told_from_another_is_not_known(tmp_path: Path) -> None:
    state = PartitionState(50, active_base=20)
    segments = [segment(0), segment(10), segment(20)]
    found = log_identity(tmp_path, state, segments)
    assert found is not None and list(found.segments) == segments[:2]
    (tmp_path / "partition.metadata").write_text("version: 0\ntopic_id: ?")
    assert log_identity(tmp_path, state, segments) is None
    assert log_identity(tmp_path / "gone", state, segments) is None
