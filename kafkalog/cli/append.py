"""Appends records in one commit: readers see all of them or none.

Records are JSON objects, one per line, from FILE or the standard input. The field value is
required; key, headers ([{"key": ..., "value": ...}]), timestamp (epoch ms) and partition are
optional. A key or value that is text is written as its bytes. An object, list, number, true or
false is written as the JSON that the line has. A null value is a tombstone. The output of `read
--json` can be appended again; its fields topic, offset and timestampType are ignored.

With --key-separator SEP each line is text, as kafka-console-producer reads it: a key, SEP (\\t is a
tab) and a value. With --text a line is a value without a key. --null-marker TEXT names the text
that means null.

--raw FILE appends whole batches of a .log file unchanged to one --partition. Offsets, producers,
epochs and timestamps stay, so the batches must begin at the partition's end or after it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import click

from kafkalog.cli.app.arguments import Member, argument, path_argument, topic_argument
from kafkalog.cli.app.opened import open_writable
from kafkalog.cli.terminal.json_records import json_record
from kafkalog.cli.terminal.output import (
    Encoding,
    check_input,
    counted,
    print_json,
    print_line,
    progress,
)
from kafkalog.cli.terminal.text_records import TextLines
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.log.results import CommitResult

EXAMPLES: Final = (
    "kafkalog append /data/shop stock changes.jsonl",
    """echo '{"key": "apple", "value": "5"}' | kafkalog append /data/shop stock""",
    """echo '{"key": "fig", "value": {"n": 2}}' | kafkalog append /data/shop stock""",
    "echo 'apple=6' | kafkalog append /data/shop stock --key-separator =",
    "echo 'apple=NULL' | kafkalog append /data/shop stock --key-separator = --null-marker NULL",
)
_PORTION_SIZE: Final = 4 << 20
"""Bytes of lines that become one Arrow batch."""
_LINE_SIZE_MAX: Final = 256 << 20

_Parse: TypeAlias = Callable[[bytes], dict[str, Any] | None]
"""Parses a line into the fields of a record; None for an empty line. Raises ValueError."""


@path_argument
@topic_argument
@argument(
    "file",
    type=click.Path(path_type=Path),
    required=False,
    metavar="FILE",
    help="Default, and -: standard input.",
)
@click.option(
    "--raw", type=click.Path(path_type=Path), metavar="FILE", help="A .log file, unchanged."
)
@click.option(
    "--partition",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of all records; by default the key decides.",
)
@click.option("--text", is_flag=True, help="Lines of text, each a value without a key.")
@click.option("--key-separator", metavar="SEP", help="Lines of text: a key, SEP and a value.")
@click.option("--null-marker", metavar="TEXT", help="In lines of text: the text for null.")
@click.option(
    "--encoding", type=Member(Encoding), default=Encoding.UTF8.value, help="Of keys and values."
)
@click.option("--json", is_flag=True, help="A JSON object per partition.")
def command(
    path: str,
    topic: str,
    file: Path | None,
    raw: Path | None,
    partition: int | None,
    text: bool,
    key_separator: str | None,
    null_marker: str | None,
    encoding: Encoding,
    json: bool,
) -> None:
    """Append, and print the offsets of the records."""
    lines = _text_lines(key_separator, null_marker, text=text)
    if raw is not None and (file is not None or partition is None):
        raise InvalidInputError("--raw FILE takes --partition N, and no other file")
    if raw is not None and (lines is not None or encoding is not Encoding.UTF8):
        raise InvalidInputError(
            "--raw FILE takes neither --text nor --key-separator nor --encoding, because its "
            "batches are appended as they are"
        )
    for given in (file, raw):
        if given is not None and str(given) != "-":
            check_input(given)
    with open_writable(path) as log:
        if raw is not None and partition is not None:
            result = log.append_raw(topic, partition, raw)
        else:
            record = json_record if lines is None else lines.record
            parse = partial(record, partition=partition, encoding=encoding)
            result = _append(log, topic, file, parse)
    for (name, number), (first, following) in sorted(result.offsets.items()):
        if json:
            row = {"topic": name, "partition": number, "offset": first, "nextOffset": following}
            print_json(row)
        else:
            print_line(f"{name}-{number}: offsets {first} to {following - 1}")
    if not json:
        print_line(f"{counted(result.rows, 'record')} appended")


def _text_lines(separator: str | None, null_marker: str | None, *, text: bool) -> TextLines | None:
    """Return how lines of text are parsed; None if they are JSON."""
    if separator == "":
        raise InvalidInputError("--key-separator: expected some text, found none")
    if text and separator is not None:
        raise InvalidInputError("--text has only values, --key-separator keys too: give one")
    if text or separator is not None:
        return TextLines("\t" if separator == r"\t" else separator, null_marker)
    if null_marker is not None:
        raise InvalidInputError(
            "--null-marker is for lines of text, with --key-separator or --text; JSON has null"
        )
    return None


def _append(log: Log, topic: str, file: Path | None, parse: _Parse) -> CommitResult:
    """Stage the records where the log wants them, in bounded memory, and commit it."""
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.writing.staging import StagedWriter

    log.describe(topic)
    slug = uuid.uuid4().hex
    writer = StagedWriter(log, log.state(), now_ms=clock.now_ms, writer_slug=slug)
    try:
        with _opened(file) as lines, _progress(lines) as read:
            for rows in _batches(lines, parse, read):
                writer.append(topic, rows)
        return log.commit([writer.finish()])
    except BaseException:
        writer.discard()
        raise


@contextlib.contextmanager
def _opened(file: Path | None) -> Iterator[IO[bytes]]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
    else:
        with files.open_stream(file) as lines:
            yield lines


def _progress(lines: IO[bytes]) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Show how much of the input is read, unless it is typed at a terminal."""

    def size() -> int | None:
        known = os.fstat(lines.fileno())
        return known.st_size if stat.S_ISREG(known.st_mode) else None

    return progress("appending", size, is_bytes=True, is_wanted=not lines.isatty())


def _batches(
    lines: IO[bytes], parse: _Parse, read: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """Yield Arrow batches of records; raises InvalidInputError with the line's number."""
    number = 0
    portion: list[dict[str, Any]] = []
    size = 0
    while line := lines.readline(_LINE_SIZE_MAX):
        number += 1
        if len(line) == _LINE_SIZE_MAX:
            raise InvalidInputError(f"line {number}: longer than {_LINE_SIZE_MAX} bytes")
        try:
            record = parse(line)
        except ValueError as fault:
            raise InvalidInputError(f"line {number}: {fault}") from None
        if record is not None:
            portion.append(record)
        size += len(line)
        if size >= _PORTION_SIZE:
            yield from _columns(portion)
            read(size)
            portion, size = [], 0
    yield from _columns(portion)
    read(size)


def _columns(portion: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Yield the Arrow batch of some records; nothing for no records."""
    import pyarrow as pa

    from kafkalog.storage_engine.records.record_batches import record_batches

    if not portion:
        return
    partitions = [record.pop("partition") for record in portion]
    for rows in record_batches(portion):
        is_named = any(partition is not None for partition in partitions)
        numbers = pa.array(partitions, pa.int32())
        yield rows.append_column("partition", numbers) if is_named else rows
