r"""Records in a format of one's own, with kcat's tokens: `%t %p %o %k %s\n`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from kafkalog.errors import InvalidInputError

Encode = Callable[[bytes], str]
_Write = Callable[[Mapping[str, Any], Callable[[bytes | None], bytes]], bytes]


def _size(data: bytes | None) -> int:
    return -1 if data is None else len(data)


def _headers(row: Mapping[str, Any], text: Callable[[bytes | None], bytes]) -> bytes:
    pairs = [(header["key"].encode(), header["value"]) for header in row["headers"] or ()]
    return b",".join(
        name + b"=" + (b"NULL" if value is None else text(value)) for name, value in pairs
    )


_TOKENS: Final[Mapping[str, _Write]] = {
    "t": lambda row, _: row["topic"].encode(),
    "p": lambda row, _: b"%d" % row["partition"],
    "o": lambda row, _: b"%d" % row["offset"],
    "T": lambda row, _: b"%d" % (row["timestamp"] // 1000),
    "k": lambda row, text: text(row["key"]),
    "K": lambda row, _: b"%d" % _size(row["key"]),
    "s": lambda row, text: text(row["value"]),
    "S": lambda row, _: b"%d" % _size(row["value"]),
    "R": lambda row, _: _size(row["value"]).to_bytes(4, "big", signed=True),
    "h": _headers,
    "%": lambda row, _: b"%",
}
FORMAT_HELP: Final = (
    "As kcat: %t topic, %p partition, %o offset, %T time (ms), %k key, %K its size, %s value, %S "
    "its size, %R the size as 4 bytes, %h headers, %%, \\n, \\t, \\x41. A null has no text, and "
    "the size -1."
)
_ESCAPES: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\", "0": b"\0"}
_PART: Final = re.compile(r"%(.?)|\\x([0-9a-fA-F]{2})|\\(.?)|([^%\\]+)", re.DOTALL)


class RecordFormat:
    """A parsed format; raises InvalidInputError for a token or an escape that kcat does not have.

    Keys, values and headers are written as their own bytes, or as `encode` gives them. `show`, if
    given, makes what a record has safe for a terminal.
    """

    def __init__(
        self, text: str, encode: Encode | None = None, show: Callable[[str], str] | None = None
    ) -> None:
        self._encode = encode
        self._show = show
        self._parts: list[bytes | _Write] = [self._part(found) for found in _PART.finditer(text)]

    def _part(self, found: re.Match[str]) -> bytes | _Write:
        token, code, escape, plain = found.groups()
        if token is not None and token in _TOKENS:
            return _TOKENS[token]
        if code is not None:
            return bytes.fromhex(code)
        if escape is not None and escape in _ESCAPES:
            return _ESCAPES[escape]
        if plain is not None:
            return plain.encode("utf-8", "surrogateescape")
        known = [f"%{name}" for name in _TOKENS] + [f"\\{name}" for name in _ESCAPES]
        raise InvalidInputError(
            f"--format: {found[0]!r} means nothing (expected one of {' '.join(known)} \\xHH)"
        )

    def line(self, row: Mapping[str, Any]) -> bytes:
        """Return a record's bytes; `row` has its columns, the timestamp in microseconds."""
        return b"".join(
            part if isinstance(part, bytes) else self._shown(part(row, self._text))
            for part in self._parts
        )

    def _shown(self, data: bytes) -> bytes:
        if self._show is None:
            return data
        return self._show(data.decode("utf-8", "replace")).encode()

    def _text(self, data: bytes | None) -> bytes:
        if data is None:
            return b""
        return data if self._encode is None else self._encode(data).encode()
