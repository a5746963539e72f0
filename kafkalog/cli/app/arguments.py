"""The arguments that most verbs have: the path of a log, and a topic."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from kafkalog.cli.app.completion import topic_names
from kafkalog.cli.terminal.output import LOG_HELP, PATH_HELP, TOPIC_HELP

__all__ = ["AnyTopic", "LogPath", "ReadablePath", "Topic"]

LogPath: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", show_default=False, help=LOG_HELP)
]
"""A log of kafkalog."""
ReadablePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", show_default=False, help=PATH_HELP)
]
"""A log of kafkalog, or the directories of a broker."""
Topic: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", show_default=False, help=TOPIC_HELP, autocompletion=topic_names
    ),
]
AnyTopic: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="TOPIC", show_default="all", help=TOPIC_HELP, autocompletion=topic_names
    ),
]
"""A topic; all topics if it is left out (None)."""
