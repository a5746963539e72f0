"""The benchmarks' own arithmetic, and the page that they write."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import (
    LESS,
    MORE,
    Claim,
    compare,
    compare_figures,
    in_turn,
    leave_out,
    readme,
    report,
    together,
)
from bench import page as pages
from bench.__main__ import Runner, grouped
from bench.page import PROGRAMS, WITH_SPARK, Result, Results, has_path

BENCH = Path(pages.__file__).parent
CODEC = "100-byte records, {0}, batches of {1}"
READ = "Spark batch read, 4,000,000 records of 100 bytes, {0}, {1}"
TABLE = "view=latest of 10,000,000 records, 1,000,000 keys, {0} cleaning"
FLOOR_OF_READS = "a source of ready-made Arrow batches"
WRITERS = ("that syncs as we do", "that does not sync", "a Python sink that only counts")
PROMISED = [
    *(
        ("clean", f"clean 10,000,000 records of 100 bytes, 1,000,000 keys, {codec}", "LogC", ">= 3")
        for codec in ("none", "lz4")
    ),
    ("clean", "distinct keys, 20 times what the buffer holds", "LogCleaner", ">= 10"),
    ("clean", "20 times what the buffer holds", "", "ours <= 1"),
    ("merge", "bytes after cleaning, uniform keys", "LogCleaner", "<= 0.85"),
    ("merge", "batches after cleaning, uniform keys", "LogCleaner", "<= 0.2"),
    ("merge", "reading a cleaned log, uniform keys", "LogCleaner", ">= 1.5"),
    ("merge", "bytes after cleaning, zipf(1.2) keys", "LogCleaner", "<= 0.6"),
    ("clean", "keys in 128 MiB before anything is written", "SkimpyOffsetMap", ">= 1"),
    ("dedup", "peak memory above idle", "the limit", "<= 1"),
    *(
        ("codec", f"{verb} Arrow, {CODEC.format(codec, size)}", "aiokafka", ">= 3")
        for verb in ("decode to", "encode from")
        for codec in ("uncompressed", "lz4")
        for size in ("100 KB", "16 KiB")
    ),
    *(
        ("spark_read", READ.format(partitions, codec), peer, target)
        for partitions in ("1 partition", "4 partitions")
        for codec, floor in (("uncompressed", ">= 0.8"), ("lz4", ">= 0.7"))
        for peer, target in (("Spark's Kafka connector", ">= 2"), (FLOOR_OF_READS, floor))
    ),
    *(
        ("spark_write", what, peer, target)
        for what, targets in (
            ("df.write of", (">= 2", ">= 1.5", ">= 0.75")),
            ("writeStream", (">= 1", ">= 1", ">= 0.85")),
        )
        for peer, target in zip(WRITERS, targets, strict=True)
    ),
    ("latency", "micro-batch of 1,000 records, p50", "an empty Python source", "<= 1.12"),
    ("latency", "micro-batch of 1,000 records, p50", "Kafka source and sink on a broker", ""),
    ("store_latency", "micro-batch of 1,000 records, p50", "on a log directory", "<= 1.5"),
    ("store_latency", "records, 30 ms added to each request, p50", "on a log directory", ""),
    *(
        (
            "store_throughput",
            f"Spark batch {act}, 1,000,000 records",
            "on a log directory",
            "<= 1.5",
        )
        for act in ("write", "read")
    ),
    ("store_clean", "clean 4,000,000 records of 100 bytes", "in a log directory", "<= 1.3"),
    ("store_clean", "distinct dirty keys in 16 MiB: peak memory", "the limit", "<= 1"),
    ("store_clean", "keys in 16 MiB: rewrites of the log", "in a log directory", "ours <= 1"),
    *(
        ("view_latest", TABLE.format(state), peer, target)
        for state in ("before", "after")
        for peer, target in (("the connector and a window", ">= 5"), ("restore", ">= 1"))
    ),
    ("view_latest", TABLE.format("after"), "our changelog and a window", ">= 4"),
    ("previous_value", "each with the value before", "the stream without it", ">= 0.5"),
    ("lookup", "lookup of one key in 10,000,000", "SQLite", "ours < 5"),
    *(
        ("lookup", "lookup of 1,000 keys at once in 10,000,000", peer, "ours <= 20")
        for peer in ("SQLite", "DuckDB")
    ),
    ("chosen_keys", "100 chosen keys of 10,000,000", "a filter", ">= 20"),
    ("planning", "a read of 200 topics by pattern", "400 empty tasks", "<= 1.2"),
    ("commit", "100 records to 1 of 1,000 partitions, 10,000 writers", "bare fsyncs", "<= 1.8"),
    ("commit", "100 records to 1 of 1,000 partitions, 10,000 writers", "SQLite, WAL", ""),
    ("staging", "64 tasks x 50 partitions", "the same, and a bare commit", "<= 1.6"),
    ("idle", "after 90 s", "empty source and sink", "<= 0.5"),
    ("idle", "a worker's memory", "empty source and sink", "<= 25"),
    ("open", "status: 1,000 partitions", "names and sizes of all files", "ours < 0.5"),
    ("open", "1,000 partitions", "start of Kafka's broker", ">= 10"),
    ("growth_curve", "100,000,000 records", "the same for 1,000,000 records", "<= 1.5"),
    ("growth_curve", "100,000,000 records", "Kafka's LogCleaner", ""),
    ("growth", "dirty byte, the clean part 10 times as large", "", "<= 1.5"),
    *(
        ("many_segments", f"clean {count} segments of 8 records, each swapped alone", "LogC", "")
        for count in ("100", "1,000", "10,000")
    ),
    ("many_segments", "small segment, ten times as many", "the same for 1,000", "<= 1.5"),
    ("cold_start", "first micro-batch", "", "<= 0.3"),
]
"""What has to be on the page: the program, words of the claim, words of its peer, its target."""


def claim(ratio: float, target: str, ours: float = 1.0) -> Claim:
    return Claim(
        claim="c", ours=ours, peer=1.0, unit="s", peer_name="p", ratio=ratio, target=target
    )


@pytest.mark.parametrize(
    ("ratio", "target", "is_met"),
    [
        (3.0, ">= 3", True),
        (2.99, ">= 3", False),
        (1.5, "<= 1.5", True),
        (1.51, "<= 1.5", False),
        (9.0, "", None),
    ],
)
def test_a_target_is_a_bound_of_the_ratio(ratio: float, target: str, is_met: bool | None) -> None:
    assert claim(ratio, target).is_met is is_met


def test_a_target_may_be_a_bound_of_our_own_figure() -> None:
    assert claim(0.1, "ours < 5", ours=4.9).is_met is True
    assert claim(0.1, "ours < 5", ours=5.0).is_met is False
    assert claim(0.1, "ours >= 1.3", ours=1.2).is_met is False


def test_of_two_times_the_shorter_one_is_the_faster() -> None:
    times = [1.0, 2.0, 4.0], [4.0, 6.0, 8.0]
    faster = compare_figures("c", *times, unit="s", peer_name="p", ratio_is=MORE, is_time=True)
    share = compare_figures("c", *times, unit="s", peer_name="p", ratio_is=LESS)
    assert (faster.ours, faster.peer, faster.ratio) == (2.0, 6.0, 3.0)
    assert share.ratio == pytest.approx(1 / 3, rel=1e-3)


def test_the_higher_of_two_rates_is_the_faster() -> None:
    rates = [30.0, 40.0], [10.0, 10.0]
    assert compare_figures("c", *rates, unit="r/s", peer_name="p", ratio_is=MORE).ratio == 3.5


@pytest.mark.slow
def test_rounds_take_turns_and_the_first_is_not_counted() -> None:
    done: list[str] = []
    found = compare(
        "c",
        lambda: done.append("ours"),
        lambda: done.append("peer"),
        amount=1,
        unit="r/s",
        rounds=2,
        peer_name="p",
    )
    assert done == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert found.rounds == 2


@pytest.mark.slow
def test_the_memory_of_a_side_is_the_most_that_it_had_itself() -> None:
    found = compare(
        "c",
        lambda: bytearray(100 << 20),
        lambda: bytearray(20 << 20),
        amount=1,
        unit="r/s",
        rounds=2,
        peer_name="p",
    )
    assert found.ours_mib is not None
    assert found.peer_mib is not None
    assert found.ours_mib - found.peer_mib > 70  # the allocator may keep the 20


def test_each_side_begins_as_often_as_the_others() -> None:
    assert [in_turn(turn, "abc") for turn in range(4)] == [*map(list, ("abc", "bca", "cab", "abc"))]


def test_a_claim_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    report(claim(3.0, ">= 3").told(p99_ms=7), as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["is_met"] is True
    assert found["more"] == {"p99_ms": 7}


def test_a_peer_that_is_not_here_is_left_out_and_missing_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    leave_out("Kafka", "no Java")
    assert "Kafka: no Java" in capsys.readouterr().err
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SystemExit):
        leave_out("Kafka", "no Java")


def test_programs_use_the_published_jars_and_tests_what_they_were_told() -> None:
    told = "import os, sys, bench; sys.stdout.write(os.environ.get('KAFKALOG_PEER', 'any'))"
    started = f"import sys; sys.argv[0] = '-m'; {told}"
    environment = {name: value for name, value in os.environ.items() if name != "KAFKALOG_PEER"}
    for code, given, expected in (
        (told, {}, "any"),
        (started, {}, "jars"),
        (started, {"KAFKALOG_PEER": "docker"}, "docker"),
    ):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, **given},
            cwd=BENCH.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout == expected


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a program of the package `bench`, for the children of a runner."""
    package = tmp_path / "bench"
    package.mkdir()
    (package / "__init__.py").write_text((BENCH / "__init__.py").read_text())
    (package / "memory.py").write_text((BENCH / "memory.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.__main__.has_path", lambda _: True)

    def write(name: str, code: str) -> None:
        (package / f"{name}.py").write_text(code)

    return write


CLAIM_LINE = 'print(\'{"claim": "c"}\', flush=True)'


def test_what_a_program_says_besides_its_claims_is_passed_on(
    programs: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    programs("talks", f"print('a word'); {CLAIM_LINE}")
    result = Runner(None, is_quick=True, needs_peers=False).run(["talks"])
    assert result is not None
    assert result.claims == [{"claim": "c"}]
    found = capsys.readouterr()
    assert "a word" in found.err
    assert "a word" not in found.out


def test_a_result_names_the_whole_command_but_for_the_disk(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    programs("talks", CLAIM_LINE)
    result = Runner(tmp_path, is_quick=True, needs_peers=False).run(["talks"])
    assert result is not None
    assert result.command == "python -m bench.talks --quick"


def test_what_is_written_down_has_its_peers(programs: Callable[[str, str], None]) -> None:
    programs("lonely", f"{CLAIM_LINE}\nimport bench\nbench.leave_out('Kafka', 'no Java')")
    assert Runner(None, is_quick=True, needs_peers=True).run(["lonely"]) is None


def test_a_quick_program_that_does_not_end_is_ended(
    programs: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.__main__.QUICK_LIMIT_S", 1)
    mark = tmp_path / "cleaned"
    programs(
        "hangs",
        f"{CLAIM_LINE}\nimport time\ntry:\n    time.sleep(60)\n"
        f"finally:\n    open({str(mark)!r}, 'w').close()\n",
    )
    assert Runner(None, is_quick=True, needs_peers=False).run(["hangs"]) is None
    assert mark.exists()


def test_a_quick_run_has_one_spark_for_all_programs_that_can_share_it() -> None:
    first, *others = grouped(PROGRAMS)
    assert first == [*WITH_SPARK]
    assert others == [[name] for name in PROGRAMS if name not in WITH_SPARK]
    assert grouped(["latency", "codec"]) == [["latency"], ["codec"]]
    assert grouped(["codec"]) == [["codec"]]
    for name in PROGRAMS:
        source = (BENCH / f"{name}.py").read_text()
        uses_spark = re.search(r"^from bench.spark import .*\bsession\b", source, re.M) is not None
        assert uses_spark == (name in WITH_SPARK)


def test_programs_that_run_together_are_all_run_and_those_that_break_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []

    def program(name: str, fault: BaseException | None) -> None:
        def main(arguments: Sequence[str]) -> None:
            done.append((name, *arguments))
            if fault is not None:
                raise fault

        module = types.ModuleType(f"bench.{name}")
        monkeypatch.setattr(module, "main", main, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    program("fails", ValueError("no"))
    program("exits", SystemExit("wrong"))
    program("works", None)
    assert together.run(["fails", "exits", "works"], ["--quick"]) == ["fails", "exits"]
    assert done == [("fails", "--quick"), ("exits", "--quick"), ("works", "--quick")]


def test_sigterm_ends_the_programs_too(
    programs: Callable[[str, str], None], tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    programs(
        "hangs",
        f"import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(mark)!r}, 'w').write(str(child.pid) + chr(10))\n"
        f"time.sleep(60)\n",
    )
    for name in ("__main__", "page", "readme"):
        programs(name, (BENCH / f"{name}.py").read_text().replace('"clean",', '"hangs",', 1))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{BENCH.parent}"}
    command = [sys.executable, "-m", "bench", "--quick", "hangs"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 120
        while not (mark.exists() and mark.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 60
    while runs(int(mark.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_every_program_is_run_and_says_what_it_measures() -> None:
    found = dict[str, str]()
    for path in BENCH.glob("*.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if "[--json] [--quick]" in text:
            found[path.stem] = text
    assert {*found} == {*PROGRAMS}
    for program, text in found.items():
        assert f"python -m bench.{program} [--json] [--quick]" in text


def test_a_program_that_measures_a_disk_says_so() -> None:
    for program in PROGRAMS:
        source = (BENCH / f"{program}.py").read_text()
        assert has_path(program) == ("options.path" in source)


# --- the page ------------------------------------------------------------------------------------


def result(program: str, *claims: Claim) -> Result:
    found = [json.loads(json.dumps(shown(each))) for each in claims]
    seen = {
        "date": "2026-01-02",
        "commit": "abc (dirty)",
        "processor": "P",
        "memory": "1 GiB",
        "disk": "ext4 on the disk",
        "system": "Linux",
        "SQLite": "3.1",
    }
    return Result(program, f"python -m bench.{program}", 7, seen, found)


def shown(each: Claim) -> dict[str, Any]:
    return {**{name: getattr(each, name) for name in Claim.__slots__}, "is_met": each.is_met}


def test_a_miss_is_explained_by_a_remark_whose_words_its_claim_or_its_peer_has() -> None:
    missed = result("codec", claim(2.0, ">= 3"), claim(4.0, ">= 3"))
    assert Results([missed], {"clean": {"c": "why"}}).unexplained() == ["c p"]
    assert Results([missed], {"codec": {"other": "why"}}).unexplained() == ["c p"]
    assert Results([missed], {"codec": {"p": "  "}}).unexplained() == ["c p"]
    assert Results([missed], {"codec": {"p": "why"}}).unexplained() == []


def test_a_remark_of_no_claim_is_stale() -> None:
    found = result("codec", claim(4.0, ">= 3"))
    remarks = {"codec": {"c": "of it", "lz4": "of what?"}, "clean": {"c": "not run"}}
    assert Results([found], remarks).stale() == ["codec: lz4", "clean: c"]


def test_the_page_names_misses_memory_and_remarks() -> None:
    lone = Claim(
        claim="lone", ours=1, peer=2, unit="s", peer_name="p", ratio=2, target=">= 3", peer_mib=7.0
    )
    page = Results([result("codec", lone)], {"codec": {"lone": "the why\nof it"}}).page()
    assert "- [lone](#codec), compared with p: 2 times as fast, target >= 3" in page
    assert "| \N{EN DASH} / 7 |" in page
    assert "- *lone*: the why of it" in page
    words = " ".join(page.split())
    assert "took 7 s on 2026-01-02, at commit abc (dirty)." in words
    assert "Machine: P, 1 GiB, ext4 on the disk, Linux. Versions: SQLite 3.1." in words


def test_the_page_is_what_the_figures_make() -> None:
    assert pages.PAGE.read_text() == Results.load().page()
    for each in Results.load():
        assert (pages.CHARTS / f"{each.program}.png").exists()


def test_the_numbers_of_the_readme_are_those_of_the_page() -> None:
    assert readme.table(Results.load()) in readme.README.read_text()


def test_every_program_has_figures_on_the_page() -> None:
    assert [each.program for each in Results.load()] == [*PROGRAMS]


@pytest.mark.parametrize(("program", "words", "peer", "target"), PROMISED)
def test_what_is_promised_was_measured(program: str, words: str, peer: str, target: str) -> None:
    assert any(
        words in each["claim"] and peer in each["peer_name"] and each["target"] == target
        for found in Results.load()
        if found.program == program
        for each in found.claims
    )


def test_every_time_has_the_memory_that_it_took() -> None:
    lacking = [
        pages.name(each)
        for found in Results.load()
        for each in found.claims
        if is_time(each["unit"])
        and (each["ours_mib"] is None or (each["peer_mib"] is None and not is_number(each)))
    ]
    assert lacking == []


def is_time(unit: str) -> bool:
    return unit in {"s", "ms"} or "/" in unit


def is_number(found: Mapping[str, Any]) -> bool:
    """Say whether the peer is a rate that was promised, and no process."""
    return "a number and not run" in found["peer_name"]


def test_every_miss_is_explained() -> None:
    assert Results.load().unexplained() == []


def test_every_remark_speaks_of_a_claim() -> None:
    assert Results.load().stale() == []
