"""A record as a line of text, for `append`: a value, or a key and a value.

Kafka: LineMessageReader of kafka-console-producer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafkalog.cli.terminal.output import Encoding, decoded


@dataclass(frozen=True, slots=True)
class TextLines:
    """How a line is parsed."""

    separator: str | None = None
    """Its first occurrence ends the key; None if lines have only values."""
    null_marker: str | None = None
    """A key or a value with exactly this text is null."""

    def record(self, line: bytes, partition: int | None, encoding: Encoding) -> dict[str, Any]:
        """Return the fields of one record; raises ValueError that names the fault."""
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
        return decoded(text, encoding, name)
