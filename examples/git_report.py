"""The report of the demo: figures, and both tables compared with git's own."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from examples.git_history import Entry

__all__ = ["Comparison", "compare", "report"]

DIFFERENCES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table compared with git's own."""

    name: str
    paths: int
    missing: list[str]
    extra: list[str]
    different: list[str]

    @property
    def is_identical(self) -> bool:
        """Whether the table holds exactly git's paths, each with git's mode and object."""
        return not (self.missing or self.extra or self.different)


def compare(name: str, table: dict[bytes, Entry], expected: dict[bytes, Entry]) -> Comparison:
    """Compare a table with `git ls-tree -r HEAD`."""
    common = table.keys() & expected.keys()
    return Comparison(
        name,
        len(table),
        missing=show(expected.keys() - table.keys()),
        extra=show(table.keys() - expected.keys()),
        different=show({path for path in common if table[path] != expected[path]}),
    )


def show(paths: set[bytes]) -> list[str]:
    """Return paths as texts that a terminal can show."""
    return sorted(repr(os.fsdecode(path)) for path in paths)


def report(
    console: Console,
    repository: Path,
    figures: dict[str, Any],
    expected: dict[bytes, Entry],
    comparisons: list[Comparison],
) -> dict[str, Any]:
    """Print the figures and comparisons; return them too."""
    background = figures["background"]
    transactions = figures["transactions"]
    before, after = figures["bytes_before"], figures["bytes_after"]
    lines = {
        "repository": f"{repository}: {figures['commits']:,} commits, {len(expected):,} paths",
        "written": f"{figures['records_written']:,} records ({figures['upserts']:,} upserts, "
        f"{figures['deletes']:,} deletes) in {figures['batches']} micro-batches, "
        f"{figures['seconds']} s with the follower",
        "between": f"{transactions['committed']} transactions that were committed, "
        f"{transactions['aborted']} aborted ones with wrong values",
        "cleaned": f"{background['cleanings']} cleanings in the background while it streamed "
        f"removed {background['records_removed']:,} records; then "
        f"{figures['forced_cleanings']} forced ones the rest",
        "kept": f"{figures['records_kept']:,} records",
        "segments": f"{figures['segments_after_background']} after the stream, "
        f"{figures['segments_after']} at the end",
        "bytes": f"{before:,} before, {figures['bytes_after_background']:,} after the stream, "
        f"{after:,} at the end",
        "dirty ratio": f"{figures['dirty_ratio_before']} after the stream, "
        f"{figures['dirty_ratio_after']} at the end",
    }
    for name, line in lines.items():
        print_line(console, name, line)
    for comparison in comparisons:
        print_line(
            console,
            comparison.name,
            f"{comparison.paths:,} paths; next to git ls-tree -r HEAD: "
            f"{len(comparison.missing)} missing, {len(comparison.extra)} extra, "
            f"{len(comparison.different)} different",
        )
    for comparison in comparisons:
        for kind in ("missing", "extra", "different"):
            for path in getattr(comparison, kind)[:DIFFERENCES_SHOWN]:
                print_line(console, comparison.name, f"{kind}: {path}")
    print_line(console, "picture", f"{figures['picture']}, with the history of cleanings")
    print_line(console, "next", "try these; the log and its picture stay until you remove them")
    for command in next_steps(figures["log"]):
        print_line(console, "", command)
    is_identical = all(comparison.is_identical for comparison in comparisons)
    console.print("identical" if is_identical else "DIFFERENT", highlight=False)
    return {
        "repository": str(repository),
        "paths": len(expected),
        **figures,
        "next": next_steps(figures["log"]),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "identical": is_identical,
    }


def next_steps(log_path: str) -> list[str]:
    """Return commands to try on the log, for a shell in this directory; Ctrl-C ends the last."""
    program = Path(sys.executable).with_name("kafkalog")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    commands = (
        ("read", log_path, "git", "--latest", "--limit", "3"),
        ("verify", log_path, "--deep"),
        ("ui", log_path, "--port", "0"),
    )
    return [shlex.join([str(program), *words]) for words in commands]


def print_line(console: Console, name: str, line: str) -> None:
    """Print one line of the report."""
    console.print(f"{name:<12} {line}", markup=False, highlight=False, soft_wrap=True)
