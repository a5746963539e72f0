"""Prints the entries of files, as kafka-dump-log does.

The name tells the kind of a file: a segment's .log .index .timeindex .txnindex .snapshot (also with
.cleaned .swap .deleted), a .checkpoint of KRaft's metadata, the checkpoints of a root and of a
partition, partition.metadata, meta.properties, and the journal `commit`.

Damage is reported on the standard error, and makes the exit status 1. Two findings are no damage:
gaps in the offsets, which cleaning leaves, and zeros at the end of a preallocated file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

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


def command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", show_default=False, help="Files of a log, one or more."),
    ],
    print_data_log: Annotated[
        bool, typer.Option("--print-data-log", help="Records with their keys and values.")
    ] = False,
    deep_iteration: Annotated[
        bool, typer.Option("--deep-iteration", help="Records, not only batches.")
    ] = False,
    verify_index_only: Annotated[
        bool, typer.Option("--verify-index-only", help="Only entries that the log contradicts.")
    ] = False,
    index_sanity_check: Annotated[
        bool, typer.Option("--index-sanity-check", help="Only an index's size and last entry.")
    ] = False,
    max_bytes: Annotated[
        int, typer.Option(min=0, metavar="N", help="Bytes of a .log to read, from its beginning.")
    ] = 2**31 - 1,
    offsets: Annotated[
        bool, typer.Option("--offsets-decoder", help="Decode records of __consumer_offsets.")
    ] = False,
    cluster_metadata: Annotated[
        bool,
        typer.Option("--cluster-metadata-decoder", help="Decode records of __cluster_metadata."),
    ] = False,
    transaction_log: Annotated[
        bool,
        typer.Option("--transaction-log-decoder", help="Decode records of __transaction_state."),
    ] = False,
    share_group_state: Annotated[
        bool,
        typer.Option("--share-group-state-decoder", help="Decode records of __share_group_state."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per entry.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let a terminal get control characters as they are.")
    ] = False,
    encoding: Annotated[Encoding, typer.Option(help="Of keys and values.")] = Encoding.UTF8,
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
        if not path.is_file():
            fault = "is a directory: name the files in it" if path.is_dir() else "no such file"
            raise InvalidInputError(f"{path}: {fault}")
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


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


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
