"""Prints records, partition by partition, in the order of their offsets.

It begins with the first record, at an offset (--start), or with the first record at or after a time
(--from-time). A negative --start counts offsets from the end of each partition. It ends where the
log ends when the command starts, or before --end. With --key it prints all records of one key.

--follow continues with records that are committed later, until Ctrl-C. Like kafka-console-consumer
it begins at the end, unless you give --from-beginning, --from-time or --start.

--latest prints the latest record of each key, without tombstones. With --key this is a lookup,
which reads little of a cleaned log.

Without --json a record is a line of partition, offset, time, key and value. A null prints as the
text null. Tabs, newlines and other control characters in them stay as they are in a pipe. On a
terminal they are escaped, unless you give --raw. --json prints one object per record, which
`append` accepts. If a key or a value is not UTF-8, --json needs --encoding base64 or hex;
--key is given in that encoding.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import Member, readable_path_argument, topic_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.app.stop_signals import kept_interrupt
from kafkalog.cli.changelog import Beginning, Changelog
from kafkalog.cli.terminal.output import Encoding, decoded, flush, pause, progress, share_progress
from kafkalog.cli.terminal.record_format import FORMAT_HELP
from kafkalog.cli.terminal.record_lines import record_printer
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES: Final = (
    "kafkalog read /data/shop stock",
    "kafkalog read /data/shop stock --partition 0 --start 2 --end 4 --json",
    "kafkalog read /data/shop stock --from-time -1h",
    "kafkalog read /data/shop stock --start -2 --format '%t %p %o %k=%s\\n'",
    "kafkalog read /data/shop stock --key apple --from-beginning --follow --limit 2",
    "kafkalog read /data/shop stock --latest --key apple --json",
)
_POLL_S: Final = 0.2

format_option = click.option("--format", metavar="FORMAT", help=FORMAT_HELP)
"""How a record is printed, instead of as a line of text."""


raw_option = click.option(
    "--raw", is_flag=True, help="Let a terminal get control characters as they are."
)
"""Whether a terminal gets what it would obey."""


class IsolationLevel(StrEnum):
    """The transactions to read."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


@readable_path_argument
@topic_argument
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="All by default.")
@click.option("--from-beginning", is_flag=True, help="The default without --follow.")
@click.option(
    "--from-time",
    metavar="TIME",
    help="2026-11-22 (midnight in UTC), 2026-11-22T10:00:00Z, epoch ms, or how long ago: "
    "-90s, -1h, -7d.",
)
@click.option(
    "--start", type=int, metavar="N", help="First offset; -N for the last N of each partition."
)
@click.option("--end", type=click.IntRange(min=0), metavar="N", help="Offset to stop before.")
@click.option("--follow", "-f", is_flag=True, help="Wait for new records until Ctrl-C.")
@click.option("--key", metavar="KEY", help="Only records with this key.")
@click.option("--latest", is_flag=True, help="The latest record per key, no tombstones.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option(
    "--isolation-level",
    type=Member(IsolationLevel),
    default=IsolationLevel.READ_COMMITTED.value,
    help="Whether open and aborted transactions are read.",
)
@format_option
@click.option("--json", is_flag=True, help="One JSON object per record.")
@raw_option
@click.option(
    "--encoding", type=Member(Encoding), default=Encoding.UTF8.value, help="Of keys and values."
)
def command(
    path: str,
    topic: str,
    partition: int | None = None,
    from_beginning: bool = False,
    from_time: str | None = None,
    start: int | None = None,
    end: int | None = None,
    follow: bool = False,
    key: str | None = None,
    latest: bool = False,
    limit: int | None = None,
    isolation_level: IsolationLevel = IsolationLevel.READ_COMMITTED,
    format: str | None = None,
    json: bool = False,
    raw: bool = False,
    encoding: Encoding = Encoding.UTF8,
    last: int | None = None,
) -> None:
    """Print the records; of each partition the `last` ones, if `tail` says how many."""
    beginning = Beginning.of(from_beginning=from_beginning, from_time=from_time, start=start)
    if last is not None:
        beginning = Beginning((), None, None, last)
    is_committed = isolation_level is IsolationLevel.READ_COMMITTED
    if latest and (beginning.options or end is not None or follow or not is_committed):
        raise InvalidInputError(
            "--latest prints the latest record of each key: it takes --partition, --key and "
            "--limit, but no offsets, times, --follow or read_uncommitted"
        )
    if follow and end is not None:
        raise InvalidInputError("--follow does not end and --end does: give one of them")
    if format is not None and json:
        raise InvalidInputError("--format and --json: give one of them")
    show = record_printer(encoding, format, json=json, raw=raw)
    wanted_key = None if key is None else decoded(key, encoding, "--key")
    with open_readable(path) as log:
        present = log.describe(topic).numbers()
        if partition is not None and partition not in present:
            log.snapshot(topic, partition).close()  # its error lists the partitions
        numbers = present if partition is None else [partition]
        is_one = end is not None or (start is not None and start >= 0)
        if is_one and len(numbers) > 1:
            raise InvalidInputError("--start and --end are offsets of one --partition: name it")
        changelog = Changelog(log, topic, tuple(numbers), isolation_level.value, wanted_key)
        with contextlib.ExitStack() as bar, kept_interrupt() as interrupt:
            if latest:
                batches = _latest(changelog, bar)
            elif follow:
                batches = _followed(changelog, beginning, interrupt, is_all=partition is None)
            else:
                batches = _range(changelog, beginning, end, bar)
            _print(batches, limit, bar, show)


def _range(
    changelog: Changelog, beginning: Beginning, end: int | None, bar: contextlib.ExitStack
) -> Iterator[pa.RecordBatch]:
    """Yield the records up to the present end of the log; all partitions at one commit."""
    state = changelog.log.state()
    starts = beginning.offsets(changelog, state, at_end=False)
    ends = changelog.ends_after(starts, state, end)
    total = sum(max(ends[number] - first, 0) for number, first in starts.items())
    # On a terminal the first record appears at once, unless the search is for one key.
    is_slow = changelog.key is not None or not sys.stdout.isatty()
    shown = progress("reading", lambda: total, is_wanted=is_slow)
    yield from changelog.read(starts, ends, bar.enter_context(shown))


def _followed(
    changelog: Changelog, beginning: Beginning, interrupt: threading.Event, *, is_all: bool
) -> Iterator[pa.RecordBatch]:
    def wait() -> bool:
        flush()
        pause(_POLL_S)
        if interrupt.is_set():
            raise KeyboardInterrupt
        return True

    state = changelog.log.state()
    starts = beginning.offsets(changelog, state, at_end=True)
    yield from changelog.following(state, wait).batches(starts, is_all=is_all)


def _latest(changelog: Changelog, bar: contextlib.ExitStack) -> Iterator[pa.RecordBatch]:
    if changelog.key is not None:
        for number in changelog.partitions:
            yield from changelog.latest(number, changelog.key)
        return
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.key_index.latest_view import latest_of_topic

    show = bar.enter_context(share_progress("reading"))
    state = changelog.log.state()
    starts, ends = changelog.beginnings(state), changelog.ends(state)
    sizes = {number: 2 * (ends[number] - starts[number]) for number in changelog.partitions}

    def tell(done: int, left: int, now: int, of: int) -> None:
        show(done + now, done + of + left)

    done, left = 0, sum(sizes.values())
    for number in changelog.partitions:
        left -= sizes[number]
        yield from latest_of_topic(
            changelog.log,
            changelog.topic,
            partition=number,
            include_headers=True,
            budget_bytes=CleanerConfig().dedupe_buffer_size,
            progress=partial(tell, done, left),
        )
        done += sizes[number]


def _print(
    batches: Iterator[pa.RecordBatch],
    limit: int | None,
    bar: contextlib.ExitStack,
    show: Callable[[pa.RecordBatch], None],
) -> None:
    """Print records; on a terminal the progress bar disappears before the first one."""
    left = limit
    for batch in batches:
        if sys.stdout.isatty():
            bar.close()
        shown = batch if left is None else batch.slice(0, min(left, batch.num_rows))
        show(shown)
        if left is not None:
            left -= shown.num_rows
            if left == 0:
                return
