"""Gives a log directory to a Kafka broker, in the state of a clean shutdown.

A broker sets aside a directory whose topic id its cluster does not know. Create the topics there
first, and name their ids with --topic-ids. The file has a topic and its id on each line, or is the
output of `kafka-topics --describe`. If a run was interrupted, repeat it and it continues.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from kafkalog.cli.app.arguments import path_argument
from kafkalog.cli.terminal.output import (
    check_input,
    counted,
    json_row,
    note,
    print_json,
    print_line,
    share_progress,
)
from kafkalog.storage_engine.fs import files

EXAMPLES: Final = (
    "kafkalog release /data/kafka-logs",
    "kafkalog release /data/kafka-logs --topic-ids ids.txt --json",
)
_DESCRIBED = re.compile(r"\bTopic:\s*(\S+)\s+TopicId:\s*(\S+)")


@path_argument
@click.option(
    "--topic-ids",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The topic ids of the broker's cluster.",
)
@click.option(
    "--meta-properties",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="meta.properties of the directory that this one replaces.",
)
@click.option("--json", is_flag=True, help="The report as a JSON object.")
def command(path: str, topic_ids: Path | None, meta_properties: Path | None, json: bool) -> None:
    """Release, and print what was done."""
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.metadata.address import local_path
    from kafkalog.storage_engine.ownership import release as releases

    ids = None if topic_ids is None else _read_ids(topic_ids)
    with share_progress("releasing") as show:
        report = releases.release(
            local_path(path),
            topic_ids=ids,
            meta_properties=meta_properties,
            now_ms=clock.now_ms(),
            progress=lambda _, done, of: show(done, of),
        )
    for line in report.notices:
        note(line)
    if json:
        print_json(
            {
                "path": str(report.root),
                **json_row(report, "released_already", "partitions", "has_broker", "notices"),
            }
        )
        return
    if report.released_already:
        print_line(f"{report.root} is a broker's already")
    else:
        print_line(f"{report.root} is released: {counted(report.partitions, 'partition')}")


def _read_ids(path: Path) -> dict[str, str]:
    """Return the ids of a file; raises InvalidInputError for a wrong line or a second id."""
    from kafkalog.errors import InvalidInputError

    check_input(path)
    found: dict[str, str] = {}
    try:
        with files.open_stream(path) as stream:
            lines = stream.read().decode().splitlines()
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path}: expected a text file of topics and ids") from None
    is_described = any(_DESCRIBED.search(line) for line in lines)
    for number, line in enumerate(lines, 1):
        described = _DESCRIBED.search(line)
        if described is not None:
            topic, topic_id = described[1], described[2]
        elif line.strip() and not line.startswith("#") and not is_described:
            tokens = line.replace("=", " ").split()
            if len(tokens) != 2:
                raise InvalidInputError(
                    f"{path}: line {number}: expected a topic and its id, found {line[:60]!r}"
                )
            topic, topic_id = tokens
        else:
            continue
        if found.setdefault(topic, topic_id) != topic_id:
            raise InvalidInputError(f"{path}: line {number}: a second id for topic {topic!r}")
    if not found:
        raise InvalidInputError(f"{path}: expected topics and their ids, found none")
    return found
