"""What a shell is told of a half-typed word: the topics of the log whose path was typed before.

Verbs, options and their choices are completed by typer, which also writes the shells' scripts:
`kafkalog --install-completion`.
"""

from __future__ import annotations

import typer

__all__ = ["topic_names"]


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin so; none where no log is read, as nobody sees an error there."""
    from kafkalog.cli.app.readable import open_readable
    from kafkalog.errors import KafkaLogError

    # Before an option's value, which is what is typed, typer has not come to the arguments.
    path = context.params.get("path") or next(iter(context.args), None)
    if path is None:
        return []
    try:
        with open_readable(str(path)) as log:
            return [name for name in log.topics() if name.startswith(incomplete)]
    except (OSError, KafkaLogError):
        return []
