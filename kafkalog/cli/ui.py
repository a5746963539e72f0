"""Serves a picture of the log on this machine: what is clean, what is not, and why.

It shows each partition's segments to scale, their share of obsolete records, the dirty ratio and
its threshold, the cleanings, and the findings of `explain`. A table has a partition's records, a
page at a time. It follows the log. Nothing is written. Only this machine gets an answer
(127.0.0.1), and only who has the token in the address that is printed. The server counts obsolete
records by reading the log in the background; --no-count leaves that out.

For a log in an object store it shows the objects of each partition, those that no cleaner has
regrouped yet, amplification, requests and their price. Every two seconds it asks for the newest
commit, which is one request. Obsolete records are not counted there: that reads every object.

`kafkalog status PATH --html FILE` writes the same page, without records, as a file.
"""

from __future__ import annotations

from typing import Final

import click

from kafkalog.cli.app.arguments import readable_path_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.app.stop_signals import stop_signals
from kafkalog.cli.terminal.output import note, print_line

EXAMPLES: Final = ("kafkalog ui /data/shop", "kafkalog ui /data/shop --port 0 --no-count")
_PORT: Final = 8686


@readable_path_argument
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=_PORT,
    metavar="N",
    help="Of 127.0.0.1; 0 for any free port.",
)
@click.option(
    "--count/--no-count",
    default=None,
    show_default="count in a directory",
    help="Whether obsolete bytes are counted.",
)
def command(path: str, port: int, count: bool | None) -> None:
    """Serve the picture until a signal ends it."""
    from kafkalog.cli.picture.counts import is_counting
    from kafkalog.cli.picture.server import serving

    counts_obsolete = is_counting(path, count)
    with stop_signals() as stop, open_readable(path) as log:
        log.state()  # an unreadable log fails here, not on the page
        with serving(path, log, port, counts_obsolete=counts_obsolete) as served:
            print_line(served.address)
            note(f"{path}: the picture is served; Ctrl-C ends it")
            stop.wait()
