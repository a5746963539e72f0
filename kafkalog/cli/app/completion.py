"""Shell completion of a half-typed topic, from the log whose path was typed before.

typer completes verbs, options and choices, and writes the scripts for shells: `kafkalog
--install-completion`.
"""

from __future__ import annotations

import typer


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin with `incomplete`; none if the log cannot be read."""
    from kafkalog.cli.app.opened import open_readable
    from kafkalog.errors import KafkaLogError

    # While an option's value is typed, typer has not parsed the arguments yet.
    path = context.params.get("path") or next(iter(context.args), None)
    if path is None:
        return []
    try:
        with open_readable(str(path)) as log:
            return [name for name in log.topics() if name.startswith(incomplete)]
    except (OSError, KafkaLogError):
        return []
