"""The fuzzer finds what is planted; what it has found once stays found, and mended."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.format import compression, layout
from tests.torture import fuzz
from tests.torture.fuzz_children import KEPT, Finding, Piece, run_piece
from tests.torture.fuzz_plants import FOUND, FOUND_BEYOND
from tests.torture.fuzz_run import InFlight, begun
from tests.torture.fuzz_targets import targets

INPUTS = {
    directory.name: sorted(str(path) for path in directory.iterdir())
    for directory in sorted(KEPT.iterdir())
}


def test_every_kept_input_is_of_a_decoder() -> None:
    assert INPUTS.keys() <= targets().keys()


@pytest.mark.parametrize(
    "engine",
    [
        "replay",
        pytest.param("replay-sanitizers", marks=pytest.mark.slow),
    ],
)
def test_what_was_found_once_is_refused_or_harmless(engine: str, tmp_path: Path) -> None:
    piece = Piece(engine=engine, targets=list(INPUTS), directory=tmp_path, inputs=INPUTS)
    executions, findings = run_piece(piece)
    assert executions == {name: len(paths) for name, paths in INPUTS.items()}
    assert not findings


def told_of(tmp_path: Path, engine: str, names: Iterable[str], **more: Any) -> dict[str, str]:
    """What an engine finds of the planted faults, by decoder."""
    piece = Piece(
        engine=engine,
        targets=list(names),
        directory=tmp_path / engine,
        seconds=more.pop("seconds", 2.5),
        seed=1,
        plant="tests.torture.fuzz_plants:plant",
        **more,
    )
    return {finding.target: finding.told for finding in run_piece(piece)[1]}


@pytest.mark.slow
def test_planted_faults_are_found_one_of_each_kind(tmp_path: Path) -> None:
    """Too much memory, a wrong exception, two hangs, the interpreter's death, and a leak."""
    told = told_of(tmp_path, "mutation", [*FOUND, *FOUND_BEYOND])
    assert told.keys() == FOUND.keys()
    assert all(told[name].startswith(word) for name, word in FOUND.items()), told


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["bounds", "sanitizers"])
def test_a_read_beyond_a_buffer_is_found(engine: str, tmp_path: Path) -> None:
    told = told_of(tmp_path, engine, FOUND_BEYOND)
    assert told.keys() == FOUND_BEYOND.keys()
    assert all(told[name].startswith(word) for name, word in FOUND_BEYOND.items()), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"), [("hypothesis", "delete_horizon"), ("coverage", "uncleanable")]
)
def test_the_other_engines_find_them_too(engine: str, name: str, tmp_path: Path) -> None:
    if engine == "coverage":
        pytest.importorskip("atheris")
    told = told_of(tmp_path, engine, [name], seconds=6)
    assert told[name].startswith(FOUND[name]), told


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_seconds_are_of_all_decoders_whatever_the_jobs(
    jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = []

    def run(piece: Piece) -> tuple[dict[str, int], list[Finding]]:
        ordered.append(sum(targets()[name].weight for name in piece.targets) * piece.seconds)
        return dict.fromkeys(piece.targets, 1), []

    monkeypatch.setattr(fuzz, "run_piece", run)
    monkeypatch.setattr(fuzz, "_has_atheris", lambda: True)
    fuzz.main(["--seconds", "3600", "--jobs", str(jobs)])
    assert sum(ordered) == pytest.approx(3600)


def test_without_atheris_a_full_run_is_not_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "_has_atheris", lambda: False)
    monkeypatch.setattr(fuzz, "fuzz", lambda options, run: run.count("mutation", {"gaps": 1}))
    with pytest.raises(SystemExit, match=r"NOT COMPLETE.*atheris is not installed"):
        fuzz.main([])
    assert "missing the engine coverage" in capsys.readouterr().out
    fuzz.main(["--quick"])


def test_a_full_run_that_leaves_something_out_is_not_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nearly_all(_: object, run: fuzz.Run) -> None:
        run.seconds["coverage"] = 3600.0 - is_late
        run.count("mutation", {name: 1 for name in targets() if name != left_out})

    monkeypatch.setattr(fuzz, "_has_atheris", lambda: True)
    monkeypatch.setattr(fuzz, "fuzz", nearly_all)
    left_out, is_late = "gaps", False
    with pytest.raises(SystemExit, match=r"NOT COMPLETE: no input of gaps$"):
        fuzz.main([])
    left_out, is_late = "", True
    with pytest.raises(SystemExit, match="NOT COMPLETE: 3599 of 3600 seconds"):
        fuzz.main([])
    is_late = False
    fuzz.main([])


def test_decoding_that_ends_at_a_new_place_is_noticed_though_the_error_is_suppressed(
    tmp_path: Path,
) -> None:
    in_flight = InFlight(tmp_path / "in-flight")
    with begun(targets()["batches_none"], in_flight, tmp_path) as (runner, seeds):
        runner.is_new(seeds[0])
        cut = seeds[0][:-1]
        assert runner.is_new(cut) == (None, True)
        assert runner.is_new(cut) == (None, False)


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
