"""The arguments that most verbs have: the path of a log, and a topic."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from kafkalog.cli.app.completion import topic_names

TOPIC_HELP: Final = "A topic's name."

LogPath: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", show_default=False, help="A log's directory.")
]
"""A log of kafkalog."""
ReadablePath: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="A log's directory; those of one broker with commas between.",
    ),
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
