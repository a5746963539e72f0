"""What `explain` claims of drawn states is true, by the bytes of the log and by what happens next.

The claims are checked against the headers of the batches, and against the cleaner: who cleans,
when, what an append does to the active segment, and what a remedy changes.
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kafkalog.cleaner import PartitionStatus, abort_and_pause
from kafkalog.cleaner.dedup.presence import announced
from kafkalog.cli import run
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.directory.pins import Action
from kafkalog.storage_engine.format.batch import BatchHeader
from tests.builders.batch_builder import COMMIT, at_times, marker
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.acts import utc
from tests.unit.rules.places import HOUR_MS as HOUR
from tests.unit.rules.places import Place

SEEDS = [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 90))]
HAS_HORIZON = 1 << 6


@dataclass(frozen=True)
class Batch:
    """What a batch's header says."""

    first: int
    last: int
    size: int
    largest: int
    horizon: int | None

    @classmethod
    def of(cls, header: BatchHeader) -> Batch:
        has_horizon = bool(header.attributes & HAS_HORIZON)
        return cls(
            header.base_offset,
            header.last_offset,
            header.size,
            header.max_timestamp,
            header.base_timestamp if has_horizon else None,
        )


@dataclass
class State:
    """A drawn log, what is held open of it, and the time."""

    place: Place
    now_ms: int
    held: contextlib.ExitStack

    def segments(self) -> dict[int, list[Batch]]:
        """The batches of each segment, by its base offset, ascending."""
        bases = self.place.bases()
        found: dict[int, list[Batch]] = {base: [] for base in bases}
        with self.place.engine.snapshot("t", 0, whole=True) as snapshot:
            start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
            for segment in snapshot.open_segments(start, end):
                for _, header in segment.batches_from(segment.base_offset):
                    if start <= header.last_offset and header.base_offset < end:
                        base = bases[bisect_right(bases, header.base_offset) - 1]
                        found[base].append(Batch.of(header))
        return found

    def told(self, now_ms: int | None = None) -> Any:
        now_ms = self.now_ms if now_ms is None else now_ms
        (found,) = self.place.log.explain("t", now_ms=now_ms)
        return found

    def status(self, now_ms: int | None = None) -> PartitionStatus:
        return self.place.status(self.now_ms if now_ms is None else now_ms)


def drawn(place: Place, rng: random.Random, held: contextlib.ExitStack) -> State:
    place.topic(
        segment_bytes=rng.choice([100, 400, 400, 100_000]),
        segment_ms=rng.choice([HOUR, 7 * 24 * HOUR]),
        min_compaction_lag_ms=rng.choice([0, 0, HOUR]),
        max_compaction_lag_ms=rng.choice([2**63 - 1, 3 * HOUR]),
        min_cleanable_dirty_ratio=rng.choice([0, 0.5, 0.9, 1]),
        delete_retention_ms=rng.choice([0, 1000, HOUR]),
    )
    state = State(place, NOW_MS, held)
    for _ in range(rng.randrange(1, 7)):
        rng.choice([append, append, append, cleaned, altered, later, opened])(state, rng)
    rng.choice([nothing, nothing, pause, pin, damage])(state, rng)
    if rng.random() < 0.5 and place.knows_its_cleaners:
        held.enter_context(announced(place.log.root))
    return state


def append(state: State, rng: random.Random) -> None:
    keys = rng.sample("abcdef", rng.randrange(1, 4))
    for _ in range(rng.randrange(1, 5)):
        rows = [(key, rng.choice(["value", None])) for key in keys]
        timestamp_ms = state.now_ms - rng.choice([0, 0, HOUR, 5 * HOUR])
        state.place.append(*rows, timestamp_ms=timestamp_ms, now_ms=state.now_ms)


def cleaned(state: State, rng: random.Random) -> None:
    state.place.log.clean(force=rng.random() < 0.5, now_ms=state.now_ms)


def altered(state: State, rng: random.Random) -> None:
    change = rng.choice(
        [
            {"delete.retention.ms": "2000"},
            {"min.compaction.lag.ms": str(rng.choice([0, 2 * HOUR]))},
            {"segment.bytes": str(rng.choice([60, 1000]))},
            {"min.cleanable.dirty.ratio": str(rng.choice([0, 1]))},
            {"cleanup.policy": rng.choice(["compact", "compact,delete", "delete"])},
        ]
    )
    state.place.log.alter_topic("t", change)


def later(state: State, rng: random.Random) -> None:
    state.now_ms += rng.choice([1, 1500, HOUR, 4 * HOUR])


def opened(state: State, rng: random.Random) -> None:
    """Begin a transaction, and now and then end it."""
    end = state.place.state().high_watermark
    parts = [at_times(end, (state.now_ms,), 7, transactional=True)]
    if rng.random() < 0.5:
        parts.append(marker(end + 1, COMMIT, 7))
    for part in parts:
        state.place.append_raw(part, now_ms=state.now_ms)


def nothing(state: State, rng: random.Random) -> None:
    pass


def pause(state: State, rng: random.Random) -> None:
    if state.place.can_be_paused:
        state.held.enter_context(abort_and_pause(state.place.log, "t", 0))


def pin(state: State, rng: random.Random) -> None:
    if state.place.has_pins:
        engine = state.place.engine
        pins.pin(engine.root, Action("app", "1"), engine.state, state.now_ms)
    append(state, rng)


def damage(state: State, rng: random.Random) -> None:
    """Spoil a closed segment, and let a cleaning find it."""
    closed = [number for number, found in enumerate(state.segments().values()) if found]
    for number in closed[:-1][:1]:
        repair = state.place.spoil(number, 65)
        found = state.place.log.clean(force=True, now_ms=state.now_ms)
        if not any(stats.error for stats in found):  # nobody has read it, so nobody can know
            repair()
    state.now_ms += rng.choice([1, 59_999, 60_000, HOUR])


# --- the claims ----------------------------------------------------------------------------------


def check_active_segment(state: State, found: Any) -> None:
    shown = state.status()
    segments = state.segments()
    base = max(segments)
    assert f"from offset {max(base, shown.first_dirty_offset)} on" in found.sentence
    dirty = [one for b in segments if b != base for one in segments[b]]
    is_all = not any(one.last >= shown.first_dirty_offset for one in dirty)
    assert found.sentence.startswith("Everything dirty is" if is_all else "The rest is")


def check_roll(state: State, found: Any) -> None:
    """The next append begins a segment exactly when the sentence says so."""
    active = state.segments()[base := max(state.segments())]
    config = state.place.log.describe("t").config
    limit, age = int(config["segment.bytes"]), int(config.get("segment.ms", 7 * 24 * HOUR))
    age = min(age, int(config.get("max.compaction.lag.ms", 2**63 - 1)))
    size = sum(one.size for one in active)
    state.place.append(("z", "1"), now_ms=state.now_ms)
    added = [one for found in state.segments().values() for one in found][-1]
    is_new = max(state.segments()) > base
    assert is_new == (size + added.size > limit or state.now_ms - max(active[0].largest, 0) > age)
    if "so the next append begins" in found.sentence:
        assert is_new


def check_lag(state: State, found: Any) -> None:
    shown = state.status()
    lag = int(state.place.log.describe("t").config["min.compaction.lag.ms"])
    segments = state.segments()
    for base in segments:
        if segments[base] and segments[base][-1].last >= shown.first_dirty_offset:
            largest = max(one.largest for one in segments[base])
            if largest > state.now_ms - lag:
                assert f"keeps offset {max(base, shown.first_dirty_offset)} " in found.sentence
                assert found.until_ms == largest + lag
                assert utc(largest + lag) in found.sentence
                return
    raise AssertionError(f"nothing lags: {found.sentence}")


def check_ratio(state: State, found: Any) -> None:
    shown = state.status()
    segments = state.segments()
    clean_bytes = sum(
        one.size
        for base, batches in segments.items()
        for one in batches
        if base < min(shown.first_dirty_offset, max(segments))
    )
    assert shown.clean_bytes == clean_bytes
    wanted = float(state.place.log.describe("t").config["min.cleanable.dirty.ratio"])
    assert shown.dirty_bytes <= wanted * (shown.dirty_bytes + clean_bytes)
    assert f"{shown.dirty_ratio:.2f}" in found.sentence


def check_tombstones(state: State, found: Any) -> None:
    horizons = [
        one.horizon
        for batches in state.segments().values()
        for one in batches
        if one.horizon is not None
    ]
    assert found.until_ms == min(horizons) > state.now_ms
    assert "delete.retention.ms (" not in found.sentence  # it may have been altered since


def check_uncleanable(state: State, found: Any) -> None:
    if "until" in found.sentence and found.until_ms is not None:
        assert found.until_ms > state.now_ms
        assert state.place.one_round(found.until_ms - 1) is None
        if state.place.one_round(found.until_ms) is None:
            shown = state.status(found.until_ms)
            assert not state.told(found.until_ms).is_due, shown
    assert not any("clean" in command.split() for command in found.commands)


CHECKS: dict[str, Callable[[State, Any], None]] = {
    "active segment": check_active_segment,
    "lag": check_lag,
    "ratio": check_ratio,
    "tombstones": check_tombstones,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_each_claim_about_a_drawn_state_is_true(place: Place, seed: int) -> None:
    with contextlib.ExitStack() as held:
        state = drawn(place, random.Random(seed), held)
        told = state.told()
        found = {one.code: one for one in told.findings}
        for code, check in CHECKS.items():
            if code in found:
                check(state, found[code])
        is_paused, is_damaged = "paused" in found, "uncleanable" in found
        if is_paused or is_damaged:
            commands = [command for one in told.findings for command in one.commands]
            assert not any("clean" in command.split() for command in commands)
        if told.is_due:
            assert {"due", "uncleanable"} & {*found}
        if told.answer == "will be cleaned":
            assert "cleaner" in found
        stats = state.place.one_round(state.now_ms)
        assert (stats is not None) == told.is_due


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_of_the_next_append_and_the_next_try_happens(place: Place, seed: int) -> None:
    with contextlib.ExitStack() as held:
        state = drawn(place, random.Random(seed), held)
        for one in state.told().findings:
            if one.code == "active segment":
                check_roll(state, one)
            elif one.code == "uncleanable":
                check_uncleanable(state, one)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_remedy_of_a_drawn_state_helps(
    place: Place, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    with contextlib.ExitStack() as held:
        state = drawn(place, rng, held)
        remedies = [
            (one, command)
            for one in state.told().findings
            for command in one.commands
            if command.split()[1] in {"clean", "topics", "verify"}
        ]
        if not remedies:
            return
        found, command = rng.choice(remedies)
        before = place.state().active_base
        if command.startswith("kafkalog clean"):
            is_forced = "--force" in command
            for stats in place.log.clean("t", force=is_forced, now_ms=state.now_ms):
                assert stats.error is None
            if found.code == "active segment":
                assert place.state().active_base > before
        else:
            assert run(command.split()[1:]) == int("verify" in command)
        if found.code in {"ratio", "lag", "policy", "due"}:
            assert found.sentence not in [one.sentence for one in state.told().findings]
