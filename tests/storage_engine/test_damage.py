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

from kafkalog.storage_engine import journal, layout
from tests.storage_engine.damage import Judge, kind_of
from tests.storage_engine.sample_root import Root

FULL = os.environ.get("KAFKALOG_DAMAGE") == "full"
STRIDE = 1 if FULL else int(os.environ.get("KAFKALOG_DAMAGE", "61"))
"""Every how many-th place is damaged."""
WRITES = 10
"""Every how many-th of these a copy is also cleaned and appended to."""
BITS = (0x01, 0x80)


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
    kinds = sorted({kind for kind, _ in judge.outcomes})
    words = ("WRONG", "whole", "refused", "short", "shifted")
    print(f"\n{'damaged':36}" + "".join(f"{word:>10}" for word in words))
    for kind in kinds:
        print(f"{kind:36}" + "".join(f"{judge.outcomes[kind, word]:10}" for word in words))


def places(judge: Judge, name: Path) -> range:
    """The bytes of a file that mean something."""
    data = (judge.root.path / name).read_bytes()
    if name.name != layout.COMMIT:
        return range(len(data))
    return range(min(len(data), len(data.rstrip(b"\0")) + 40))


def cases(judge: Judge, writes: int, step: int = STRIDE) -> Iterator[tuple[Path, bytes, int, bool]]:
    """Yield (file, content, place, whether to write) of every `step`-th place."""
    number = 0
    for name in judge.root.files():
        data = (judge.root.path / name).read_bytes()
        for place in places(judge, name):
            number += 1
            if number % step == 0:
                yield name, data, place, number // step % writes == 0


def test_undamaged_it_reads_whole(judge: Judge) -> None:
    for name in judge.root.files():
        data = (judge.root.path / name).read_bytes()
        assert judge.judge(name, data, len(data), write=True) == "whole"
    judge.outcomes.clear()


def test_a_file_cut_at_any_byte_loses_nothing_below(judge: Judge) -> None:
    for name, data, place, write in cases(judge, 1 if FULL else WRITES):
        judge.judge(name, data[:place], place, write=write)


@pytest.mark.parametrize("bit", [1 << n for n in range(8)] if FULL else BITS)
def test_a_flipped_bit_loses_nothing_below(judge: Judge, bit: int) -> None:
    for name, data, place, write in cases(judge, WRITES):
        flipped = bytearray(data)
        flipped[place] ^= bit
        judge.judge(name, bytes(flipped), place, write=write and bit in BITS)


def test_any_file_of_the_set_may_be_missing(judge: Judge) -> None:
    for name in judge.root.files():
        judge.judge(name, None, 0, write=True)


def test_every_kind_of_file_is_among_the_damaged(judge: Judge) -> None:
    kinds = {kind_of(name) for name in judge.root.files()}
    for kind in (*layout.SEGMENT_SUFFIXES, layout.SNAPSHOT, ".log.swap", ".log.cleaned"):
        assert kind in kinds
