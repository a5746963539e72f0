"""The arguments and options that several verbs have: the path of a log, a topic, its completion.

click completes verbs, options and choices, and writes the scripts for shells.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, TypeVar

import click

from kafkalog.storage_engine.fs import files

TOPIC_HELP: Final = "A topic's name."

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Member(click.Choice[str]):
    """The values of an enumeration, which the verb receives as its members."""

    def __init__(self, members: type[StrEnum]) -> None:
        super().__init__([member.value for member in members])
        self._members = members

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> StrEnum:
        """Return the member with a value."""
        return self._members(super().convert(value, param, ctx))


class _Argument(click.Argument):
    """An argument with a line in the help, which click's own lacks."""

    def __init__(self, *names: Any, help: str, show_default: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self._help, self._default = help, show_default

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the name as the usage has it: `PATH`, `[TOPIC]`, `FILE...`."""
        name = self.metavar or self.human_readable_name
        return f"{name if self.required else f'[{name}]'}{'...' if self.nargs == -1 else ''}"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the name and the line."""
        notes = [f"env var: {self.envvar}"] if self.envvar else []
        notes += [f"default: ({self._default})"] if self._default else []
        notes += ["required"] if self.required else []
        name = self.make_metavar(ctx) if self.nargs == -1 else self.metavar
        return name or "", f"{self._help}  [{'; '.join(notes)}]" if notes else self._help


def argument(name: str, *, help: str, **settings: Any) -> Callable[[_Function], _Function]:
    """Return the decorator that adds an argument; `settings` are those of click.Argument."""
    return click.argument(name, cls=_Argument, help=help, **settings)


def topic_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics that begin with `incomplete`; none if the log cannot be read."""
    from kafkalog.cli.app.opened import open_readable
    from kafkalog.errors import KafkaLogError

    # While an option's value is typed, click has not parsed the arguments yet.
    given = context.params
    path = given.get("path") or given.get("source") or next(iter(context.args), None)
    if path is None:
        return []
    try:
        with open_readable(str(path)) as log:
            return [name for name in log.topics() if name.startswith(incomplete)]
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
        return []


path_argument = argument(
    "path",
    metavar="PATH",
    help="A log's directory, or its URL in an object store; by default KAFKALOG_PATH.",
)
"""A log of kafkalog."""
readable_path_argument = argument(
    "path",
    metavar="PATH",
    help="A log's directory, or its URL; those of a cluster's brokers with commas between; by "
    "default KAFKALOG_PATH.",
)
"""A log of kafkalog, or the directories of brokers."""
topic_configs_option = click.option(
    "--config",
    multiple=True,
    metavar="TOPIC:NAME=VALUE",
    help="A config that a broker's topic has; * for all topics; repeatable.",
)
"""What a broker's directory may not say; `topic_configs` parses it."""
topic_argument = argument("topic", metavar="TOPIC", shell_complete=topic_names, help=TOPIC_HELP)
any_topic_argument = argument(
    "topic",
    required=False,
    metavar="TOPIC",
    show_default="all",
    shell_complete=topic_names,
    help=TOPIC_HELP,
)
"""A topic; all topics if it is left out (None)."""
