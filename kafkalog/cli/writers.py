"""Lists the writers of a log with their last committed batches, or forgets one.

A writer is a streaming query, a name given to kafkalog.sink.Append, or a txnAppId. Its last batch
id lets the log skip a batch that comes again.

--forget ID removes that memory, in one commit. The writer's next batch is then appended, even if
the log has it already or it is older. Use it for a query whose checkpoint was lost or restored. A
writer that is silent for 30 days is forgotten by itself.
"""

from __future__ import annotations

from typing import Final

import click

from kafkalog.cli.app.arguments import path_argument, topic_names
from kafkalog.cli.app.opened import open_readable, open_writable
from kafkalog.cli.status import print_writers
from kafkalog.cli.status_rows import writer_row, writer_rows
from kafkalog.cli.terminal.output import counted, note, print_json, print_line

EXAMPLES: Final = (
    "kafkalog writers /data/shop",
    "kafkalog writers /data/shop --topic stock --json",
    "kafkalog writers /data/shop --forget nightly --topic stock",
)


@path_argument
@click.option("--forget", metavar="ID", help="Forget this writer's last batch.")
@click.option(
    "--topic",
    metavar="TOPIC",
    shell_complete=topic_names,
    help="The writer's topic, or * if its rows name theirs; all by default.",
)
@click.option("--json", is_flag=True, help="One JSON object per writer.")
def command(path: str, forget: str | None, topic: str | None, json: bool) -> None:
    """Print the writers, or those that were forgotten."""
    if forget is not None:
        _forget(path, forget, topic, json=json)
        return
    with open_readable(path) as log:
        rows = writer_rows(log.state(), topic)
    if json:
        for row in rows:
            print_json(row)
    elif rows:
        print_writers(rows)
    else:
        note("no writer is remembered")


def _forget(path: str, writer_id: str, topic: str | None, *, json: bool) -> None:
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.writing.writers import forget_writer, writers

    with open_writable(path) as log:
        if writers(log.state(), writer_id, topic):
            note("its next batch will be appended, even if the log has it already")
        forgotten = forget_writer(log, writer_id, topic, now_ms=clock.now_ms())
    for writer, last in forgotten.items():
        if json:
            print_json({**writer_row(writer, last), "forgotten": True})
        else:
            print_line(
                f"writer {writer[0]} to topic {writer[1]} is forgotten: its last batch was "
                f"{last.batch_id}, of {counted(last.rows, 'row')}"
            )
