"""Takes over a stopped Kafka broker's log directory, to write and clean it here.

No broker starts on the directory until `kafkalog release` gives it back. If a run was interrupted,
repeat it and it continues. If neither --config nor the broker's metadata gives a topic's
cleanup.policy, kafkalog neither cleans it nor deletes from it until `topics alter` sets one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from kafkalog.cli.app.arguments import path_argument, topic_configs_option
from kafkalog.cli.terminal.config_text import topic_configs
from kafkalog.cli.terminal.output import (
    counted,
    json_row,
    note,
    print_json,
    print_line,
    share_progress,
)

EXAMPLES: Final = (
    "kafkalog adopt /data/kafka-logs",
    "kafkalog adopt /data/kafka-logs --config '*:cleanup.policy=compact' --json",
)


@path_argument
@topic_configs_option
@click.option(
    "--metadata",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The broker's metadata.log.dir, if it is another one.",
)
@click.option("--json", is_flag=True, help="The report as a JSON object.")
def command(path: str, config: tuple[str, ...], metadata: Path | None, json: bool) -> None:
    """Adopt, and print what was done."""
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.metadata.address import local_path
    from kafkalog.storage_engine.ownership import adopt as adopts

    given = topic_configs(config)
    with share_progress("adopting") as show:
        report = adopts.adopt(
            local_path(path),
            config=given,
            metadata=metadata,
            now_ms=clock.now_ms(),
            progress=lambda _, done, of: show(done, of),
        )
    for line in (*report.damage, *report.notices):
        note(line)
    if json:
        print_json(
            {
                "path": str(report.root),
                **json_row(report, "adopted_already", "topics", "partitions", "was_clean"),
                **json_row(report, "damage", "notices"),
            }
        )
        return
    word = "is kafkalog's already" if report.adopted_already else "is adopted"
    topics, partitions = counted(len(report.topics), "topic"), report.partitions
    print_line(f"{report.root} {word}: {topics}, {counted(partitions, 'partition')}")
