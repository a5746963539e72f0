"""The limit of reads at once: halved by a 503, raised by success, and gone in the end."""

from __future__ import annotations

from contextlib import ExitStack

from kafkalog.storage_engine.object_store.read_throttle import UNLIMITED, ReadThrottle


def test_a_503_halves_what_is_under_way_once_for_all_that_began_before_it() -> None:
    throttle = ReadThrottle()
    assert throttle.limit is None
    with ExitStack() as begun:
        turns = [begun.enter_context(throttle.turn()) for _ in range(8)]
        for turn in turns:
            throttle.halve(turn)
        assert throttle.limit == 4
    with throttle.turn() as turn, throttle.turn():
        throttle.halve(turn)
    assert throttle.limit == 1
    with throttle.turn() as turn:
        throttle.halve(turn)
    assert throttle.limit == 1


def test_a_read_waits_while_the_limit_is_reached() -> None:
    throttle = ReadThrottle()
    with throttle.turn() as turn:
        throttle.halve(turn)
    assert throttle._has_room()
    with throttle.turn():
        assert not throttle._has_room()
    assert throttle._has_room()


def test_as_many_successes_as_the_limit_allow_one_read_more_until_the_limit_is_gone() -> None:
    throttle = ReadThrottle()
    with throttle.turn() as turn:
        throttle.halve(turn)
    limits = []
    while throttle.limit is not None:
        limits.append(throttle.limit)
        throttle.raise_a_little()
    assert sorted(set(limits)) == list(range(1, UNLIMITED))
    assert limits == sorted(limits)
    assert limits.count(10) in {9, 10, 11}
