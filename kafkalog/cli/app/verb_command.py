"""A verb as click runs it: PATH from KAFKALOG_PATH, and a help with the names of its arguments.

With KAFKALOG_PATH set, a first argument is a PATH if it has a slash, or is `.` or `..`. Otherwise
PATH is left out, since no topic's name has a slash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import click

PATH_VARIABLE: Final = "KAFKALOG_PATH"


def examples(lines: Sequence[str]) -> str:
    """Return the last part of a help: commands as they are typed."""
    # click wraps a paragraph's lines, but for one that begins with this character.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


class VerbCommand(click.Command):
    """Adds a PATH that is left out, and a help with a section of arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections below the text."""
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            of_kind = (each for each in self.get_params(ctx) if isinstance(each, kind))
            if rows := [row for each in of_kind if (row := each.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Verbs(click.Group):
    """Lists its verbs in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs."""
        return [*self.commands]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; Ctrl-C raises click.Abort, without the empty line that click writes."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None
