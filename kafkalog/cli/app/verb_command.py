"""A verb as typer runs it: PATH from KAFKALOG_PATH, and a help with the names of its arguments.

With KAFKALOG_PATH set, a first argument is a PATH if it has a slash, or is `.` or `..`. Otherwise
PATH is left out, since no topic's name has a slash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from typer.core import TyperCommand

PATH_VARIABLE: Final = "KAFKALOG_PATH"


def examples(lines: Sequence[str]) -> str:
    """Return the last part of a help: commands as they are typed."""
    # typer wraps a paragraph's lines, but for one that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


class VerbCommand(TyperCommand):
    """Adds a PATH that is left out.

    The help leaves out the Python types that some releases of typer put behind an argument.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the PATH of the environment before them if they have none."""
        path = os.environ.get(PATH_VARIABLE)
        first = next((p for p in self.params if p.param_type_name == "argument"), None)
        if path and first is not None and first.name == "path" and not first.envvar:
            options, *_ = self.make_parser(ctx).parse_args(args=list(args))
            given = options.get("path")
            is_path = isinstance(given, str) and ("/" in given or given in (".", ".."))
            if not is_path and not {"--help", "-h"} & {*args}:
                args = [path, *args]
        return super().parse_args(ctx, args)

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
