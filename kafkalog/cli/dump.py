"""Prints the entries of files, as kafka-dump-log does.

The name tells the kind of a file. It's a segment's .log .index .timeindex .txnindex .snapshot (also
with .cleaned .swap .deleted), a .checkpoint of KRaft's metadata, the checkpoints of a root and of a
partition, partition.metadata, meta.properties, and the journal `commit`.

Damage is reported on the standard error, and makes the exit status 1. Two findings don't count as
damage: gaps in the offsets, which cleaning leaves, and zeros at the end of a preallocated file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from kafkalog.cli.app.arguments import Member, argument
from kafkalog.cli.terminal.control_characters import escaped
from kafkalog.cli.terminal.output import (
    Encoding,
    encoder,
    note,
    print_json,
    print_line,
    progress,
    text_encoder,
)

EXAMPLES: Final = (
    "kafkalog dump /data/shop/stock-0/00000000000000000000.log",
    "kafkalog dump --print-data-log --json /data/shop/stock-0/00000000000000000000.log",
    "kafkalog dump --offsets-decoder "
    "/data/kafka-logs/__consumer_offsets-0/00000000000000000000.log",
    "kafkalog dump /data/shop/commit",
)


@argument(
    "files",
    type=click.Path(path_type=Path),
    nargs=-1,
    required=True,
    metavar="FILE",
    help="Files of a log, one or more.",
)
@click.option("--print-data-log", is_flag=True, help="Records with their keys and values.")
@click.option("--deep-iteration", is_flag=True, help="Records, not only batches.")
@click.option("--verify-index-only", is_flag=True, help="Only entries that the log contradicts.")
@click.option("--index-sanity-check", is_flag=True, help="Only an index's size and last entry.")
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0),
    default=2**31 - 1,
    metavar="N",
    help="Bytes of a .log to read, from its beginning.",
)
@click.option(
    "--offsets-decoder", "offsets", is_flag=True, help="Decode records of __consumer_offsets."
)
@click.option(
    "--cluster-metadata-decoder",
    "cluster_metadata",
    is_flag=True,
    help="Decode records of __cluster_metadata.",
)
@click.option(
    "--transaction-log-decoder",
    "transaction_log",
    is_flag=True,
    help="Decode records of __transaction_state.",
)
@click.option(
    "--share-group-state-decoder",
    "share_group_state",
    is_flag=True,
    help="Decode records of __share_group_state.",
)
@click.option(
    "--remote-log-metadata-decoder",
    "remote_log_metadata",
    is_flag=True,
    help="Decode records of __remote_log_metadata.",
)
@click.option("--json", is_flag=True, help="One JSON object per entry.")
@click.option("--raw", is_flag=True, help="Let a terminal get control characters as they are.")
@click.option(
    "--encoding", type=Member(Encoding), default=Encoding.UTF8.value, help="Of keys and values."
)
def command(
    files: tuple[Path, ...],
    print_data_log: bool,
    deep_iteration: bool,
    verify_index_only: bool,
    index_sanity_check: bool,
    max_bytes: int,
    offsets: bool,
    cluster_metadata: bool,
    transaction_log: bool,
    share_group_state: bool,
    remote_log_metadata: bool,
    json: bool,
    raw: bool,
    encoding: Encoding,
) -> int:
    """Print the entries of each file in turn."""
    from kafkalog.errors import InvalidInputError
    from kafkalog.inspection import dump_text
    from kafkalog.inspection.dump import dump_file
    from kafkalog.inspection.dump_entry import DumpOptions, RecordDecoder, is_damage

    wanted = {
        RecordDecoder.OFFSETS: offsets,
        RecordDecoder.CLUSTER_METADATA: cluster_metadata,
        RecordDecoder.TRANSACTION_LOG: transaction_log,
        RecordDecoder.SHARE_GROUP_STATE: share_group_state,
        RecordDecoder.REMOTE_LOG_METADATA: remote_log_metadata,
    }
    decoders = [decoder for decoder, is_wanted in wanted.items() if is_wanted]
    if len(decoders) > 1:
        names = " and ".join(f"--{decoder}-decoder" for decoder in decoders)
        raise InvalidInputError(f"{names}: give one of them, for a file has records of one topic")
    options = DumpOptions(
        print_data_log=print_data_log,
        deep_iteration=deep_iteration,
        verify_index_only=verify_index_only,
        index_sanity_check=index_sanity_check,
        max_bytes=max_bytes,
        decoder=decoders[0] if decoders else None,
    )
    encode = encoder(encoding) if json else text_encoder(encoding, raw=raw)
    if raw and json:
        raise InvalidInputError("--raw and --json: give one of them, as JSON has its escapes")
    status = 0
    for path in files:
        if path.is_dir():
            raise InvalidInputError(f"{path}: is a directory: name the files in it")
        if not os.path.lexists(path):
            raise InvalidInputError(f"{path}: no such file")
    # On a terminal the lines themselves show the progress.
    is_quiet = not sys.stdout.isatty()
    with progress("dumping", lambda: _size(files), is_bytes=True, is_wanted=is_quiet) as advance:
        for path in files:
            if not json:
                print_line(f"Dumping {path}")
            title = None
            for entry in _told(dump_file(path, options), advance):
                if is_damage(entry):
                    status = 1
                if json:
                    print_json({"file": str(path), **_texts(entry, encode)})
                elif entry["type"] == "finding":
                    if (heading := dump_text.heading(entry)) and heading != title:
                        note(heading)
                    title = heading
                    note(escaped(dump_text.line(entry, encode)))
                else:
                    text = dump_text.line(entry, encode)
                    is_several = entry["type"] == "properties"
                    for each in text.split("\n") if is_several else [text]:
                        print_line(each, raw=raw)
    return status


def _size(files: Sequence[Path]) -> int:
    return sum(path.lstat().st_size for path in files)


def _told(
    entries: Iterator[dict[str, Any]], advance: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Yield entries, and advance the bar by the bytes before them."""
    done = 0
    for entry in entries:
        position = entry.get("position")
        if isinstance(position, int) and position > done:
            advance(position - done)
            done = position
        yield entry


def _texts(entry: dict[str, Any], encode: Any) -> dict[str, Any]:
    """Return an entry with its bytes as text."""
    from kafkalog.inspection.kafka_json import as_json

    found = dict(entry)
    for name in ("key", "payload"):
        if isinstance(found.get(name), bytes):
            found[name] = encode(found[name])
        elif name in found:
            found[name] = as_json(found[name])
    if "headers" in found:
        found["headers"] = [
            {
                "key": name.decode("utf-8", "replace"),
                "value": None if value is None else encode(value),
            }
            for name, value in found["headers"]
        ]
    return found
