"""Write docs/reliability.md, and two pages beside it: what was broken, how, and what was found.

The pages are made from the counts in docs/reliability.json, the docstrings of the programs, the
table of old bugs, and found.toml, which lists the faults that were found.
"""

from __future__ import annotations

import ast
import json
import subprocess
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench import page as benchmarks
from tests.old_bugs import OLD_BUGS, SWITCH

__all__ = ["PROGRAMS", "UNASKED", "Result", "Results", "machine"]

PROGRAMS: Final = (
    "crash_states",
    "failed_calls",
    "full_disk",
    "store_requests",
    "power_cuts",
    "kills",
    "spark_kills",
    "damage",
    "fuzz",
    "model",
    "twin",
)
UNASKED: Final = ("power_cuts", "spark_kills")
"""What nobody expects of a quick run: to mount file systems, and to start Spark for minutes."""
_HERE: Final = Path(__file__).resolve().parent
DOCS: Final = _HERE.parent.parent / "docs"
COUNTS: Final = DOCS / "reliability.json"
PAGE: Final = "reliability.md"
PAGE_OF_PROGRAMS: Final = "reliability-programs.md"
PAGE_OF_FINDINGS: Final = "reliability-findings.md"
FOUND: Final = _HERE / "found.toml"
_PLACE: Final = ("processor", "memory", "system")


@dataclass(frozen=True, slots=True)
class Result:
    """What a program counted, and where that was."""

    program: str
    counts: Sequence[Mapping[str, Any]]
    machine: Mapping[str, str]
    skipped: str = ""
    """When a later run could not try it again, and why."""


class Results:
    """What all programs counted."""

    def __init__(self, results: Sequence[Result] = ()) -> None:
        self._by_program = {result.program: result for result in results}

    @classmethod
    def load(cls) -> Results:
        """Read what was kept."""
        if not COUNTS.exists():
            return cls()
        return cls([Result(**one) for one in json.loads(COUNTS.read_text())])

    def __iter__(self) -> Iterator[Result]:
        return (self._by_program[name] for name in PROGRAMS if name in self._by_program)

    def add(
        self, program: str, counts: Sequence[Mapping[str, Any]], machine: Mapping[str, str]
    ) -> None:
        """Take what a program counted in place of what it counted before.

        What could not be tried leaves what was counted before, and is said beside it.
        """
        reasons = [count["skipped"] for count in counts if count.get("skipped")]
        if not reasons:
            self._by_program[program] = Result(program, counts, machine)
            return
        before = self._by_program.get(program, Result(program, counts, machine))
        told = f"skipped on {machine['date']} ({machine['commit']}): {'; '.join(reasons)}"
        self._by_program[program] = replace(before, skipped=told)

    def save(self) -> None:
        """Keep it."""
        COUNTS.write_text(json.dumps([asdict(result) for result in self], indent=1) + "\n")

    def render(self) -> None:
        """Write the pages."""
        for name, text in self.pages().items():
            (DOCS / name).write_text(text)

    def pages(self) -> Mapping[str, str]:
        """Return the pages by the names of their files."""
        sections = [_section(name) for name in PROGRAMS]
        rows = [row for result in self for row in _rows(result)]
        return {
            PAGE: "\n".join([_HEAD, *rows, "", *_summary(), *_limits()]),
            PAGE_OF_PROGRAMS: "\n".join([_HEAD_OF_PROGRAMS, *sections])[:-1],
            PAGE_OF_FINDINGS: "\n".join([_HEAD_OF_FINDINGS, *_found(), *_old_bugs()]),
        }


def machine() -> dict[str, str]:
    """Say when, where and with what a program ran."""
    seen = benchmarks.machine(Path(tempfile.gettempdir()))
    return {name: seen[name] for name in ("date", "commit", *_PLACE)} | {"library": _library()}


def _library() -> str:
    """Return git's name of the library's directory, and whether its files are others now."""
    name = _git("rev-parse", "--short=10", "HEAD:kafkalog").stdout.strip()
    is_changed = _git("diff", "--quiet", "HEAD", "--", "../../kafkalog").returncode
    return (name or "unknown") + (", changed" if is_changed else "")


def _git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=_HERE, capture_output=True, text=True, check=False)


def _rows(result: Result) -> Iterator[str]:
    for count in result.counts:
        more = [f"{name.replace('_', ' ')} {told}" for name, told in count["more"].items()]
        more += [f"**{result.skipped}**"] if result.skipped else []
        cells = (
            count["what"],
            f"{count['count']:,}",
            f"{count['target']:,}" if count["target"] else "",
            f"{count['violations']:,}",
            str(count["seed"]),
            f"{round(count['seconds']):,} s",
            "; ".join(more),
            f"`{result.program}`, {result.machine['date']}, {result.machine['commit']}, "
            f"{result.machine['library']}",
        )
        yield f"| {' | '.join(cells)} |"


def _docstring(program: str) -> tuple[str, str]:
    """Return the first line of what a program says of itself, and the rest."""
    text = ast.get_docstring(ast.parse((_HERE / f"{program}.py").read_text()))
    assert text is not None
    title, _, rest = text.partition("\n")
    return title, rest


def _section(program: str) -> str:
    title, rest = _docstring(program)
    told = "\n".join(line if line.startswith("    ") else line.strip() for line in rest.split("\n"))
    return f"## {program}\n\n{title}\n{told}\n"


def _summary() -> Iterator[str]:
    """Yield what each program does, in a sentence, and how much was found by whom."""
    yield "## How it was tried\n"
    for name in PROGRAMS:
        yield _item(f"- [{name}]({PAGE_OF_PROGRAMS}#{name}): {_docstring(name)[0]}")
    found = tomllib.loads(FOUND.read_text())["found"]
    by = Counter(one["by"] for one in found)
    told = ", ".join(f"{name} {count}" for name, count in by.most_common())
    yield "\n## Faults found\n"
    yield _filled(
        f"{len(found)} faults were found and mended, each with a test. Their finders: {told}. "
        f"They are listed in [{PAGE_OF_FINDINGS}]({PAGE_OF_FINDINGS}). That page also lists "
        f"{len(OLD_BUGS)} old bugs. The test tests/torture/test_old_bugs.py brings each of them "
        "back, and fails unless the tests of the bug catch it; CI runs it."
    )
    yield ""


def _limits() -> Iterator[str]:
    yield "## Claims not proved\n"
    for text in _NOT_PROVED:
        yield _item(f"- {text}")
    yield ""


def _old_bugs() -> Iterator[str]:
    yield "## Old bugs\n"
    told = (
        f"A switch brings {len(OLD_BUGS)} old bugs back, one at a time, and a test holds that the "
        "tests of each bug fail then. The table [tests/old_bugs.py](../tests/old_bugs.py) names "
        f"these tests. One of them runs with `{SWITCH}=NAME .venv/bin/python -m pytest TEST`."
    )
    yield f"{_filled(told)}\n"
    for bug in OLD_BUGS:
        yield _item(f"- **{bug.name}**: {bug.fault}")
    yield ""


def _found() -> Iterator[str]:
    found = tomllib.loads(FOUND.read_text())["found"]
    yield "## Faults found and fixed\n"
    yield (
        "Each item names its finder, and has a test. The finder is a program or one of three\n"
        "others. Tests of full disks, few descriptors and jumping clocks are *limits*. The switch\n"
        "below is *old bugs*. A reader who tried to break the code is *review*.\n"
    )
    for one in found:
        yield _item(f"- **{one['by']}**: {' '.join(one['what'].split())}")
    yield ""


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


_HEAD: Final = """# Reliability

kafkalog promises four things. After any crash, all acknowledged records are there. A commit that
was not acknowledged is there as a whole or not at all. A streaming query, or its upsert, writes
each micro-batch once, however often it dies. Bad bytes raise an error and never give a wrong
record.

This page says how these promises were tested, and how often. `make torture` runs all programs,
which takes hours. Power cuts and full disks need root. `make torture-quick` runs a sample in
minutes. Both need a checkout with `make setup` done. A row is repeated with
`.venv/bin/python -m tests.torture.PROGRAM --seed SEED`.

A full run fails if it tries less than the named minimum. If the machine cannot run a program at
all, the end names it as skipped. The seed determines the draws. It does not determine the moments
of kills and power cuts, which depend on processes and a real clock. A violation names the command
that repeats it alone. Many tests of the suite also kill processes, cut power and flip bytes; they
are not counted here.

Two rows try all places. Each file of each kind is cut at each byte, and two bits of each byte are
flipped. Each request of each operation on an object store is killed, and fails in each way; its
pairs of operations are drawn. The fuzzer has an hour of a processor for all decoders together.

A damaged log is *whole* if it reads as before. It is *refused* if an error names the damage, or a
notice of the adoption does. It is *short* if it reads as if it ended earlier. That may be a
broker's log, whose gaps nobody has listed, and a log in a store whose last commit is missing. It is
*shifted* if a batch has the offsets of a gap next to it, because no checksum covers
them.

Some words of the table: An operation *in doubt* has ended without knowing whether its commit is
there. A *killed-before* request was not sent, and the answer of a *killed-after* one was not read.
The store does what was asked and answers 500 for *500-done*. A plain kernel runs as Python, where
the same input may raise an error that the compiled one does not.

The last column has the commit, and git's name of the library's directory at that commit. Rows with
one name there tried the same library.

| what | tried | at least | violations | seed | took | of which | program, date, commit, library |
|---|---|---|---|---|---|---|---|"""
_HEAD_OF_PROGRAMS: Final = """# Reliability: the programs

This page says what each program does. How often each ran is in [reliability.md](reliability.md).
"""
_HEAD_OF_FINDINGS: Final = """# Reliability: faults found

These are the faults. For what was tried, see [reliability.md](reliability.md).
"""
_NOT_PROVED: Final = (
    "The disk of `crash_states` and `power_cuts` keeps its promise: a sync that returns has made "
    "the bytes durable. A disk that lies about a sync can lose acknowledged records.",
    "A disk writes a sector of 512 bytes as a whole, and a death leaves no part of one. The "
    "journal's published end has 36 bytes of one sector.",
    "ext4 is the one file system whose power cuts were tried, without its fast commits. Those of "
    "`crash_states` hold for any file system that keeps what POSIX promises.",
    "A power cut is tried after one death, after two deaths, and after a failed sync. A failing "
    "call is tried before and after a death. In a store, a death is tried next to a stopped "
    "process. Other combinations of faults are not tried.",
    "A store in memory answers `store_requests`. Commits and micro-batches were also tried with a "
    "server that speaks S3, and no cloud's own service.",
    "The moments of `kills` and `spark_kills` are those of a real clock, so no run may meet a "
    "fault that needs an exact place.",
    "If the last commit of a log in an object store is missing, the log reads as before it. No "
    "other object tells that it was there.",
    "A commit trusts the segments that its process left open, as long as their inodes, sizes, "
    "state and configs are the same. Bytes that somebody changes there in place, past the locks, "
    "are not noticed by a commit. A read meets the checksum; `kafkalog verify` names the place.",
    "A read with `view=latest` trusts the first dirty offset that our own cleaner has recorded. It "
    "reads a log that is clean up to there once, and compares no keys.",
    "No checksum covers a batch's leader epoch. A lookup by time returns it as it is, as Kafka's "
    "does.",
    "A full disk is tried with an upsert into SQLite, whose tables are files of the same host. A "
    "database server's full disk is that server's matter: its error fails the micro-batch.",
    "Fuzzing can find a fault. It cannot show that no fault is left.",
)
