"""Lets a partition begin at an offset: the records before it are gone for every reader.

The topic's cleanup.policy must have delete. The files of segments that lie wholly before the offset
go at the next retention. A partition never begins earlier than it did.
"""

from __future__ import annotations

from typing import Final

import click

from kafkalog.cli.app.arguments import path_argument, topic_argument
from kafkalog.cli.app.opened import open_writable
from kafkalog.cli.terminal.output import print_json, print_line
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.metadata.log_change import HIGH_WATERMARK

EXAMPLES: Final = (
    "kafkalog delete-records /data/shop views --partition 0 --before 1",
    "kafkalog delete-records /data/shop views --before -1 --json",
)


@path_argument
@topic_argument
@click.option(
    "--before",
    type=click.IntRange(min=HIGH_WATERMARK),
    required=True,
    metavar="OFFSET",
    help="The first offset that stays; -1 for none of the present ones.",
)
@click.option(
    "--partition",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --before -1 it is all by default.",
)
@click.option("--json", is_flag=True, help="One JSON object per partition.")
def command(path: str, topic: str, before: int, partition: int | None, json: bool) -> None:
    """Delete the records, and print where each partition begins."""
    if partition is None and before != HIGH_WATERMARK:
        raise InvalidInputError("--before is an offset of one --partition: name it")
    with open_writable(path) as log:
        for number in sorted(log.offsets(topic)) if partition is None else [partition]:
            start = log.delete_records(topic, number, before)
            if json:
                print_json({"topic": topic, "partition": number, "logStartOffset": start})
            else:
                print_line(f"{topic}-{number} begins at offset {start}")
