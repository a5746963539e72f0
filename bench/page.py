"""Write the page of the benchmarks, with a table and a chart for each program.

docs/benchmarks.json keeps the figures. docs/benchmarks.md and docs/benchmarks/*.png are made from
them and from remarks.toml. A remark there belongs to each claim that contains its words, or whose
peer's name contains them. Every missed target needs a remark.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import sqlite3
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

from tests.conformance.jars import PEERS

PROGRAMS: Final = (
    "clean",
    "merge",
    "dedup",
    "growth",
    "growth_curve",
    "many_segments",
    "codec",
    "spark_read",
    "spark_write",
    "latency",
    "store_latency",
    "store_throughput",
    "store_clean",
    "idle",
    "cold_start",
    "view_latest",
    "table_view",
    "materialized",
    "previous_value",
    "chosen",
    "chosen_keys",
    "planning",
    "lookup",
    "lookup_uncleaned",
    "commit",
    "staging",
    "open",
)
WITH_SPARK: Final = (
    "spark_write",
    "latency",
    "store_latency",
    "store_throughput",
    "spark_read",
    "view_latest",
    "table_view",
    "materialized",
    "previous_value",
    "chosen_keys",
    "planning",
)
"""Those that may share a Spark (bench/together.py): the others with one start and end it."""
_ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = _ROOT / "docs" / "benchmarks.json"
PAGE: Final = _ROOT / "docs" / "benchmarks.md"
CHARTS: Final = _ROOT / "docs" / "benchmarks"
REMARKS: Final = _ROOT / "bench" / "remarks.toml"
_PACKAGES: Final = ("pyspark", "pyarrow", "numpy", "aiokafka", "duckdb")
_JARS: Final = {"Kafka": "broker/kafka_*.jar", "Spark's connector": "spark/spark-sql-kafka-*.jar"}
_PLACE: Final = ("processor", "memory", "disk", "system")
_OURS, _PEER = "#2563ab", "#b8bec7"
_TITLE_WIDTH: Final = 110
_PAGE_WIDTH: Final = 100
_DASH: Final = "\N{EN DASH}"
Remarks = Mapping[str, Mapping[str, str]]
"""By program, then by words of a claim."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one program: its claims, as it printed them, and the machine."""

    program: str
    command: str
    seconds: int
    machine: Mapping[str, str]
    claims: Sequence[Mapping[str, Any]]


class Results:
    """The results of all programs, and the remarks on them."""

    def __init__(self, results: Sequence[Result] = (), remarks: Remarks | None = None) -> None:
        self._by_program = {result.program: result for result in results}
        self._remarks = remarks or {}

    @classmethod
    def load(cls) -> Results:
        """Read what was kept."""
        remarks = tomllib.loads(REMARKS.read_text())
        if not FIGURES.exists():
            return cls((), remarks)
        return cls([Result(**one) for one in json.loads(FIGURES.read_text())], remarks)

    def __iter__(self) -> Iterator[Result]:
        return (self._by_program[name] for name in PROGRAMS if name in self._by_program)

    def claim(self, program: str, words: str) -> Mapping[str, Any]:
        """Return the last claim of a program whose `name` has these words; raises LookupError."""
        claims = self._by_program[program].claims if program in self._by_program else ()
        return [claim for claim in claims if words in name(claim)][-1]

    def add(self, result: Result) -> None:
        """Take a program's figures in place of its last ones."""
        self._by_program[result.program] = result

    def save(self) -> None:
        """Keep them."""
        FIGURES.write_text(json.dumps([asdict(result) for result in self], indent=1) + "\n")

    def render(self) -> None:
        """Write the page and its charts."""
        CHARTS.mkdir(exist_ok=True)
        for result in self:
            _draw(result, CHARTS / f"{result.program}.png")
        PAGE.write_text(self.page())

    def page(self) -> str:
        """Return the page."""
        parts = [_HEAD, _summary(self)]
        for result in self:
            parts.append(_section(result, self._remarks.get(result.program, {})))
        return "\n".join(parts)

    def unexplained(self) -> list[str]:
        """Return the claims that miss their target and of which no remark speaks."""
        return [
            name(claim)
            for result in self
            for claim in result.claims
            if claim["is_met"] is False
            and not any(
                words in name(claim) and remark.strip()
                for words, remark in self._remarks.get(result.program, {}).items()
            )
        ]

    def stale(self) -> list[str]:
        """Return the remarks, as "program: words", that speak of no claim."""
        names = {result.program: [name(claim) for claim in result.claims] for result in self}
        return [
            f"{program}: {words}"
            for program, remarks in self._remarks.items()
            for words in remarks
            if not any(words in each for each in names.get(program, []))
        ]


def name(claim: Mapping[str, Any]) -> str:
    """Return what a claim is known by: what it claims, and its peer."""
    return f"{claim['claim']} {claim['peer_name']}"


def machine(path: Path) -> dict[str, str]:
    """Say where, with what and on which disk, that of `path`, a program ran."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "disk": f"{_file_system(path)} on the disk",
        "system": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
        **{package: metadata.version(package) for package in _PACKAGES},
        "SQLite": sqlite3.sqlite_version,
        **_java(),
    }


def has_path(program: str) -> bool:
    """Say whether a program measures a disk that can be chosen."""
    return "[--path DIR]" in _text(program)


def title(program: str) -> str:
    """Return the first line of what a program says of itself."""
    return _text(program).partition("\n")[0].rstrip(".")


def _text(program: str) -> str:
    text = ast.get_docstring(ast.parse((_ROOT / "bench" / f"{program}.py").read_text()))
    assert text is not None
    return text


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit, and whether programs or kafkalog were changed since."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)

    commit = git("rev-parse", "--short=10", "HEAD").stdout.strip()
    is_dirty = git("status", "--porcelain", "--", "*.py").stdout.strip()
    return f"{commit or 'unknown'}{' (dirty)' if is_dirty else ''}"


def _file_system(path: Path) -> str:
    """The name of the file system that has a path."""
    place = path.resolve()
    disks = [
        (len(disk.mountpoint), disk.fstype)
        for disk in psutil.disk_partitions(all=True)
        if place.is_relative_to(disk.mountpoint)
    ]
    return max(disks)[1] if disks else "unknown"


def _java() -> dict[str, str]:
    """The versions of what the peers run with: Java, and the jars that `make peers` fetches."""
    versions = {}
    for what, pattern in _JARS.items():
        for jar in PEERS.glob(pattern):
            versions[what] = jar.stem.rpartition("-")[2]
    home = os.environ.get("JAVA_HOME")
    command = [f"{home}/bin/java" if home else "java", "-version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return versions
    return {"Java": said.partition('"')[2].partition('"')[0], **versions}


# --- the page ------------------------------------------------------------------------------------

_HEAD: Final = """# Benchmarks

A program in `bench/` printed every figure here. It ran kafkalog and its peer on the same data, and
checked that both did the same work. The two took turns, round by round, unless the claim or its
program says otherwise. The ratio is the median of the rounds' ratios. `make bench` measures
everything again and writes this page; `python -m bench NAME --write` does it for one program. The
machine did nothing else at the time, unless a remark says so. Memory is the most that the processes
had resident, in MiB: ours / the peer's. A dash means: no process to measure.
"""


def _summary(results: Results) -> str:
    met = [claim["is_met"] for result in results for claim in result.claims]
    lines = [
        f"{len(met)} claims, {met.count(True) + met.count(False)} with a target: "
        f"{met.count(True)} met, {met.count(False)} missed.\n",
        "| what | claims | targets met |",
        "|---|---|---|",
    ]
    for result in results:
        states = [claim["is_met"] for claim in result.claims if claim["is_met"] is not None]
        link = f"[{title(result.program)}](#{result.program})"
        share = f"{states.count(True)} of {len(states)}" if states else "none set"
        lines.append(f"| {link} | {len(result.claims)} | {share} |")
    misses = [
        _item(
            f"[{claim['claim']}](#{result.program}), compared with {claim['peer_name']}: "
            f"{claim['ratio']:,} {claim['ratio_is']}, target {claim['target']}"
        )
        for result in results
        for claim in result.claims
        if claim["is_met"] is False
    ]
    if misses:
        lines += [
            "",
            "These claims missed their target; the remark below their table gives the reason:",
            "",
            *misses,
        ]
    return "\n".join(lines) + "\n"


def _section(result: Result, remarks: Mapping[str, str]) -> str:
    lines = [
        f'<a name="{result.program}"></a>\n',
        f"## {title(result.program)}\n",
        f"{_origin(result)}\n",
        "| claim | kafkalog | peer | ratio | target | peak memory, MiB | besides |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(claim) for claim in result.claims]
    lines += [""]
    lines += [_item(f"*{words}*: {remark}") for words, remark in remarks.items()]
    lines += [""] if remarks else []
    lines += [f"![{title(result.program)}](benchmarks/{result.program}.png)", ""]
    return "\n".join(lines)


def _origin(result: Result) -> str:
    """Return the command that made the figures, its time, its machine and the versions."""
    seen = result.machine
    place = ", ".join(seen[what] for what in _PLACE)
    others = [what for what in seen if what not in {*_PLACE, "date", "commit"}]
    versions = ", ".join(f"{what} {seen[what]}" for what in others)
    return _filled(
        f"`{result.command}` took {result.seconds} s on {seen['date']}, at commit "
        f"{seen['commit']}. Machine: {place}. Versions: {versions}."
    )


def _item(text: str) -> str:
    return _filled(text, bullet="- ", indent="  ")


def _filled(text: str, bullet: str = "", indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _PAGE_WIDTH,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _row(claim: Mapping[str, Any]) -> str:
    target = claim["target"]
    if target:
        target = f"{target}: {'met' if claim['is_met'] else '**missed**'}"
    memory = [
        _DASH if claim[of] is None else f"{claim[of]:,.0f}" for of in ("ours_mib", "peer_mib")
    ]
    more = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in claim["more"].items())
    cells = (
        claim["claim"],
        f"{claim['ours']:,} {claim['unit']}",
        f"{claim['peer']:,} {claim['unit']} ({claim['peer_name']})",
        f"{claim['ratio']:,} {claim['ratio_is']}",
        target,
        " / ".join(memory),
        more,
    )
    return "| " + " | ".join(cells) + " |"


def _draw(result: Result, path: Path) -> None:
    """One pair of bars for each claim, each with its own scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    titles = [_bar_title(claim) for claim in result.claims]
    lines = sum(text.count("\n") for text in titles)
    figure, places = plt.subplots(
        len(titles),
        1,
        figsize=(9, 0.4 + 0.95 * len(titles) + 0.15 * lines),
        squeeze=False,
        layout="constrained",
    )
    for place, text, claim in zip(places[:, 0], titles, result.claims, strict=True):
        figures = [claim["peer"], claim["ours"]]
        names = [textwrap.fill(claim["peer_name"], 28), "kafkalog"]
        bars = place.barh(names, figures, color=[_PEER, _OURS])
        place.bar_label(bars, [f"{each:,} {claim['unit']}" for each in figures], padding=3)
        place.set_title(text, fontsize=9)
        place.margins(x=0.3)
        place.set_xticks([])
        place.spines[["top", "right", "bottom"]].set_visible(False)
        place.tick_params(axis="y", length=0, labelsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _bar_title(claim: Mapping[str, Any]) -> str:
    """The claim, its ratio, and which bar has won: of rates and of what fits the longer one."""
    unit = claim["unit"]
    better = "longer" if unit.endswith("/s") or unit == "keys" else "shorter"
    text = f"{claim['claim']}: {claim['ratio']:,} {claim['ratio_is']} ({better} is better)"
    return textwrap.fill(text, _TITLE_WIDTH)
