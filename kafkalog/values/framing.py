"""The five bytes before a framed value: a zero byte, and a schema id of four bytes.

Confluent's serializers put them there (io.confluent.kafka.serializers.AbstractKafkaSchemaSerDe).
"""

from __future__ import annotations

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


def head(number: int) -> Column:
    """Return the first five bytes of a value with this schema id."""
    from pyspark.sql import functions as F

    return F.lit(number.to_bytes(HEAD_SIZE))
