"""The five bytes before a framed value: a zero byte, and a schema id of four bytes.

Confluent's serializers put them there (io.confluent.kafka.serializers.AbstractKafkaSchemaSerDe).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column


HEAD_SIZE: Final = 5


def head_of(column: Column) -> Column:
    """Return the first five bytes."""
    from pyspark.sql import functions as F

    return F.substring(column, 1, HEAD_SIZE)


def is_framed(column: Column) -> Column:
    """Return whether bytes begin with a zero byte and a schema id, which is not negative."""
    from pyspark.sql import functions as F

    head = head_of(column)
    return (F.length(head) == HEAD_SIZE) & (head < F.lit(b"\0\x80\0\0\0"))


def body_of(column: Column) -> Column:
    """Return what follows the first five bytes."""
    from pyspark.sql import functions as F

    return F.substring(column, F.lit(HEAD_SIZE + 1), F.length(column))


def id_of(column: Column) -> Column:
    """Return the schema id of framed bytes, as text."""
    from pyspark.sql import functions as F

    return F.conv(F.hex(F.substring(column, 2, 4)), 16, 10)


def checksum_of_id(column: Column) -> Column:
    """Return a number that stands for the schema id of framed bytes; null for others.

    Spark has no cast from bytes to a number. The CRC-32 of four bytes is different for each id, and
    numbers are compared faster than bytes.
    """
    from pyspark.sql import functions as F

    can_be_framed = F.startswith(column, F.lit(b"\0")) & (F.octet_length(column) >= HEAD_SIZE)
    return F.when(can_be_framed, F.crc32(F.substring(column, 2, 4)))


def checksum(number: int) -> int:
    """Return the number that stands for a schema id; see `checksum_of_id`."""
    return zlib.crc32(number.to_bytes(4))


def head(number: int) -> Column:
    """Return the first five bytes of a value with this schema id."""
    from pyspark.sql import functions as F

    return F.lit(number.to_bytes(HEAD_SIZE))
