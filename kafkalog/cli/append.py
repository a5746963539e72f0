"""Appends records in one commit: readers see all of them or none.

Records are JSON objects, one a line, from FILE or the standard input: value, and if wanted key,
headers ([{"key": ..., "value": ...}]), timestamp (epoch ms) and partition. null is no key, and as a
value a tombstone. What `read --json` prints can be appended again; its topic, offset and
timestampType are passed over.

With --raw FILE whole batches of a .log file are appended as they are, to one --partition: offsets,
producers, epochs and timestamps stay, so they must begin at the partition's end or after it.
"""

from __future__ import annotations

import contextlib
import json as json_module
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from kafkalog.cli.output import (
    Encoding,
    check_input,
    counted,
    decoded,
    print_json,
    print_line,
)
from kafkalog.cli.writable import open_writable
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.log import KafkaLog
    from kafkalog.storage_engine.commit import CommitResult

_PORTION_SIZE: Final = 4 << 20
"""Bytes of lines that become one Arrow batch."""
_LINE_SIZE_MAX: Final = 256 << 20
_FIELDS: Final = ("key", "value", "headers", "timestamp", "partition")
_PASSED_OVER: Final = {"topic", "offset", "timestampType"}


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", show_default=False)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="- or none: standard input.")
    ] = None,
    raw: Annotated[
        Path | None, typer.Option("--raw", metavar="FILE", help="A .log file, as it is.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="For all records; by their keys where none.")
    ] = None,
    encoding: Annotated[Encoding, typer.Option(help="Of keys and values.")] = Encoding.UTF8,
    json: Annotated[bool, typer.Option("--json", help="A JSON object per partition.")] = False,
) -> None:
    """Append, and print which offsets the records got."""
    if raw is not None and (file is not None or partition is None):
        raise InvalidInputError("--raw FILE takes --partition N, and no other file")
    for given in (file, raw):
        if given is not None and str(given) != "-":
            check_input(given)
    with open_writable(path) as log:
        if raw is not None and partition is not None:
            result = log.append_raw(topic, partition, raw)
        else:
            result = _append(log, topic, file, partition, encoding)
    for (name, number), (first, following) in sorted(result.offsets.items()):
        if json:
            row = {"topic": name, "partition": number, "offset": first, "nextOffset": following}
            print_json(row)
        else:
            print_line(f"{name}-{number}: offsets {first} to {following - 1}")
    if not json:
        print_line(f"{counted(result.rows, 'record')} appended")


def _append(
    log: KafkaLog, topic: str, file: Path | None, partition: int | None, encoding: Encoding
) -> CommitResult:
    """Stage the records in a file of the root, in bounded memory, and commit it."""
    from kafkalog.storage_engine import clock
    from kafkalog.storage_engine.staging import StagedWriter

    log.describe(topic)
    slug = uuid.uuid4().hex
    writer = StagedWriter(log.root, log.state(), now_ms=clock.now_ms, writer_slug=slug)
    try:
        with _opened(file) as lines:
            for rows in _batches(lines, partition, encoding):
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
        with file.open("rb") as lines:
            yield lines


def _batches(
    lines: IO[bytes], partition: int | None, encoding: Encoding
) -> Iterator[pa.RecordBatch]:
    """Yield the records of JSON lines, in portions; raises InvalidInputError with the line."""
    number = 0
    portion: list[dict[str, Any]] = []
    size = 0
    while line := lines.readline(_LINE_SIZE_MAX):
        number += 1
        if len(line) == _LINE_SIZE_MAX:
            raise InvalidInputError(f"line {number}: longer than {_LINE_SIZE_MAX} bytes")
        if not line.strip():
            continue
        try:
            portion.append(_record(line, partition, encoding))
        except ValueError as fault:
            raise InvalidInputError(f"line {number}: {fault}") from None
        size += len(line)
        if size >= _PORTION_SIZE:
            yield from _columns(portion)
            portion, size = [], 0
    yield from _columns(portion)


def _record(line: bytes, partition: int | None, encoding: Encoding) -> dict[str, Any]:
    """Return the fields of one record; raises ValueError that says what is wrong."""
    try:
        found = json_module.loads(line)
    except RecursionError:
        raise ValueError("a record is no such deeply nested object") from None
    except UnicodeDecodeError:
        raise ValueError("expected a JSON object in UTF-8, found other bytes") from None
    except json_module.JSONDecodeError as fault:  # whose own text numbers lines too
        where = f"{fault.msg} at character {fault.pos + 1}"
        raise ValueError(f"expected a JSON object: {where}") from None
    except ValueError as fault:
        raise ValueError(f"expected a JSON object: {fault}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {str(found)[:40]!r}")
    unknown = sorted(found.keys() - set(_FIELDS) - _PASSED_OVER)
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r}; known: {', '.join(_FIELDS)}")
    if "value" not in found:
        raise ValueError("the field 'value' is missing; null is a tombstone")
    if partition is not None:
        found["partition"] = partition
    headers = found.get("headers") or []
    if not isinstance(headers, list):
        raise ValueError("headers: expected a list of objects with key and value")
    return {
        "key": _bytes(found.get("key"), "key", encoding),
        "value": _bytes(found["value"], "value", encoding),
        "headers": [_header(header, encoding) for header in headers] or None,
        "timestamp": _integer(found.get("timestamp"), "timestamp", 64),
        "partition": _integer(found.get("partition"), "partition", 32),
    }


def _header(header: Any, encoding: Encoding) -> dict[str, Any]:
    if not isinstance(header, dict) or not header.keys() <= {"key", "value"}:
        raise ValueError("headers: expected objects with key and value")
    key = header.get("key")
    if not isinstance(key, str):
        raise ValueError("headers: a header's key is text")
    decoded(key, Encoding.UTF8)
    return {"key": key, "value": _bytes(header.get("value"), "value of a header", encoding)}


def _bytes(value: Any, name: str, encoding: Encoding) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text or null, found {str(value)[:40]!r}")
    try:
        return decoded(value, encoding)
    except ValueError as fault:
        raise ValueError(f"{name}: {fault}") from None


def _integer(value: Any, name: str, bits: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << (bits - 1):
        raise ValueError(
            f"{name}: expected a whole number of {bits} bits, found {str(value)[:40]!r}"
        )
    return value


def _columns(portion: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Yield the Arrow batch of some records; none for none."""
    import pyarrow as pa

    from kafkalog.schema import HEADERS

    if not portion:
        return
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": HEADERS,
        "timestamp": pa.int64(),
        "partition": pa.int32(),
    }
    columns = {}
    for name, kind in types.items():
        values = [record[name] for record in portion]
        if name == "value" or any(value is not None for value in values):
            columns[name] = pa.array(values, kind)
    yield pa.RecordBatch.from_pydict(columns)
