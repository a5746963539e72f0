"""The output of verbs: JSON lines, bytes as text, tables, and progress on a terminal."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kafkalog.cli.terminal.colours import Style, is_terminal, styled
from kafkalog.cli.terminal.control_characters import escaped, escaped_json, shown
from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.fs import files


class Encoding(StrEnum):
    """How keys, values and header values are written as text."""

    UTF8 = "utf8"
    BASE64 = "base64"
    HEX = "hex"


def encoder(encoding: Encoding) -> Callable[[bytes], str]:
    """Return a function from bytes to text; bytes that are not UTF-8 become U+FFFD."""
    if encoding is Encoding.BASE64:
        return lambda data: base64.b64encode(data).decode()
    if encoding is Encoding.HEX:
        return lambda data: data.hex()
    return lambda data: data.decode("utf-8", "replace")


def text_encoder(encoding: Encoding, *, raw: bool = False) -> Callable[[bytes], str]:
    """Return a function from bytes to what is printed: safe for a terminal, unless it is `raw`."""
    encode = encoder(encoding)
    return encode if raw else lambda data: shown(encode(data))


def decoded(text: str, encoding: Encoding, what: str) -> bytes:
    """Return the bytes that a text encodes; raises InvalidInputError that begins with `what`."""
    try:
        if encoding is Encoding.BASE64:
            return base64.b64decode(text, validate=True)
        if encoding is Encoding.HEX:
            return bytes.fromhex(text)
        return text.encode()  # JSON can spell half of a surrogate pair
    except ValueError:
        is_text = encoding is Encoding.UTF8
        problem = "cannot be written in UTF-8" if is_text else f"is not {encoding}"
        raise InvalidInputError(f"{what}: {text[:40]!r} {problem}") from None


class PipeClosed(Exception):
    """The reader of the standard output has gone. No OSError, so that no other handler takes it."""


def print_json(row: dict[str, Any]) -> None:
    """Print an object as one line."""
    # Use JSON's escapes, since those of the stream would not be JSON.
    is_ascii = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() not in ("utf-8", "utf8")
    print_line(escaped_json(json.dumps(row, ensure_ascii=is_ascii, separators=(",", ":"))))


def json_row(given: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by JSON's names: `log_start_offset` as `logStartOffset`."""
    return {_camel(name): getattr(given, name) for name in names}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def print_line(text: str, *, begin: str = "", raw: bool = False) -> None:
    """Print a line of data; text that UTF-8 lacks (half a surrogate pair) is escaped.

    Characters that a terminal would obey are escaped too, unless the text is `raw`, or safe
    already. First `begin` is printed, which may have a style.
    """
    text = begin + (text if raw else shown(text))
    with _told_faults():
        sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")


def print_bytes(data: bytes) -> None:
    """Print bytes of data as they are."""
    with _told_faults():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def flush() -> None:
    """Flush the standard output; raises PipeClosed, or StorageError if writing fails."""
    with _told_faults():
        sys.stdout.flush()


def pause(seconds: float) -> None:
    """Wait; raises PipeClosed as soon as the reader of the standard output has gone."""
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:  # a Python object without a file
        time.sleep(seconds)
        return
    reader = select.poll()
    reader.register(descriptor, 0)  # POLLERR and POLLHUP are always reported
    if reader.poll(seconds * 1000):
        raise PipeClosed


@contextlib.contextmanager
def _told_faults() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as fault:
        raise PipeClosed from fault
    except OSError as fault:
        raise StorageError(f"the standard output: {fault.strerror or fault}") from fault


def note(text: str) -> None:
    """Print a message, of one line or several, on the standard error."""
    sys.stderr.write(escaped(text, kept="\n\t") + "\n")


def complain(text: str) -> None:
    """Print an error, in one line, on the standard error."""
    plain = escaped(" ".join(text.split()))
    sys.stderr.write(f"{styled('kafkalog:', 'red', sys.stderr)} {plain}\n")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    styles: Mapping[str, Style] = MappingProxyType({}),
) -> None:
    """Print rows below headings, numbers to the right; `styles` are by a cell's value."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *texts, strict=True)]
    are_numbers = [
        bool(rows) and all(isinstance(row[place], int | float) for row in rows)
        for place in range(len(columns))
    ]
    bold: list[Style | None] = ["bold"] * len(columns)
    kinds = [[styles.get(value) if isinstance(value, str) else None for value in r] for r in rows]
    for cells, kinds_of_cells in zip([columns, *texts], [bold, *kinds], strict=True):
        padded = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(cells, widths, are_numbers, strict=True)
        ]
        cells_shown = [
            text if kind is None else styled(text, kind, sys.stdout)
            for text, kind in zip(padded, kinds_of_cells, strict=True)
        ]
        print_line("", begin="  ".join(cells_shown).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return ""
    return shown(f"{value:.3f}" if isinstance(value, float) else str(value))


@contextlib.contextmanager
def progress(
    title: str, total: Callable[[], int | None], *, is_bytes: bool = False, is_wanted: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, with `total()` (None: unknown); yield a function to advance it."""
    if not is_wanted or not is_terminal(sys.stderr):
        yield lambda _: None
        return
    known = total()
    done = 0
    with share_progress(title, is_bytes=is_bytes) as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done, known)

        yield advance


@contextlib.contextmanager
def share_progress(
    title: str, *, is_bytes: bool = False
) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar as `progress` does; yield a function of the amount done and the total."""
    if not is_terminal(sys.stderr):
        yield lambda _, __: None
        return
    from kafkalog.cli.terminal.bars import bar

    with bar(title, is_bytes=is_bytes) as show:
        yield show


def counted(count: int, noun: str) -> str:
    """Return `1 record`, `2 records`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def check_input(path: Path) -> None:
    """Raise InvalidInputError for an input file that is missing or cannot be opened."""
    if path.is_dir():
        raise InvalidInputError(f"{path}: is a directory, expected a file")
    try:
        # Opening a pipe would take it from its next reader.
        if path.is_file():
            os.close(files.open_to_read(path))
        else:
            path.stat()
    except OSError as fault:
        raise InvalidInputError(f"{path}: {fault.strerror}") from fault


def check_outside(path: Path, roots: Iterable[Path], what: str, option: str) -> None:
    """Raise InvalidInputError for a file inside a log; the error names `what` and the option."""
    place = path.resolve()
    if any(place.is_relative_to(root.resolve()) for root in roots):
        raise InvalidInputError(
            f"{path}: {what} does not belong in the log; name another place with {option} FILE"
        )
