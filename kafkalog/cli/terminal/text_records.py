"""A record as a line of text, for `append`: a value, or a key and a value.

Kafka: LineMessageReader, which kafka-console-producer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafkalog.cli.terminal.output import Encoding, decoded

__all__ = ["TextLines"]


@dataclass(frozen=True, slots=True)
class TextLines:
    """How a line is read."""

    separator: str | None = None
    """Ends the key, where it occurs first; None where lines are values alone."""
    null_marker: str | None = None
    """A key or a value that is this text is null."""

    def record(self, line: bytes, partition: int | None, encoding: Encoding) -> dict[str, Any]:
        """Return the fields of one record; raises ValueError that says what is wrong."""
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise ValueError("expected text in UTF-8, found other bytes") from None
        key, value = None, text
        if self.separator is not None:
            key, found, value = text.partition(self.separator)
            if not found:
                raise ValueError(f"no {self.separator!r} ends a key in {text[:40]!r}")
        return {
            "key": self._bytes(key, "key", encoding),
            "value": self._bytes(value, "value", encoding),
            "headers": None,
            "timestamp": None,
            "partition": partition,
        }

    def _bytes(self, text: str | None, name: str, encoding: Encoding) -> bytes | None:
        if text is None or text == self.null_marker:
            return None
        try:
            return decoded(text, encoding)
        except ValueError as fault:
            raise ValueError(f"{name}: {fault}") from None
