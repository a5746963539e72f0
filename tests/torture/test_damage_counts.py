"""Every byte is damaged once, what is wrong is counted, and one command repeats it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.storage_engine.records import records
from tests.torture import damage
from tests.unit.storage_engine.damage import places
from tests.unit.storage_engine.damage_beside import JUDGES


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No root of one test is another's."""
    yield
    damage.judge_of.cache_clear()


@pytest.mark.parametrize("root", ["ours", "brokers", *JUDGES])
def test_every_byte_of_every_file_is_cut_at_and_flipped(root: str, tmp_path: Path) -> None:
    judge = damage.judge_of(root, str(tmp_path))
    found = Counter((case.name, case.change) for case in damage.damages(judge, root, (1, 128)))
    for name in judge.files():
        for change in ("cut", "flip-1", "flip-128"):
            assert found[str(name), change] == len(places(judge, name))
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
