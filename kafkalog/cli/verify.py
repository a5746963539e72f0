"""Looks for damage in a log directory of kafkalog or a broker, or in one partition directory.

It checks all checksums, the order of offsets, and the journal against the files. It compares index
entries, aborted transactions, producer snapshots, leader epochs, topic ids and checkpoints with the
batches. A finding is a line with file and position.

Several directories may be those of several brokers of a cluster. Then it also reports how their
replicas differ, and which partitions have none.

For a log in an object store it compares every object with the commit log, by its size. It tells of
objects that are missing, and of orphans, which nothing names. --deep reads all live objects, their
batches and their indexes.

The exit status is 0 without damage. It is 1 for damage, and if a file could not be read (no
permission, no locks), which is reported on the standard error. Notices (foreign files, or what a
broker repairs at its next start) do not change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import any_topic_argument, readable_path_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.terminal.colours import styled
from kafkalog.cli.terminal.output import json_row, note, print_json, print_line, progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kafkalog.inspection.finding import Finding

EXAMPLES: Final = ("kafkalog verify /data/shop", "kafkalog verify /data/shop stock --deep --json")


@readable_path_argument
@any_topic_argument
@click.option("--deep", is_flag=True, help="Decode every record too.")
@click.option("--json", is_flag=True, help="One JSON object per finding.")
def command(path: str, topic: str | None, deep: bool, json: bool) -> int:
    """Print the findings, and how many there are."""
    from kafkalog.errors import StorageError
    from kafkalog.storage_engine.object_store.address import is_store_url

    checked = _of_store if is_store_url(path) else _of_directories
    size, checks = checked(path, topic, deep=deep)
    damage = notices = 0
    faults: list[StorageError] = []
    with progress("verifying", size, is_bytes=True) as advance:
        for check in checks:
            try:
                for finding in check(advance):
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


_Check = Callable[[Callable[[int], None]], "Iterator[Finding]"]
"""Yields findings; receives what is told of the bytes read."""


def _of_directories(
    path: str, topic: str | None, *, deep: bool
) -> tuple[Callable[[], int], Sequence[_Check]]:
    """Return what counts the bytes to read, and the check of each directory."""
    from kafkalog.inspection.verify import has_topic, log_size, verify, verify_replicas
    from kafkalog.storage_engine.metadata import address

    roots = every = address.directories(path)
    if topic is not None and len(roots) > 1:  # a topic may be in some of the roots
        roots = [root for root in roots if has_topic(root, topic)] or roots[:1]

    def check(root: Path) -> _Check:
        return lambda advance: verify(root, topic, deep=deep, progress=advance, beside=every)

    checks = [*map(check, roots)]
    if len(every) > 1:
        checks.append(lambda _: verify_replicas(every, topic))
    return lambda: sum(log_size(root, topic) for root in roots), checks


def _of_store(
    path: str, topic: str | None, *, deep: bool
) -> tuple[Callable[[], int], Sequence[_Check]]:
    """Return the same of a log in an object store; its records are read with `deep` alone."""
    from kafkalog.inspection.verify_store import stored_size, verify_store
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    log = open_readable(path)
    assert isinstance(log, ObjectLog)
    size = partial(stored_size, log, topic) if deep else lambda: 0
    return size, [lambda advance: verify_store(log, topic, deep=deep, progress=advance)]


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
        word = styled(kind, "red" if finding.is_damage else "yellow", sys.stdout)
        print_line(f": {finding}", begin=word)
