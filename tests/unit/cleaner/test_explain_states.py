"""What `explain` claims of drawn states is true, by the bytes of the log and by what happens next.

The claims are checked against the headers in the `.log` files, and against the cleaner: who cleans,
when, what an append does to the active segment, and what a remedy changes.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kafkalog.cleaner.dedup.presence import announced
from kafkalog.cleaner.directory.pause import abort_and_pause
from kafkalog.cleaner.report.explain import Explanation, Reason, explain, utc_time
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest
from kafkalog.cli import run
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.pins import Action
from tests.builders.batch_builder import COMMIT, at_times, joined, marker
from tests.builders.log_builder import NOW_MS, LogBuilder

HOUR = 3_600_000
HEADER = struct.Struct(">qiiBIhiqqqhii")
"""Base offset, length, epoch, magic, CRC, attributes, last delta, base and largest time, producer,
its epoch, sequence, count."""
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


@dataclass
class State:
    """A drawn log, what is held open of it, and the time."""

    engine: DirectoryLog
    now_ms: int
    held: contextlib.ExitStack

    @property
    def directory(self) -> Path:
        return Path(self.engine.root) / "t-0"

    def segments(self) -> dict[int, list[Batch]]:
        """The batches of each segment, by its base offset, ascending."""
        return {
            int(path.stem): batches(path.read_bytes())
            for path in sorted(self.directory.glob("*.log"))
        }

    def told(self, now_ms: int | None = None) -> Explanation:
        (found,) = explain(self.engine, "t", self.now_ms if now_ms is None else now_ms)
        return found


def batches(data: bytes) -> list[Batch]:
    found, position = [], 0
    while position < len(data):
        first, length, _, _, _, attributes, delta, start, largest, *_ = HEADER.unpack_from(
            data, position
        )
        horizon = start if attributes & HAS_HORIZON else None
        found.append(Batch(first, first + delta, length + 12, largest, horizon))
        position += length + 12
    return found


def drawn(root: Path, rng: random.Random, held: contextlib.ExitStack) -> State:
    log = LogBuilder(root).topic(
        segment_bytes=rng.choice([100, 400, 400, 100_000]),
        segment_ms=rng.choice([HOUR, 7 * 24 * HOUR]),
        min_compaction_lag_ms=rng.choice([0, 0, HOUR]),
        max_compaction_lag_ms=rng.choice([2**63 - 1, 3 * HOUR]),
        min_cleanable_dirty_ratio=rng.choice([0, 0.5, 0.9, 1]),
        delete_retention_ms=rng.choice([0, 1000, HOUR]),
    )
    state = State(log.engine, NOW_MS, held)
    for _ in range(rng.randrange(1, 7)):
        rng.choice([append, append, append, cleaned, altered, later, opened])(state, rng)
    rng.choice([nothing, nothing, pause, pin, damage])(state, rng)
    if rng.random() < 0.5:
        held.enter_context(announced(root))
    return state


def append(state: State, rng: random.Random) -> None:
    keys = rng.sample("abcdef", rng.randrange(1, 4))
    for _ in range(rng.randrange(1, 5)):
        rows = [(key, rng.choice(["value", None])) for key in keys]
        LogBuilder(state.engine, now_ms=state.now_ms).append(
            *rows, timestamp_ms=state.now_ms - rng.choice([0, 0, HOUR, 5 * HOUR])
        )


def cleaned(state: State, rng: random.Random) -> None:
    clean(state.engine, force=rng.random() < 0.5, now_ms=state.now_ms)


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
    state.engine.alter_topic("t", change)


def later(state: State, rng: random.Random) -> None:
    state.now_ms += rng.choice([1, 1500, HOUR, 4 * HOUR])


def opened(state: State, rng: random.Random) -> None:
    """Begin a transaction, and now and then end it."""
    end = state.engine.describe("t").partitions[0].high_watermark
    parts = [at_times(end, (state.now_ms,), 7, transactional=True)]
    if rng.random() < 0.5:
        parts.append(marker(end + 1, COMMIT, 7))
    for part in parts:
        state.engine.append_raw("t", 0, joined([part]), now_ms=state.now_ms)


def nothing(state: State, rng: random.Random) -> None:
    pass


def pause(state: State, rng: random.Random) -> None:
    state.held.enter_context(abort_and_pause(state.engine, "t", 0))


def pin(state: State, rng: random.Random) -> None:
    pins.pin(state.engine.root, Action("app", "1"), state.engine.state, state.now_ms)
    append(state, rng)


def damage(state: State, rng: random.Random) -> None:
    """Spoil a closed segment, and let a cleaning find it."""
    closed = [base for base, found in state.segments().items() if found][:-1]
    for base in closed[:1]:
        path = state.directory / f"{base:020}.log"
        data = bytearray(path.read_bytes())
        data[65] ^= 1
        path.write_bytes(data)
        found = clean(state.engine, force=True, now_ms=state.now_ms)
        if not any(stats.error for stats in found):  # nobody has read it, so nobody can know
            data[65] ^= 1
            path.write_bytes(data)
    state.now_ms += rng.choice([1, 59_999, 60_000, HOUR])


# --- the claims ----------------------------------------------------------------------------------


def check_active_segment(state: State, found: Reason) -> None:
    shown, *_ = status(state.engine, state.now_ms)
    segments = state.segments()
    base = max(segments)
    assert f"from offset {max(base, shown.first_dirty_offset)} on" in found.sentence
    dirty = [one for b in segments if b != base for one in segments[b]]
    is_all = not any(one.last >= shown.first_dirty_offset for one in dirty)
    assert found.sentence.startswith("Everything dirty is" if is_all else "The rest is")


def check_roll(state: State, found: Reason) -> None:
    """The next append begins a segment exactly when the sentence says so."""
    active = state.segments()[base := max(state.segments())]
    config = state.engine.describe("t").config
    limit, age = int(config["segment.bytes"]), int(config.get("segment.ms", 7 * 24 * HOUR))
    age = min(age, int(config.get("max.compaction.lag.ms", 2**63 - 1)))
    size = sum(one.size for one in active)
    LogBuilder(state.engine, now_ms=state.now_ms).append(("z", "1"))
    added = [one for found in state.segments().values() for one in found][-1]
    is_new = max(state.segments()) > base
    assert is_new == (size + added.size > limit or state.now_ms - max(active[0].largest, 0) > age)
    if "so the next append begins" in found.sentence:
        assert is_new


def check_lag(state: State, found: Reason) -> None:
    shown, *_ = status(state.engine, state.now_ms)
    lag = int(state.engine.describe("t").config["min.compaction.lag.ms"])
    segments = state.segments()
    for base in [*segments][:-1]:
        if segments[base] and segments[base][-1].last >= shown.first_dirty_offset:
            largest = max(one.largest for one in segments[base])
            if largest > state.now_ms - lag:
                assert f"keeps offset {max(base, shown.first_dirty_offset)} " in found.sentence
                assert found.until_ms == largest + lag
                assert utc_time(largest + lag) in found.sentence
                return
    raise AssertionError(f"nothing lags: {found.sentence}")


def check_ratio(state: State, found: Reason) -> None:
    shown, *_ = status(state.engine, state.now_ms)
    segments = state.segments()
    clean_bytes = sum(
        one.size
        for base, batches in segments.items()
        for one in batches
        if base < min(shown.first_dirty_offset, max(segments))
    )
    assert shown.clean_bytes == clean_bytes
    wanted = float(state.engine.describe("t").config["min.cleanable.dirty.ratio"])
    assert shown.dirty_bytes <= wanted * (shown.dirty_bytes + clean_bytes)
    assert f"{shown.dirty_ratio:.2f}" in found.sentence


def check_tombstones(state: State, found: Reason) -> None:
    horizons = [
        one.horizon
        for batches in state.segments().values()
        for one in batches
        if one.horizon is not None
    ]
    assert found.until_ms == min(horizons) > state.now_ms
    assert "delete.retention.ms (" not in found.sentence  # it may have been altered since


def check_uncleanable(state: State, found: Reason) -> None:
    if "until" in found.sentence and found.until_ms is not None:
        assert found.until_ms > state.now_ms
        assert clean_filthiest(state.engine, now_ms=found.until_ms - 1) is None
        if clean_filthiest(state.engine, now_ms=found.until_ms) is None:
            shown, *_ = status(state.engine, found.until_ms)
            assert not state.told(found.until_ms).is_due, shown
    assert not any("clean" in command.split() for command in found.commands)


CHECKS: dict[str, Callable[[State, Reason], None]] = {
    "active segment": check_active_segment,
    "lag": check_lag,
    "ratio": check_ratio,
    "tombstones": check_tombstones,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_each_claim_about_a_drawn_state_is_true(tmp_path: Path, seed: int) -> None:
    with contextlib.ExitStack() as held:
        state = drawn(tmp_path, random.Random(seed), held)
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
        stats = clean_filthiest(state.engine, now_ms=state.now_ms)
        assert (stats is not None) == told.is_due


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_said_of_the_next_append_and_the_next_try_happens(
    tmp_path: Path, seed: int
) -> None:
    with contextlib.ExitStack() as held:
        state = drawn(tmp_path, random.Random(seed), held)
        for one in state.told().findings:
            if one.code == "active segment":
                check_roll(state, one)
            elif one.code == "uncleanable":
                check_uncleanable(state, one)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_remedy_of_a_drawn_state_helps(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    with contextlib.ExitStack() as held:
        state = drawn(tmp_path, rng, held)
        remedies = [
            (one, command)
            for one in state.told().findings
            for command in one.commands
            if command.split()[1] in {"clean", "topics", "verify"}
        ]
        if not remedies:
            return
        found, command = rng.choice(remedies)
        before = state.engine.describe("t").partitions[0].active_base
        if command.startswith("kafkalog clean"):
            is_forced = "--force" in command
            for stats in clean(state.engine, "t", force=is_forced, now_ms=state.now_ms):
                assert stats.error is None
            if found.code == "active segment":
                assert state.engine.describe("t").partitions[0].active_base > before
        else:
            assert run(command.split()[1:]) == (1 if "verify" in command else 0)
        if found.code in {"ratio", "lag", "policy", "due"}:
            assert found.sentence not in [one.sentence for one in state.told().findings]


def test_dirt_that_a_lag_keeps_in_closed_segments_is_not_said_to_be_in_the_active_one(
    tmp_path: Path,
) -> None:
    log = LogBuilder(tmp_path).topic(segment_bytes=1024, min_compaction_lag_ms=HOUR)
    log.commits([[(f"k{n}", "x" * 20) for n in range(10)]] * 4)
    with contextlib.ExitStack() as held:
        (active,) = (
            one
            for one in State(log.engine, NOW_MS, held).told().findings
            if one.code == "active segment"
        )
        assert active.sentence.startswith("The rest is in the active segment, from offset ")


def test_a_lowered_delete_retention_does_not_change_what_is_said_of_a_horizon(
    tmp_path: Path,
) -> None:
    log = LogBuilder(tmp_path).topic(delete_retention_ms=HOUR).append(("a", None))
    clean(log.engine, force=True, now_ms=NOW_MS)
    log.engine.alter_topic("t", {"delete.retention.ms": "2000"})
    with contextlib.ExitStack() as held:
        state = State(log.engine, NOW_MS, held)
        (found,) = (one for one in state.told().findings if one.code == "tombstones")
        check_tombstones(state, found)
        assert "2 s" not in found.sentence
