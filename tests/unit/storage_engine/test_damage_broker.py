"""A broker's directory after SIGKILL, damaged at every byte: read as it is, and adopted.

Damage at or above the recovery point is cut off, as the broker would at its start; damage below it
is met by whoever reads there. Nothing below the damage is lost by either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.storage_engine.damage import BITS, BrokerJudge, cases, flipped
from tests.unit.storage_engine.sample_root import Root
from tests.unit.storage_engine.test_damage import FULL, STRIDE, print_outcomes

STEP = STRIDE if FULL else 5 * STRIDE


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerJudge]:
    path = tmp_path_factory.mktemp("broker")
    root = Root(path / "root")
    root.give_to_a_broker()
    judge = BrokerJudge(root, path / "copy")
    yield judge
    print_outcomes(judge)


@pytest.fixture
def judge(judges: BrokerJudge) -> Iterator[BrokerJudge]:
    judges.faults.clear()
    yield judges
    found = "\n".join(judges.faults[:40])
    assert not judges.faults, f"{len(judges.faults)} faults:\n{found}"


@pytest.mark.slow
def test_undamaged_it_reads_whole(judge: BrokerJudge) -> None:
    for name in judge.root.files():
        data = (judge.root.path / name).read_bytes()
        assert judge.judge(name, data, len(data), write=True) == "whole"
    judge.outcomes.clear()


@pytest.mark.slow
def test_a_file_cut_at_any_byte_loses_nothing_below(judge: BrokerJudge) -> None:
    for name, data, place, write in cases(judge, 2, STEP):
        judge.judge(name, data[:place], place, write=write)


@pytest.mark.slow
@pytest.mark.parametrize("bit", BITS)
def test_a_flipped_bit_loses_nothing_below(judge: BrokerJudge, bit: int) -> None:
    for name, data, place, write in cases(judge, 2, STEP):
        judge.judge(name, flipped(data, place, bit), place, write=write)


@pytest.mark.parametrize("base", [0, 7])
def test_a_message_far_away_from_its_segment_is_split_off(judge: BrokerJudge, base: int) -> None:
    name = Path("old-0") / f"{base:020d}.log"
    data = (judge.root.path / name).read_bytes()
    for segment in judge.root.logs["old-0"].segments:
        position = 0
        for item in segment.batches if segment.base == base else ():
            moved = bytearray(data)
            moved[position + 2] = 1  # 2^40 higher, and so beyond what an index can tell
            judge.judge(name, bytes(moved), position + 2, write=True)
            position += len(item.data)


@pytest.mark.slow
def test_any_file_of_the_set_may_be_missing(judge: BrokerJudge) -> None:
    for name in judge.root.files():
        judge.judge(Path(name), None, 0, write=True)
