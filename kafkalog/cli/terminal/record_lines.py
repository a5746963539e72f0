"""Records as lines: text for people, or JSON objects that `append` accepts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kafkalog.cli.terminal.control_characters import escaped
from kafkalog.cli.terminal.output import (
    Encoding,
    encoder,
    print_bytes,
    print_json,
    print_line,
    text_encoder,
)
from kafkalog.cli.terminal.record_format import RecordFormat
from kafkalog.cli.terminal.time_text import utc_text
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow as pa

_TIMESTAMP_TYPES: Final = {-1: "NoTimestampType", 0: "CreateTime", 1: "LogAppendTime"}


def record_printer(
    encoding: Encoding, format: str | None, *, json: bool, raw: bool = False
) -> Callable[[pa.RecordBatch], None]:
    """Return what prints records: as lines, in a format, or as JSON with their headers.

    A terminal gets no control characters from a record, unless they are wanted `raw`. Raises
    InvalidInputError for a wrong format. The printer raises it if JSON would lose bytes.
    """
    if json:
        if raw:
            raise InvalidInputError("--raw and --json: give one of them, as JSON has its escapes")
        return lambda batch: _print_objects(batch, encoding)
    if format is None:
        return lambda batch: _print_lines(batch, encoding, raw=raw)
    encode = None if encoding is Encoding.UTF8 else encoder(encoding)
    form = RecordFormat(format, encode, None if raw or not sys.stdout.isatty() else escaped)
    return lambda batch: _print_formatted(batch, form)


def _columns(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    import pyarrow as pa

    found = {}
    for name in batch.schema.names:
        column = batch.column(name)
        # As epoch numbers: datetime cannot hold every Kafka timestamp.
        found[name] = (column.cast(pa.int64()) if name == "timestamp" else column).to_pylist()
    return found


def _print_lines(batch: pa.RecordBatch, encoding: Encoding, *, raw: bool) -> None:
    encode = text_encoder(encoding, raw=raw)
    columns = _columns(batch)
    names = ("partition", "offset", "timestamp", "key", "value")
    for number, offset, time_us, key, value in zip(*(columns[n] for n in names), strict=True):
        key_text, value_text = ("null" if item is None else encode(item) for item in (key, value))
        time_ms = time_us // 1000
        time_text = "-" if time_ms == -1 else utc_text(time_ms)
        print_line(f"{number}\t{offset}\t{time_text}\t{key_text}\t{value_text}", raw=True)


def _print_formatted(batch: pa.RecordBatch, form: RecordFormat) -> None:
    columns = _columns(batch)
    for row in zip(*columns.values(), strict=True):
        print_bytes(form.line(dict(zip(columns, row, strict=True))))


def _print_objects(batch: pa.RecordBatch, encoding: Encoding) -> None:
    columns = _columns(batch)
    for row in range(batch.num_rows):
        offset = columns["offset"][row]
        record = {
            "topic": columns["topic"][row],
            "partition": columns["partition"][row],
            "offset": offset,
            "timestamp": columns["timestamp"][row] // 1000,
            "timestampType": _TIMESTAMP_TYPES[columns["timestampType"][row]],
            "key": _text(columns["key"][row], encoding, offset, "key"),
            "value": _text(columns["value"][row], encoding, offset, "value"),
        }
        headers = columns["headers"][row]
        if headers:
            record["headers"] = [
                {
                    "key": header["key"],
                    "value": _text(header["value"], encoding, offset, "value of a header"),
                }
                for header in headers
            ]
        print_json(record)


def _text(data: bytes | None, encoding: Encoding, offset: int, what: str) -> str | None:
    """Return bytes as text; raises InvalidInputError if UTF-8 would lose bytes."""
    if data is None:
        return None
    if encoding is Encoding.UTF8:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise InvalidInputError(
                f"offset {offset}: the {what} is not UTF-8; use --encoding base64 or hex"
            ) from None
    return encoder(encoding)(data)
