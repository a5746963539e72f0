"""Looks for damage in a log directory of kafkalog or a broker, or in one partition directory.

It checks all checksums, the order of offsets, and the journal against the files. It compares index
entries, aborted transactions, producer snapshots, leader epochs, topic ids and checkpoints with the
batches. A finding is a line with file and position.

The exit status is 0 without damage. It is 1 for damage, and if a file could not be read (no
permission, no locks), which is reported on the standard error. Notices (foreign files, or what a
broker repairs at its next start) do not change it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kafkalog.cli.app.arguments import AnyTopic, ReadablePath
from kafkalog.cli.terminal.colours import styled
from kafkalog.cli.terminal.output import json_row, note, print_json, print_line, progress

if TYPE_CHECKING:
    from kafkalog.inspection.finding import Finding

EXAMPLES: Final = (
    "kafkalog verify /data/shop",
    "kafkalog verify /data/shop stock --deep --json",
)


def command(
    path: ReadablePath,
    topic: AnyTopic = None,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every record too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per finding.")] = False,
) -> int:
    """Print the findings, and how many there are."""
    from kafkalog.errors import StorageError
    from kafkalog.inspection.verify import has_topic, log_size, verify
    from kafkalog.storage_engine.metadata import address

    roots = address.directories(path)
    if topic is not None and len(roots) > 1:  # a topic may be in some of the roots
        roots = [root for root in roots if has_topic(root, topic)] or roots[:1]
    damage = notices = 0
    faults: list[StorageError] = []

    def size() -> int:
        return sum(log_size(root, topic) for root in roots)

    with progress("verifying", size, is_bytes=True) as advance:
        for root in roots:
            try:
                for finding in verify(root, topic, deep=deep, progress=advance):
                    damage += finding.is_damage
                    notices += not finding.is_damage
                    _print(finding, json=json)
            except StorageError as fault:
                faults.append(fault)
    for each in faults:
        note(f"kafkalog: {each}")
    if faults and not damage:
        return 1  # the amount of damage is unknown
    note(f"{path}: {damage or 'no'} damage, {notices or 'no'} notice{'s' * (notices != 1)}")
    return 1 if damage or faults else 0


def _print(finding: Finding, *, json: bool) -> None:
    kind = "damage" if finding.is_damage else "notice"
    if json:
        print_json(
            {
                "kind": kind,
                "path": str(finding.path),
                **json_row(finding, "position", "expected", "found"),
            }
        )
    else:
        shown = styled(kind, "red" if finding.is_damage else "yellow", sys.stdout)
        print_line(f"{shown}: {finding}")
