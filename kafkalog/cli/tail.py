"""Prints the last records of each partition, and with -f those that follow, until Ctrl-C.

It counts offsets, as `read --start -N` does. A compacted topic may have fewer records at them.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kafkalog.cli import read
from kafkalog.cli.app.arguments import ReadablePath, Topic
from kafkalog.cli.terminal.output import Encoding

EXAMPLES: Final = (
    "kafkalog tail /data/shop stock",
    "kafkalog tail /data/shop stock -n 1 --json",
    "kafkalog tail /data/shop stock -n 2 --partition 0 --format '%p %o %k=%s\\n'",
)


def command(
    path: ReadablePath,
    topic: Topic,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="N", help="Offsets per partition.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")
    ] = False,
    partition: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="All by default.")
    ] = None,
    format: read.Format = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per record.")] = False,
    raw: read.Raw = False,
    encoding: Annotated[Encoding, typer.Option(help="Of keys and values.")] = Encoding.UTF8,
) -> None:
    """Print the records."""
    if not lines and not follow:
        return
    read.command(
        path,
        topic,
        partition=partition,
        start=-lines if lines else None,
        follow=follow,
        format=format,
        json=json,
        raw=raw,
        encoding=encoding,
    )
