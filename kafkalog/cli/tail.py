"""Prints the last records of each partition, and with -f those that follow, until Ctrl-C.

It counts records, where `read --start -N` counts offsets: a compacted topic has fewer of them.
"""

from __future__ import annotations

from typing import Final

import click

from kafkalog.cli import read
from kafkalog.cli.app.arguments import Member, readable_path_argument, topic_argument
from kafkalog.cli.terminal.output import Encoding

EXAMPLES: Final = (
    "kafkalog tail /data/shop stock",
    "kafkalog tail /data/shop stock -n 1 --json",
    "kafkalog tail /data/shop stock -n 2 --partition 0 --format '%p %o %k=%s\\n'",
)


@readable_path_argument
@topic_argument
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(min=0),
    default=10,
    metavar="N",
    help="Records per partition.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new records until Ctrl-C.")
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="All by default.")
@read.format_option
@click.option("--json", is_flag=True, help="One JSON object per record.")
@read.raw_option
@click.option(
    "--encoding", type=Member(Encoding), default=Encoding.UTF8.value, help="Of keys and values."
)
def command(
    path: str,
    topic: str,
    lines: int,
    follow: bool,
    partition: int | None,
    format: str | None,
    json: bool,
    raw: bool,
    encoding: Encoding,
) -> None:
    """Print the records."""
    if not lines and not follow:
        return
    read.command(
        path,
        topic,
        partition=partition,
        last=lines or None,
        follow=follow,
        format=format,
        json=json,
        raw=raw,
        encoding=encoding,
    )
