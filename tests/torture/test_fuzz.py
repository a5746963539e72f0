"""The fuzzer finds what is planted; what it has found once stays found, and mended."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kafkalog.storage_engine import compression, layout
from tests.torture import fuzz
from tests.torture.fuzz_children import KEPT, Piece, run_piece
from tests.torture.fuzz_plants import FOUND
from tests.torture.fuzz_targets import targets

INPUTS = {
    directory.name: sorted(str(path) for path in directory.iterdir())
    for directory in sorted(KEPT.iterdir())
}


def test_every_kept_input_is_of_a_decoder() -> None:
    assert INPUTS.keys() <= targets().keys()


@pytest.mark.parametrize(
    "engine", ["replay", pytest.param("replay-bounds", marks=pytest.mark.slow)]
)
def test_what_was_found_once_is_refused_or_harmless(engine: str, tmp_path: Path) -> None:
    piece = Piece(engine=engine, targets=list(INPUTS), directory=tmp_path, inputs=INPUTS)
    executions, findings = run_piece(piece)
    assert executions == {name: len(paths) for name, paths in INPUTS.items()}
    assert not findings


@pytest.mark.slow
def test_planted_faults_are_found_one_of_each_kind(tmp_path: Path) -> None:
    """Too much memory, a wrong exception, a hang, the interpreter's death, and a leak."""
    piece = Piece(
        engine="mutation",
        targets=list(FOUND),
        directory=tmp_path,
        seconds=2.5,
        seed=1,
        plant="tests.torture.fuzz_plants:plant",
    )
    _, findings = run_piece(piece)
    told = {finding.target: finding.told for finding in findings}
    assert told.keys() == FOUND.keys()
    assert all(told[name].startswith(word) for name, word in FOUND.items()), told


@pytest.mark.slow
def test_a_violation_is_kept_and_replayed_by_the_command_it_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant = ["--plant", "tests.torture.fuzz_plants:plant", "--findings", str(tmp_path)]
    with pytest.raises(SystemExit):
        fuzz.main(["--quick", "--target", "delete_horizon", "--seconds", "2", *plant])
    (kept,) = (tmp_path / "delete_horizon").iterdir()
    assert f"--only '{kept}'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fuzz.main(["--only", str(kept), *plant])
    assert "KeyError" in capsys.readouterr().err
    fuzz.main(["--only", str(kept)])
    assert "0 violations" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name, target in targets().items() if target.mend])
def test_checksums_that_are_right_stay_as_they_are(name: str, tmp_path: Path) -> None:
    target = targets()[name]
    assert target.mend is not None
    seeds = target.begin(tmp_path).seeds
    assert [target.mend(seed) for seed in seeds] == seeds


def test_a_refused_zstd_stream_gives_back_its_memory() -> None:
    """It kept 64 KiB and more of each, which a reader that comes again and again adds up."""
    damaged = compression.compress(layout.CODEC_ZSTD, bytes(5000))[:-3]
    held = []
    for _ in range(2):
        for _ in range(1000):
            with pytest.raises(ValueError, match="zstd"):
                compression.decompress(layout.CODEC_ZSTD, damaged, limit=1 << 20)
        held.append(int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    assert held[1] - held[0] < 16 << 20
