"""A verb as typer runs it, with a help that shows only the names of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


def examples(lines: Sequence[str]) -> str:
    """Return the last part of a help: commands as they are typed."""
    # typer wraps a paragraph's lines, but for one that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


class VerbCommand(TyperCommand):
    """Leaves out the Python types that some releases of typer put behind an argument."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections below the text."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append((row[0].partition(" <")[0], row[1]))
            else:
                sections["Options"].append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
