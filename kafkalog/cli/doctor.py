"""Checks what Spark and a log need here, and says what to do.

It checks Java, Python, Spark's release, the Python that Spark's workers run (PYSPARK_PYTHON, else
python3), limits of memory, and whether the kernels are compiled. With a PATH, or KAFKALOG_PATH, it
also checks the locks of the file system there.

The exit status is 0 if nothing is wrong, and 1 otherwise. Advice alone does not change it. It reads
the environment and starts no session of Spark: settings made in a program are not seen.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import argument
from kafkalog.cli.terminal.colours import Style, styled
from kafkalog.cli.terminal.output import print_json, print_line
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cli.environment.check import Check

EXAMPLES: Final = ("kafkalog doctor /data/shop", "kafkalog doctor --json")
_STYLES: Final[dict[str, Style]] = {"fine": "green", "advice": "yellow", "wrong": "red"}


@argument(
    "path",
    required=False,
    metavar="PATH",
    envvar="KAFKALOG_PATH",
    help="A log's directory, or its URL.",
)
@click.option("--json", is_flag=True, help="One JSON object per check.")
def command(path: str | None, json: bool) -> int:
    """Print the checks; return 1 if something is wrong."""
    status = 0
    for check in _checks(path):
        if check.state == "wrong":
            status = 1
        if json:
            print_json(
                {
                    "check": check.name,
                    "state": check.state,
                    "found": check.found,
                    "advice": check.advice,
                }
            )
            continue
        state = styled(f"{check.state:<6}", _STYLES[check.state], sys.stdout)
        print_line(f"  {check.name:<13}  {check.found}", begin=state)
        if check.advice is not None:
            print_line(f"{'':<23}{check.advice}")
    return status


def _checks(path: str | None) -> Iterator[Check]:
    from kafkalog.cli.environment.file_locks import check_locks
    from kafkalog.cli.environment.java import check_java
    from kafkalog.cli.environment.memory import check_memory
    from kafkalog.cli.environment.object_store import check_store
    from kafkalog.cli.environment.python import (
        check_kernels,
        check_python,
        check_spark,
        check_workers_python,
    )
    from kafkalog.storage_engine.metadata import address
    from kafkalog.storage_engine.object_store.address import is_store_url

    is_store = path is not None and is_store_url(path)
    directories = [] if path is None or is_store else address.directories(path)
    for directory in directories:
        if not directory.exists():
            raise InvalidInputError(f"{directory}: no such directory; make it, or name its parent")
    yield check_java(os.environ)
    yield check_python()
    yield check_spark()
    yield check_workers_python(os.environ)
    yield check_kernels()
    yield from check_memory(os.environ)
    for directory in directories:
        yield check_locks(directory)
    if path is not None and is_store:
        yield check_store(path)
