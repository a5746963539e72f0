"""Deletes keys for good, and proves it: every file is searched for what is left of them.

It writes tombstones, cleans the partitions by force, and waits until replaced files may be removed.
Then it reads every file of the topic and of the root, batches record by record, other files byte by
byte. It names the files that it has read, and the commit that this holds for. It writes a dated
report, which names keys by their digests. --dry-run only searches; it writes a report if --report
names one. In an object store it does the same with objects: it deletes those that a cleaning has
dropped.

A tombstone stays for delete.retention.ms, so that followers can read it. Until then it counts as an
occurrence: the exit status is 1, and the report says when to run the same command again. --now
removes it at once. A follower that has not read it keeps the key for good, so use --now only after
all of them have read the first run's tombstones.

The exit status is 0 when no occurrence is left, and 1 when there is one, or a file cannot be read.
A key that is typed may stay in the shell's history; --keys-from reads a file with one key per
line, or - for the standard input.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import Member, argument, path_argument, topic_argument
from kafkalog.cli.app.opened import open_readable, open_writable
from kafkalog.cli.report_file import reserved
from kafkalog.cli.terminal.output import (
    Encoding,
    check_input,
    counted,
    decoded,
    note,
    print_json,
    print_line,
    share_progress,
)
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.erase import Erasure
    from kafkalog.erasure.occurrences import Occurrences
    from kafkalog.storage_engine.log.log import Log

EXAMPLES: Final = (
    "kafkalog erase /data/shop customers 4711 --dry-run",
    "kafkalog erase /data/shop customers --key 4711 --key 4712",
    "kafkalog erase /data/shop customers --keys-from leaving.txt --now --report erased.json",
)
_SHOWN_WAIT_MS: Final = 1000
_WAITING: Final = "waiting (s)"


@path_argument
@topic_argument
@argument("keys", nargs=-1, metavar="KEY", help="Keys, as --key gives them.")
@click.option("--key", multiple=True, metavar="KEY", help="Repeatable.")
@click.option(
    "--keys-from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="One key per line; empty lines are skipped.",
)
@click.option("--encoding", type=Member(Encoding), default=Encoding.UTF8.value, help="Of the keys.")
@click.option("--now", is_flag=True, help="Wait neither for followers nor for readers.")
@click.option("--no-wait", is_flag=True, help="Leave replaced files, and report them.")
@click.option("--dry-run", is_flag=True, help="Only search; change nothing.")
@click.option(
    "--strict", is_flag=True, help="Records of other keys that mention one are occurrences too."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The report's file; by default kafkalog-erase-TOPIC-TIME.json in this directory, "
    "and none with --dry-run.",
)
@click.option("--json", is_flag=True, help="The report as a JSON object.")
def command(
    path: str,
    topic: str,
    keys: tuple[str, ...],
    key: tuple[str, ...],
    keys_from: Path | None,
    encoding: Encoding,
    now: bool,
    no_wait: bool,
    dry_run: bool,
    strict: bool,
    report: Path | None,
    json: bool,
) -> int:
    """Erase keys, and print what is left of them."""
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cli.erasure_report import NOW_WARNING, last_lines, lines, text
    from kafkalog.cli.erasure_report import report as report_of
    from kafkalog.erasure.erase import erase
    from kafkalog.storage_engine.fs import clock

    if now and (dry_run or no_wait):
        raise InvalidInputError(f"--now does not go with --{'dry-run' if dry_run else 'no-wait'}")
    if dry_run and no_wait:
        raise InvalidInputError("--no-wait does not go with --dry-run, which waits for nothing")
    is_wanted = report is not None or not dry_run
    given = [*(keys or ()), *(key or ())]
    erased = ErasedKeys(_keys(given, keys_from, encoding))
    erasure: Erasure | None = None
    with open_readable(path) if dry_run else open_writable(path) as log:
        log.describe(topic)
        stem = f"kafkalog-erase-{topic}"
        reserving = reserved(report, stem, log.root) if is_wanted else contextlib.nullcontext()
        with reserving as file, _Bars() as bars:
            if dry_run:
                before = _look(log, topic, erased, strict, bars)
            else:
                if now:
                    note(f"kafkalog: {NOW_WARNING}")
                wait = None if no_wait else bars.wait
                erasure = erase(
                    log,
                    topic,
                    erased,
                    now=now,
                    is_strict=strict,
                    clock=clock.now_ms,
                    wait=wait,
                    config=CleanerConfig(),
                    progress=bars.show,
                )
                before = erasure.before
            bars.close()
            found = report_of(log.root, topic, erased, before, erasure, now=now, strict=strict)
            if file is not None:
                files.write_atomically(file, text(found).encode())
    if json:
        print_json({**found, "file": None if file is None else str(file)})
    else:
        for line in lines(found):
            print_line(line)
        if file is not None:
            print_line(f"report   {file}")
        for line in last_lines(found, path):
            print_line(line)
    if not found["erased"] and not dry_run:
        note(f"kafkalog: {topic}: something of {counted(len(erased), 'key')} is left, see above")
    return 0 if found["erased"] else 1


def _look(log: Log, topic: str, keys: ErasedKeys, strict: bool, bars: _Bars) -> Occurrences:
    from kafkalog.erasure.occurrences import find_occurrences
    from kafkalog.storage_engine.fs import clock

    def show(done: int, of: int) -> None:
        bars.show("looking", done, of)

    return find_occurrences(log, topic, keys, clock=clock.now_ms, is_strict=strict, progress=show)


def _keys(given: Sequence[str], file: Path | None, encoding: Encoding) -> list[bytes]:
    """Return the keys; raises InvalidInputError for a text that is not a key, with its line."""
    found = [decoded(text, encoding, "--key") for text in given]
    if file is None:
        if not found:
            raise InvalidInputError("which key? give --key KEY, or --keys-from FILE")
        return found
    name = str(file)
    if name == "-":
        name = "the standard input"
        data = sys.stdin.buffer.read()
    else:
        check_input(file)
        with files.open_stream(file) as stream:
            data = stream.read()
    for number, line in enumerate(data.split(b"\n"), 1):
        key = line.removesuffix(b"\r")
        if key and encoding is not Encoding.UTF8:
            text = key.strip().decode("ascii", "replace")
            key = decoded(text, encoding, f"{name}: line {number}")
        if key:
            found.append(key)
    if not found:
        raise InvalidInputError(f"{name}: it has no key")
    return found


class _Bars:
    """A bar for each step, one after the other; no bars without a terminal."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._step = ""
        self._show: Callable[[int, int], None] = lambda done, of: None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        self._stack.close()
        self._step = ""

    def show(self, step: str, done: int, of: int) -> None:
        """Show how many bytes of a step are done."""
        if step != self._step:
            self.close()
            self._step = step
            shown = share_progress(step, is_bytes=step != _WAITING)
            self._show = self._stack.enter_context(shown)
        self._show(done, of)

    def wait(self, until_ms: int) -> None:
        """Wait until that time."""
        from kafkalog.cleaner.report.explain import utc_time
        from kafkalog.storage_engine.fs import clock

        self.close()
        of = max(0, until_ms - clock.now_ms())
        if of > _SHOWN_WAIT_MS:
            note(
                f"kafkalog: what was replaced is kept for readers until {utc_time(until_ms)} "
                "(file.delete.delay.ms): waiting; --no-wait leaves them"
            )
        while (left := until_ms - clock.now_ms()) > 0:
            self.show(_WAITING, (of - left) // 1000, of // 1000)
            time.sleep(min(left, 1000) / 1000)
