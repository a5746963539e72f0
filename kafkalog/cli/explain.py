"""Says why a topic, or each of a log, is or is not compacted, and what would change it.

For each partition it says what keeps cleaners away: another policy, a fault, or a running cleaning.
It says what the partition waits for: a dirty ratio, a lag, an open transaction, or an active
segment that is not full. It also says whether any cleaner runs.

A log in an object store gets the same answers. Whether a cleaner runs on it is not known, because a
store has no locks, so the answer says how to start one. To see when its fresh objects are
regrouped, run `kafkalog status`. Nothing is written, and no records are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import any_topic_argument, readable_path_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.terminal.output import json_row, print_json, print_line

if TYPE_CHECKING:
    from kafkalog.cleaner.report.explain import Explanation

EXAMPLES: Final = (
    "kafkalog explain /data/shop stock",
    "kafkalog explain /data/shop",
    "kafkalog explain /data/shop stock --json",
)


@readable_path_argument
@any_topic_argument
@click.option("--json", is_flag=True, help="One JSON object per partition.")
def command(path: str, topic: str | None, json: bool) -> None:
    """Print the findings about each partition."""
    from kafkalog.cleaner.report.explain import explain
    from kafkalog.cleaner.shelves import moment_of
    from kafkalog.storage_engine.fs import clock

    with open_readable(path) as log:
        explanations = explain(moment_of(log, clock.now_ms()), topic)
    for explanation in explanations:
        if json:
            print_json(row(explanation))
        else:
            _print(explanation)


def _print(explanation: Explanation) -> None:
    print_line(f"{explanation.topic}-{explanation.partition} {explanation.answer}:")
    for finding in explanation.findings:
        print_line(f"  {finding.sentence}")
        if finding.remedy is not None:
            print_line(f"    -> {finding.remedy}")


def row(explanation: Explanation) -> dict[str, object]:
    """Return the `--json` object of a partition."""
    return {
        "topic": explanation.topic,
        "partition": explanation.partition,
        "due": explanation.is_due,
        "answer": explanation.answer,
        "findings": [
            json_row(finding, "code", "sentence", "remedy", "commands", "until_ms")
            for finding in explanation.findings
        ],
    }
