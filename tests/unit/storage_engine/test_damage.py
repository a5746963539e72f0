"""Whole directories, damaged: cut at every byte, flipped at every byte, files missing, files added.

No record below the damage is lost, no wrong one is ever read, and what is refused is refused by a
typed error. The everyday run takes every n-th place; `make damage-test` takes them all and prints
the counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import journal
from tests.unit.storage_engine.damage import (
    BITS,
    Judge,
    cases,
    flipped,
    kind_of,
    outcome_lines,
    read,
)
from tests.unit.storage_engine.sample_root import Root

FULL = os.environ.get("KAFKALOG_DAMAGE") == "full"
STRIDE = 1 if FULL else int(os.environ.get("KAFKALOG_DAMAGE", "61"))
"""Every how many-th place is damaged."""
WRITES = 10
"""Every how many-th of these a copy is also cleaned and appended to."""


@pytest.fixture
def judge(judges: Judge) -> Iterator[Judge]:
    judges.faults.clear()
    yield judges
    found = "\n".join(judges.faults[:40])
    assert not judges.faults, f"{len(judges.faults)} faults:\n{found}"


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    path = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_READ_PAUSE_S", 0)
        judge = Judge(Root(path / "root"), path / "copy")
        yield judge
    print_outcomes(judge)


def print_outcomes(judge: Judge) -> None:
    print("", *outcome_lines(judge.outcomes), sep="\n")


@pytest.mark.slow
def test_undamaged_it_reads_whole(judge: Judge) -> None:
    for name in judge.root.files():
        data = (judge.root.path / name).read_bytes()
        assert judge.judge(name, data, len(data), write=True) == "whole"
    judge.outcomes.clear()


@pytest.mark.slow
def test_a_file_cut_at_any_byte_loses_nothing_below(judge: Judge) -> None:
    for name, data, place, write in cases(judge, 1 if FULL else WRITES, STRIDE):
        judge.judge(name, data[:place], place, write=write)


@pytest.mark.slow
@pytest.mark.parametrize("bit", [1 << n for n in range(8)] if FULL else BITS)
def test_a_flipped_bit_loses_nothing_below(judge: Judge, bit: int) -> None:
    for name, data, place, write in cases(judge, WRITES, STRIDE):
        judge.judge(name, flipped(data, place, bit), place, write=write and bit in BITS)


@pytest.mark.slow
def test_any_file_of_the_set_may_be_missing(judge: Judge) -> None:
    for name in judge.root.files():
        judge.judge(name, None, 0, write=True)


def test_every_kind_of_file_is_among_the_damaged(judge: Judge) -> None:
    kinds = {kind_of(name) for name in judge.root.files()}
    stages = ("", layout.SWAP, layout.CLEANED)
    of_segments = {suffix + stage for suffix in layout.SEGMENT_SUFFIXES for stage in stages}
    assert of_segments | {layout.SNAPSHOT} <= kinds


@pytest.mark.parametrize("is_brokers", [False, True])
def test_half_a_swap_is_read_up_to_a_batch_whose_last_offset_is_damaged(
    tmp_path: Path, is_brokers: bool
) -> None:
    root = Root(tmp_path / "root")
    if is_brokers:
        root.give_to_a_broker()
    log = root.logs["swap-0"]
    swap = log.segments[0]
    *before, damaged = swap.batches
    place = len(swap.data) - len(damaged.data) + 23  # the offset delta, which is negative then
    (root.path / log.name / swap.name).write_bytes(flipped(swap.data, place, 0x80))
    engine = DirectoryLog(root.path, read_only=True, create=False)
    rows = [row for item in before for row in item.rows if not item.is_control]
    assert read(engine, log, committed=False, end=damaged.base) == rows
    with pytest.raises(KafkaLogError):
        read(engine, log, committed=False)
