"""SIGKILL at every step of a cleaning: readers see what is right, and the next cleaner heals it.

Every step of a log is tried, none is drawn: every durable act before it happens, and every write
torn in the middle. KAFKALOG_STEPS=every (`make kill-test`) adds the syncs, and every chunk of both
passes. Two readers in other processes go on all the while, one of them, where the tests run as
root, a user who may not write.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.acceptance.killed_cleaning import Row, Zygote, expected_rows, rows_of
from tests.torture.scratch import memory_disk
from tests.unit.cleaner.naive import batch, foreign_log
from tests.unit.cleaner.transactional_log import Log

pytestmark = pytest.mark.slow
NOW = 1_000


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that every user may read, unlike pytest's own; in memory, since nothing is to
    outlive the machine.
    """
    with tempfile.TemporaryDirectory(prefix="kafkalog-kills-", dir=memory_disk()) as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


@dataclass
class Kills:
    """What was found after all deaths in the cleanings of one log."""

    steps: int = 0
    states: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """Suffixes of what lay there after a death."""
    readings: int = 0


def crash_points(engine: DirectoryLog) -> Iterator[str]:
    """Name the crash points of Kafka's table that a directory is at."""
    names = [path.name for path in engine.partition_directory("t", 0).iterdir()]
    found: dict[str, set[tuple[int, str]]] = {"cleaned": set(), "swap": set(), "deleted": set()}
    for name in names:
        parts = re.fullmatch(r"(\d{20})\.(\w+)\.(cleaned|swap|deleted)", name)
        if parts:
            found[parts[3]].add((int(parts[1]), parts[2]))
    cleaned = {base for base, _ in found["cleaned"]}
    log_swaps = {base for base, kind in found["swap"] if kind == "log"}
    if cleaned and not found["swap"]:
        yield "K1"
    if cleaned & log_swaps:
        yield "K2"
    if cleaned and any(base > min(cleaned) for base in log_swaps):
        yield "K8"
    if log_swaps and not cleaned:
        yield "K3" if f"{min(log_swaps):020d}.log" in names else "K4"
    if found["swap"] and not log_swaps:
        yield "K5"
    if found["deleted"] and not found["swap"] and not found["cleaned"]:
        state = engine.describe("t").partitions[0]
        yield "K6" if state.first_dirty_offset >= state.cleaning_offset else "K7"


def log_rows(engine: DirectoryLog) -> list[Row]:
    with engine.snapshot("t", 0, whole=True) as snapshot:
        return rows_of(snapshot)


def kill_everywhere(
    scratch: Path, zygote: Zygote, write: Callable[[Path], DirectoryLog], config: dict[str, Any]
) -> Kills:
    """Kill cleanings of copies of a log at each of their steps, and heal each copy."""
    template = scratch / "template"
    engine = write(template)
    before = log_rows(engine)
    engine.close()
    kills = Kills()
    while True:
        kills.steps += 1
        root = scratch / str(kills.steps)
        shutil.copytree(template, root)
        answer = zygote.kill(root, kills.steps, NOW, config)
        assert answer["faults"] == [], f"step {kills.steps}\n" + "\n".join(answer["faults"])
        kills.readings += sum(answer["readings"])
        kills.states |= set(crash_points(DirectoryLog(root, read_only=True)))
        kills.names |= {path.name.rpartition(".")[2] for path in (root / "t-0").iterdir()}
        check_next_cleaner(root, before, kills.steps, config)
        shutil.rmtree(root)
        if not answer["died"]:
            return kills


def check_next_cleaner(root: Path, before: list[Row], step: int, config: dict[str, Any]) -> None:
    """After a start and a cleaning there is nothing but the latest record of each key."""
    engine = DirectoryLog(root)
    assert expected_rows(log_rows(engine)) == expected_rows(before), step
    end = engine.offsets("t")[0][1]
    engine.append("t", [("new", "1")], now_ms=NOW)
    results = clean(engine, "t", force=True, now_ms=NOW, config=CleanerConfig(**config))
    assert [stats.error for stats in results] == [None], step
    assert log_rows(engine) == [*expected_rows(before), (end, b"new", b"1")], step
    state = engine.describe("t").partitions[0]
    assert (state.first_dirty_offset, state.cleaned_to) == (end + 1, end + 1), step
    checkpoint = (root / "cleaner-offset-checkpoint").read_text().splitlines()
    assert f"t 0 {end + 1}" in checkpoint, step
    names = [path.name for path in engine.partition_directory("t", 0).iterdir()]
    left = [n for n in names if n.endswith((".cleaned", ".swap")) or n.startswith("kl-spill")]
    assert left == [], step
    assert "kl-uncleanable" not in names, step
    engine.close()


# --- the logs ------------------------------------------------------------------------------------


def write_transactions(root: Path) -> DirectoryLog:
    """Three segments that become one, with transactions that were committed and aborted."""
    log = Log.create(root, min_cleanable_dirty_ratio="0")
    for turn in range(3):
        log.data(1, 2, turn + 10)
        log.transact(7, 1, 3)
        log.transact(8, 2, 3)
        (log.commit if turn % 2 else log.abort)(7)
        log.data(4, tombstones=turn == 2)
        (log.abort if turn % 2 else log.commit)(8)
        log.roll()
    log.data(5)
    return log.engine


def write_far_apart(root: Path) -> DirectoryLog:
    """A segment whose offsets are too far apart for the indexes of one."""
    far = 2**31
    segment = [
        batch(0, [("a", "1"), ("b", "1")]),
        batch(far - 5, [("a", "2"), ("c", "1")]),
        batch(far + 7, [("b", "2"), ("d", None)]),
        batch(far + 20, [("e", "1"), ("f", "1")]),
    ]
    return foreign_log(
        root, {0: segment, far + 30: [batch(far + 30, [("f", "2")])], far + 40: []},
        config={"min.cleanable.dirty.ratio": "0"},
    )  # fmt: skip


def write_many_keys(root: Path) -> DirectoryLog:
    """A clean half and a dirty half, either of more keys than the memory is given."""
    engine = DirectoryLog(root)
    engine.create_topic("t", 1, {"segment.bytes": "1500", "min.cleanable.dirty.ratio": "0"})
    for half in range(2):
        for number in range(6):
            rows = [
                (f"k{(number * 17 + row * 5 + half) % 60}", None if row == 9 else f"{half}{number}")
                for row in range(12)
            ]
            engine.append("t", rows, now_ms=1)
        if half == 0:
            (stats,) = clean(engine, "t", force=True, now_ms=1)
            assert stats.error is None
    return engine


class Killed(NamedTuple):
    """A log, the cleaner's settings, and what lies there after one death or another."""

    write: Callable[[Path], DirectoryLog]
    config: dict[str, Any]
    states: set[str]
    other_states: set[str]
    """Those that are met now and then as well."""
    names: set[str]


USUAL = {"K1", "K2", "K3", "K4", "K5", "K6", "K7"}
SPILLING = {"dedupe_buffer_size": 24 * 30, "io_buffer_size": 600}
CLEANERS = {
    "with one output": Killed(
        write_transactions, {"io_buffer_size": 300}, USUAL, set(), {"txnindex"}
    ),
    "with several outputs": Killed(
        write_far_apart, {"io_buffer_size": 100}, {*USUAL, "K8"}, set(), set()
    ),
    "that spills": Killed(write_many_keys, SPILLING, USUAL, {"K8"}, set()),
}


@pytest.mark.parametrize("cleaner", CLEANERS)
def test_a_cleaner_may_be_killed_at_any_step(scratch: Path, zygote: Zygote, cleaner: str) -> None:
    killed = CLEANERS[cleaner]
    kills = kill_everywhere(scratch, zygote, killed.write, killed.config)
    assert killed.states <= kills.states <= killed.states | killed.other_states
    assert killed.names <= kills.names
    print(kills)
