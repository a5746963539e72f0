"""Every byte is damaged once, what is wrong is counted, and one command repeats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.storage_engine.records import records
from tests.torture import damage
from tests.torture.stored_damage import StoredJudge
from tests.unit.storage_engine.damage import flipped, places
from tests.unit.storage_engine.damage_beside import JUDGES


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No root of one test is another's."""
    yield
    damage.judge_of.cache_clear()


@pytest.mark.parametrize("root", ["ours", "brokers", *JUDGES, "store"])
def test_every_byte_of_every_file_is_cut_at_and_flipped(root: str, tmp_path: Path) -> None:
    judge = damage.judge_of(root, str(tmp_path))
    found = Counter((case.name, case.change) for case in damage.damages(judge, root, (1, 128)))
    for name in judge.files():
        for change in ("cut", "flip-1", "flip-128"):
            assert found[str(name), change] == len(places(judge.root.path, name))
        assert found[str(name), "missing"] == 1


def test_a_reader_that_believes_wrong_bytes_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without checksums a flipped bit of a value is a wrong record."""
    name = "t-0/00000000000000000040.log"
    case = damage.Damaged("ours", "flip-1", 90, name, is_written=False)
    damage.main(["--only", str(case)])
    assert "0 violations" in capsys.readouterr().out
    damage.judge_of.cache_clear()
    monkeypatch.setattr(records, "check_crcs", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        damage.main(["--only", str(case)])
    told = capsys.readouterr()
    assert "1 violations" in told.out
    assert f"--only '{case}'" in told.err
    assert "wrong records" in told.err


def test_a_byte_that_another_process_has_and_this_one_has_not_is_the_last_one() -> None:
    case = damage.Damaged("ours", "flip-1", 7, "commit", is_written=False)
    assert case.content(b"abcdefgh") == b"abcdefgi"
    assert case.content(b"abcdef") == b"abcdeg"


def test_objects_of_a_store_are_refused_or_whole_when_damaged(tmp_path: Path) -> None:
    judge = damage.judge_of("store", str(tmp_path))
    for name in judge.files():
        data = (judge.root.path / name).read_bytes()
        assert judge.judge(name, data, len(data), write=True) == "whole", judge.faults
    for short in ("commit-15", "mixed-4", "segment-3", "side-3"):
        data = (judge.root.path / short).read_bytes()
        judge.judge(Path(short), None, 0, write=True)
        judge.judge(Path(short), flipped(data, len(data) // 2, 1), len(data) // 2, write=True)
    assert not judge.faults
    assert judge.outcomes["stored commit", "short"] == 1


def test_a_store_without_its_last_commit_may_miss_nothing_else(tmp_path: Path) -> None:
    judge = damage.judge_of("store", str(tmp_path))
    assert isinstance(judge, StoredJudge)
    judge._earlier = judge._whole
    assert judge.judge(Path("commit-15"), None, 0, write=False) == "WRONG"


def test_a_wrong_record_of_a_store_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = damage.judge_of("store", str(tmp_path))
    monkeypatch.setattr(records, "check_crcs", lambda *_, **__: None)
    data = (judge.root.path / "mixed-4").read_bytes()
    place = data.index(b"3.1")
    judge.judge(Path("mixed-4"), flipped(data, place, 1), place, write=False)
    assert "wrong records" in judge.faults[0]
