"""The arguments that most verbs have: the path of a log, and a topic with its completion.

typer completes verbs, options and choices, and writes the scripts for shells: `kafkalog
--install-completion`.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from kafkalog.storage_engine.fs import files

TOPIC_HELP: Final = "A topic's name."


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin with `incomplete`; none if the log cannot be read."""
    from kafkalog.cli.app.opened import open_readable
    from kafkalog.errors import KafkaLogError

    # While an option's value is typed, typer has not parsed the arguments yet.
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


LogPath: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="A log's directory, or its URL in an object store; by default KAFKALOG_PATH.",
    ),
]
"""A log of kafkalog."""
ReadablePath: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="A log's directory, or its URL; those of one broker with commas between; by default "
        "KAFKALOG_PATH.",
    ),
]
"""A log of kafkalog, or the directories of a broker."""
TopicConfigs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="TOPIC:NAME=VALUE",
        help="A config that a broker's topic has; * for all topics; repeatable.",
    ),
]
"""What a broker's directory may not say; `topic_configs` parses it."""
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
