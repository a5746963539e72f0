"""Lists the groups of consumers that a broker's directory knows, or the positions of one.

They are in Kafka's own topics, __consumer_offsets and __share_group_state. PATH is a broker's
directory or several of a cluster, an adopted log, or a log with a copy of these topics. A group
lies in one of their partitions, so one broker of several may not have it.

The position is the offset of the next record, or a share group's start offset. The lag counts from
it to the end of the partition, if the partition is here. While the broker runs, positions of its
last seconds are missing.

Damage is reported on the standard error, and makes the exit status 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kafkalog.cli.app.arguments import argument, readable_path_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.terminal.output import counted, json_row, note, print_json, print_table
from kafkalog.cli.terminal.time_text import utc_text

if TYPE_CHECKING:
    from kafkalog.inspection.consumer_group import ConsumerGroup, GroupPosition

EXAMPLES: Final = (
    "kafkalog groups /data/kafka-logs",
    "kafkalog groups /data/kafka-logs billing",
    "kafkalog groups /data/kafka-logs --json",
)


@readable_path_argument
@argument("group", required=False, metavar="GROUP", show_default="all", help="The name of a group.")
@click.option("--json", is_flag=True, help="One JSON object per group, with its positions.")
def command(path: str, group: str | None, json: bool) -> int:
    """Print the groups, or the positions of one."""
    from kafkalog.inspection.groups import read_groups

    with open_readable(path) as log:
        found = read_groups(log)
        shown = list(found.by_name.values())
        if group is not None and group not in found.unreadable:
            shown = [found.named(group, log.root)]
        elif group is not None:
            shown = [each for each in shown if each.name == group]
    if json:
        for each in shown:
            print_json(_json(each))
    elif group is not None:
        _print_positions(shown)
    elif shown:
        _print_groups(shown)
    else:
        note("no group is known")
    for text, count in sorted(found.unknown.items()):
        note(f"{counted(count, 'record')} {text}: this release of kafkalog does not know them")
    for notice in found.notices:
        note(notice)
    for fault in found.damage:
        note(f"damage: {fault}")
    return 1 if found.damage else 0


def _print_groups(groups: list[ConsumerGroup]) -> None:
    rows = [
        (
            group.name,
            group.type,
            group.protocol,
            group.members,
            len(group.positions),
            "" if group.lag is None else group.lag,
            _time(group.last_commit),
        )
        for group in groups
    ]
    columns = ("group", "type", "protocol", "members", "positions", "lag", "last commit")
    print_table(columns, rows)


def _print_positions(groups: list[ConsumerGroup]) -> None:
    rows = [
        (
            position.topic,
            position.partition,
            position.offset,
            "" if position.end is None else position.end,
            "" if position.lag is None else position.lag,
            _time(position.commit_timestamp),
            _time(position.expire_timestamp),
            position.metadata,
        )
        for group in groups
        for position in group.positions
    ]
    columns = ("topic", "partition", "offset", "end", "lag", "committed", "expires", "metadata")
    if rows:
        print_table(columns, rows)
    else:
        note("no position is known")


def _json(group: ConsumerGroup) -> dict[str, Any]:
    return {
        "group": group.name,
        **json_row(group, "type", "protocol", "members", "lag", "last_commit"),
        "positions": [_position(each) for each in group.positions],
    }


def _position(position: GroupPosition) -> dict[str, Any]:
    names = ("topic", "partition", "offset", "end", "lag", "leader_epoch", "commit_timestamp")
    found = json_row(position, *names, "expire_timestamp", "metadata")
    if position.delivered is not None:
        found["delivered"] = position.delivered
    return found


def _time(time_ms: int | None) -> str:
    return "" if time_ms is None else utc_text(time_ms)
