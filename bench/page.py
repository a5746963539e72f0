"""The page of the benchmarks: what the programs found, as a table and a chart each.

The figures are kept in docs/benchmarks.json; docs/benchmarks.md and docs/benchmarks/*.png are made
of them, and of remarks.toml, which says what a figure needs to be understood, a miss above all.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

PROGRAMS: Final = (
    "clean",
    "merge",
    "dedup",
    "growth",
    "codec",
    "spark_read",
    "spark_write",
    "latency",
    "idle",
    "cold_start",
    "view_latest",
    "table_view",
    "previous_value",
    "pushdown",
    "lookup",
    "commit",
    "staging",
    "open",
)
_ROOT: Final = Path(__file__).resolve().parent.parent
FIGURES: Final = _ROOT / "docs" / "benchmarks.json"
PAGE: Final = _ROOT / "docs" / "benchmarks.md"
CHARTS: Final = _ROOT / "docs" / "benchmarks"
REMARKS: Final = _ROOT / "bench" / "remarks.toml"
_PACKAGES: Final = ("pyspark", "pyarrow", "numba", "numpy", "aiokafka", "duckdb")
_OURS, _PEER = "#2563ab", "#b8bec7"


@dataclass(frozen=True, slots=True)
class Result:
    """What one program found: its claims, as it printed them, and where that was."""

    program: str
    command: str
    seconds: int
    machine: Mapping[str, str]
    claims: Sequence[Mapping[str, Any]]


class Results:
    """What all programs found."""

    def __init__(self, results: Sequence[Result] = ()) -> None:
        self._by_program = {result.program: result for result in results}

    @classmethod
    def load(cls) -> Results:
        """Read what was kept."""
        if not FIGURES.exists():
            return cls()
        return cls([Result(**one) for one in json.loads(FIGURES.read_text())])

    def __iter__(self) -> Iterator[Result]:
        return (self._by_program[name] for name in PROGRAMS if name in self._by_program)

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
        remarks = tomllib.loads(REMARKS.read_text())
        parts = [_HEAD, _summary(self)]
        for result in self:
            parts.append(_section(result, remarks.get(result.program, "")))
        return "\n".join(parts)

    def unexplained(self) -> list[str]:
        """Return the claims that miss their target in a program of which no remark speaks."""
        remarks = tomllib.loads(REMARKS.read_text())
        return [
            claim["claim"]
            for result in self
            for claim in result.claims
            if claim["is_met"] is False and result.program not in remarks
        ]


def machine() -> dict[str, str]:
    """Say where and with what a program ran."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    version = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": version.stdout.strip(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "system": f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def title(program: str) -> str:
    """Return the first line of what a program says of itself."""
    text = ast.get_docstring(ast.parse((_ROOT / "bench" / f"{program}.py").read_text()))
    assert text is not None
    return text.partition("\n")[0].rstrip(".")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- the page ------------------------------------------------------------------------------------

_HEAD: Final = """# Benchmarks

Every figure here was printed by a program in `bench/`, which ran kafkalog and its peer in turn on
the same data and checked that both did the same; the ratio is the median of the rounds. `make
bench` measures everything again and writes this page; `python -m bench NAME --write` does it for
one program. Times are of a machine that does nothing else. Memory is what the processes have
resident at most.
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
    return "\n".join(lines) + "\n"


def _section(result: Result, remark: str) -> str:
    lines = [
        f'## <a name="{result.program}"></a>{title(result.program)}\n',
        f"`{result.command}`: {result.seconds} s. {_where(result.machine)}\n",
        "| claim | kafkalog | peer | ratio | target | peak memory, MiB: ours, peer | besides |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(claim) for claim in result.claims]
    lines += ["", f"![{title(result.program)}](benchmarks/{result.program}.png)", ""]
    if remark:
        lines += [remark.strip(), ""]
    return "\n".join(lines)


def _where(seen: Mapping[str, str]) -> str:
    place = f"{seen['processor']}, {seen['memory']}, {seen['system']}"
    versions = ", ".join(f"{name} {seen[name]}" for name in _PACKAGES)
    return f"{place}; {versions}; {seen['date']}, commit {seen['commit']}."


def _row(claim: Mapping[str, Any]) -> str:
    target = claim["target"]
    if target:
        target = f"{target}: {'met' if claim['is_met'] else '**missed**'}"
    memory = [mib for mib in (claim["ours_mib"], claim["peer_mib"]) if mib is not None]
    more = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in claim["more"].items())
    cells = (
        claim["claim"],
        f"{claim['ours']:,} {claim['unit']}",
        f"{claim['peer']:,} {claim['unit']} ({claim['peer_name']})",
        f"{claim['ratio']:,} {claim['ratio_is']}",
        target,
        ", ".join(f"{mib:,.0f}" for mib in memory),
        more,
    )
    return "| " + " | ".join(cells) + " |"


def _draw(result: Result, path: Path) -> None:
    """One pair of bars for each claim, each with its own scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    count = len(result.claims)
    figure, places = plt.subplots(
        count, 1, figsize=(9, 0.4 + 0.95 * count), squeeze=False, layout="constrained"
    )
    for place, claim in zip(places[:, 0], result.claims, strict=True):
        figures = [claim["peer"], claim["ours"]]
        bars = place.barh([claim["peer_name"], "kafkalog"], figures, color=[_PEER, _OURS])
        place.bar_label(bars, [f"{figure:,} {claim['unit']}" for figure in figures], padding=3)
        place.set_title(f"{claim['claim']}: {claim['ratio']:,} {claim['ratio_is']}", fontsize=9)
        place.margins(x=0.3)
        place.set_xticks([])
        place.spines[["top", "right", "bottom"]].set_visible(False)
        place.tick_params(axis="y", length=0, labelsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)
