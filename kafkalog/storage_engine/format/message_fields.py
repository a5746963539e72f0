"""Read the fields of a message of Kafka's, one after the other.

Numbers are big-endian. A *compact* length is an unsigned varint that is one more than the length,
and 0 stands for null. Elsewhere null has the length -1.

Kafka: Readable, ByteBufferAccessor, ByteUtils.readUnsignedVarint, KIP-482.
"""

from __future__ import annotations

from typing import Final

from kafkalog.storage_engine.format import layout

_BYTE_BITS: Final = 7
_VARINT_SIZE_MAX: Final = 5


class MessageFields:
    """The bytes of a message, and the position of the next field.

    Each method raises ValueError, which says what was expected and found, for bytes that do not
    fit.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    @property
    def remaining(self) -> int:
        """The number of bytes after the position."""
        return len(self._data) - self.position

    def bytes_of(self, size: int) -> bytes:
        """Return the next bytes."""
        if size < 0 or size > self.remaining:
            raise ValueError(
                f"expected {size} bytes at byte {self.position}, found {self.remaining}"
            )
        start = self.position
        self.position = start + size
        return self._data[start : self.position]

    def integer(self, size: int, *, signed: bool = True) -> int:
        """Return a number of so many bytes."""
        return int.from_bytes(self.bytes_of(size), "big", signed=signed)

    def unsigned(self) -> int:
        """Return an unsigned varint."""
        value = 0
        for number in range(_VARINT_SIZE_MAX):
            byte = self.bytes_of(1)[0]
            value |= (byte & 0x7F) << (_BYTE_BITS * number)
            if byte < 1 << _BYTE_BITS:
                return value
        raise ValueError(
            f"expected a varint of at most {_VARINT_SIZE_MAX} bytes before byte {self.position}, "
            "found a longer one"
        )

    def compact_text(self) -> str | None:
        """Return a string of UTF-8 with a compact length, or None."""
        size = self.unsigned() - 1
        return None if size < 0 else self.bytes_of(size).decode()

    def uuid(self) -> str:
        """Return a UUID as Kafka writes it: 22 characters."""
        return layout.topic_id_text(self.bytes_of(layout.TOPIC_ID_SIZE))
