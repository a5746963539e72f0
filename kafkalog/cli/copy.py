"""Copies topics of a log to another log, offsets kept; run it again to copy what is new.

SOURCE and DESTINATION are directories, or URLs of an object store. The source may be a stopped
broker's directory, or those of several brokers of a cluster. The destination is created if it does
not exist. Nobody else may write to the copied topics there. Copy a compacted topic again within its
delete.retention.ms.

If a topic can't be copied, the error says why, the other topics are copied, and the exit status is
1. A topic that only the destination has is named, and stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import TOPIC_HELP, argument, topic_configs_option, topic_names
from kafkalog.cli.terminal.config_text import topic_configs
from kafkalog.cli.terminal.output import (
    complain,
    counted,
    json_row,
    note,
    print_json,
    print_table,
    share_progress,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kafkalog.storage_engine.copying.copy import CopiedPartition

EXAMPLES: Final = (
    "kafkalog copy /data/shop s3://backup/shop",
    "kafkalog copy s3://backup/shop /data/restored --topic stock --json",
)
_NAMES: Final = ("topic", "partition", "start_offset", "end_offset", "bytes")


@argument(
    "source",
    metavar="SOURCE",
    help="A log's directory, or its URL; those of a cluster's brokers with commas between.",
)
@argument("destination", metavar="DESTINATION", help="The directory or URL of the copy.")
@click.option(
    "--topic",
    multiple=True,
    metavar="TOPIC",
    show_default="all",
    shell_complete=topic_names,
    help=f"{TOPIC_HELP} Repeat it for several.",
)
@topic_configs_option
@click.option("--json", is_flag=True, help="One JSON object per partition.")
def command(
    source: str, destination: str, topic: tuple[str, ...], config: tuple[str, ...], json: bool
) -> int:
    """Copy, and print what was added to each partition; return the exit status."""
    from kafkalog.cli.app.opened import open_readable, open_writable
    from kafkalog.errors import InvalidInputError, KafkaLogError
    from kafkalog.storage_engine.copying.copy import copy
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.object_store.address import StoreAddress, is_store_url

    if is_store_url(destination) and StoreAddress.parse(destination).is_in_memory:
        raise InvalidInputError(
            f"{destination}: a copy in memory would be gone when this command ends (expected a "
            "directory, or the URL of an object store). Name another destination."
        )
    given = topic_configs(config)
    refusals: dict[str, KafkaLogError] = {}
    with (
        open_readable(source) as origin,
        open_writable(destination, create=True) as target,
        share_progress("copying") as show,
    ):
        copied = copy(
            origin,
            target,
            topic or None,
            now_ms=clock.now_ms(),
            config=given,
            progress=show,
            refusals=refusals,
        )
        theirs = target.state().topics.keys() - origin.state().topics.keys()
    _print([each for each in copied if json or each.start_offset < each.end_offset], json=json)
    for fault in refusals.values():
        complain(str(fault))
    for name in () if topic else sorted(theirs):
        note(
            f"{destination}: topic {name!r} is not, or no longer, in {source}. It stays here until "
            f"you delete it (kafkalog topics delete {destination} {name})."
        )
    if not refusals and all(each.start_offset == each.end_offset for each in copied):
        note(f"nothing is new in {counted(len(copied), 'partition')}")
    return 1 if refusals else 0


def _print(copied: Sequence[CopiedPartition], *, json: bool) -> None:
    if json:
        for each in copied:
            print_json(json_row(each, *_NAMES))
    elif copied:
        heads = ["topic", "partition", "from", "to", "bytes"]
        print_table(heads, [[getattr(each, name) for name in _NAMES] for each in copied])
