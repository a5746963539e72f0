"""How Kafka Connect and Debezium encode what neither JSON nor Avro has: decimals, dates, times.

A field's *meaning* is the name of its type in Connect ("semantic type" in Debezium's documentation,
Data type mappings). All is done by Spark's own functions. A value that does not fit becomes null
here, and its record is bad.

Spark computes an expression as often as it is written. A conversion therefore takes steps: it
yields what it needs several times, and is given it back as a column.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, DecimalType

CONNECT: Final = "org.apache.kafka.connect.data."
DEBEZIUM: Final = "io.debezium."
DECIMAL: Final = f"{CONNECT}Decimal"
VARIABLE_SCALE: Final = f"{DEBEZIUM}data.VariableScaleDecimal"
MILLIS: Final = (f"{DEBEZIUM}time.Timestamp", f"{CONNECT}Timestamp")
MICROS: Final = f"{DEBEZIUM}time.MicroTimestamp"
NANOS: Final = f"{DEBEZIUM}time.NanoTimestamp"
BYTES_AS_TEXT: Final = ("hex", "base64-url-safe")
"""Ways of `binary.handling.mode`, which Connect's schema calls `string`."""
LITERALS: Final = ("string", "double", "bytes", *BYTES_AS_TEXT)
"""What a column may say of how its values are written."""

_TEXTS: Final = ("string", "double", "float", "int8", "int16", "int32", "int64")
"""How Connect writes a number that is no Decimal."""
_NUMBER: Final = r"^[-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
_WHOLE: Final = r"^-?[0-9]+$"
_DAY: Final = "^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK: Final = r"T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6}0*)?)?"
"""A time of day with the digits that Spark has: it cuts off more of them."""
_DATE: Final = f"{_DAY}(Z|[+]00:?00)?$"
_LOCAL: Final = f"{_DAY}{_CLOCK}(Z|[+]00:?00)?$"
_ZONED: Final = f"{_DAY}{_CLOCK}(Z|[-+][0-9]{{2}}:?[0-9]{{2}})$"
_DAYS: Final = (-719162, 2932896)
_MICROSECONDS: Final = (-62135596800000000, 253402300799999999)
"""The years 1 to 9999, which Spark's types have."""
_WIDE: Final = "decimal(38,0)"

Conversion: TypeAlias = "Generator[Column, Column, Column]"
"""Yields expressions, is sent the columns that have their values, and returns the last one."""


@dataclass(frozen=True)
class Meaning:
    """A field's type: columns of text, null if not known.

    `literal` is Connect's name for how the value is written, such as `string`, `double` or `bytes`,
    or how Debezium writes bytes as text: `hex`, `base64-url-safe` (binary.handling.mode).
    """

    name: Column
    literal: Column
    scale: Column
    is_quoted: Column
    """Whether JSON has it in quotes."""


def converted(df: DataFrame, conversions: Sequence[Conversion]) -> tuple[DataFrame, list[Column]]:
    """Return `df` with the columns of all steps, and the last expressions."""
    from pyspark.sql import functions as F

    results: dict[int, Column] = {}
    sent: dict[int, Column | None] = dict.fromkeys(range(len(conversions)))
    for step in itertools.count():
        waiting: dict[str, Column] = {}
        for number, value in sent.items():
            try:
                expression = conversions[number].send(value)  # type: ignore[arg-type]  # None starts it
                waiting[f"kl_step_{step}_{number}"] = expression
            except StopIteration as finished:
                results[number] = finished.value
        if not waiting:
            break
        df = df.withColumns(waiting)
        sent = {int(name.rpartition("_")[2]): F.col(name) for name in waiting}
    return df, [results[number] for number in range(len(conversions))]


def is_encoded(kind: DataType) -> bool:
    """Return whether JSON has no form of its own for values of a type."""
    from pyspark.sql import types as T

    encoded = (T.DecimalType, T.DateType, T.TimestampType, T.TimestampNTZType, T.BinaryType)
    return isinstance(kind, encoded)


def needs_meaning(kind: DataType) -> bool:
    """Return whether a value alone does not say what it means."""
    from pyspark.sql import types as T

    return is_encoded(kind) and not isinstance(kind, T.DateType)


def as_it_is(value: Column) -> Conversion:
    """Return a value that needs no conversion."""
    yield from ()
    return value


def from_text(text: Column, kind: DataType, meaning: Meaning) -> Conversion:
    """Return the value of a type that is encoded; null for text that is not one."""
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if isinstance(kind, T.DecimalType):
        return (yield from _decimal(text, kind, meaning))
    if isinstance(kind, T.BinaryType):
        return _binary(text, meaning)
    number = yield F.when(text.rlike(_WHOLE), text.try_cast("bigint"))
    if isinstance(kind, T.DateType):
        return F.coalesce(_date(number), _iso_date(text))
    is_local = isinstance(kind, T.TimestampNTZType)
    micros = yield _microseconds(number, meaning.name)
    found = _local(micros) if is_local else F.timestamp_micros(micros)
    return F.coalesce(found, _moment(text, is_local=is_local))


def from_avro(value: Column, kind: DataType, name: str) -> Conversion:
    """Return a value that Avro has decoded, by the name of its type in Connect.

    A VariableScaleDecimal becomes a decimal(38,18). A time of day stays the number that it is. A
    type that Avro knows itself, as a Decimal, is decoded already.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if name == VARIABLE_SCALE:
        number = yield from _unscaled(value["value"])
        return (yield from _shifted(number, value["scale"], T.DecimalType(38, 18)))
    if name == f"{DEBEZIUM}time.Date" and isinstance(kind, T.IntegerType):
        return _date(value)
    if isinstance(kind, T.LongType) and name in {MILLIS[0], MICROS, NANOS}:
        return _local((yield _microseconds(value, F.lit(name))))
    if name in {f"{DEBEZIUM}time.ZonedTimestamp", f"{DEBEZIUM}time.IsoTimestamp"}:
        return _moment(value, is_local=name.endswith("IsoTimestamp"))
    if name == f"{DEBEZIUM}time.IsoDate":
        return _iso_date(value)
    if isinstance(kind, (T.DateType, T.TimestampType)):
        return F.when(is_in_years(value, kind), value)
    return value


def is_in_years(value: Column, kind: DataType) -> Column:
    """Return whether a date or a moment is in the years 1 to 9999, which all targets have."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import TimestampType

    if isinstance(kind, TimestampType):  # in UTC, whatever the session's time zone
        return F.unix_micros(value).between(*_MICROSECONDS)
    return F.year(value).between(1, 9999)


def _date(days: Column) -> Column:
    """Return the date so many days after 1970-01-01; null outside the years 1 to 9999."""
    from pyspark.sql import functions as F

    inside = F.when(days.between(*_DAYS), days.cast("int"))
    return F.date_add(F.lit("1970-01-01").cast("date"), inside)


def _iso_date(text: Column) -> Column:
    from pyspark.sql import functions as F

    return F.when(text.rlike(_DATE), F.substring(text, 1, 10).try_cast("date"))


def _microseconds(number: Column, name: Column) -> Column:
    """Return a number in the unit of a type as microseconds; null if Spark has no such moment."""
    from pyspark.sql import functions as F

    least, most = _MICROSECONDS
    thousandth = number.cast("decimal(20,0)") * F.lit("0.001").cast("decimal(3,3)")
    millis = F.when(number.between(least // 1000, most // 1000), number * 1000)
    return (
        F.when(name.isin(*MILLIS), millis)
        .when(name == MICROS, F.when(number.between(least, most), number))
        .when((name == NANOS) & (number % 1000 == 0), thousandth.cast("bigint"))
    )


def _local(micros: Column) -> Column:
    """Return the moment so many microseconds after 1970, without a time zone.

    A cast of `timestamp_micros` would depend on the session's time zone.
    """
    from pyspark.sql import functions as F

    millionth = F.lit("0.000001").cast("decimal(6,6)")
    seconds = (micros.cast("decimal(18,0)") * millionth).cast("decimal(18,6)")
    zero = F.lit(0)
    since = F.make_dt_interval(zero, zero, zero, seconds)
    return F.lit("1970-01-01 00:00:00").cast("timestamp_ntz") + since


def _moment(text: Column, *, is_local: bool) -> Column:
    """Return the moment of ISO-8601 text, as ZonedTimestamp and IsoTimestamp have it."""
    from pyspark.sql import functions as F

    if is_local:
        bare = F.regexp_replace(text, r"(Z|[+]00:?00)$", "")
        return F.when(text.rlike(_LOCAL), bare.try_cast("timestamp_ntz"))
    return F.when(text.rlike(_ZONED), text.try_cast("timestamp"))


def _bytes(text: Column) -> Column:
    """Return the bytes of base64, which Java's encoder pads; Spark would take it without."""
    from pyspark.sql import functions as F

    return F.when(F.length(text) % 4 == 0, F.try_to_binary(text, F.lit("base64")))


def _binary(text: Column, meaning: Meaning) -> Column:
    """Return the bytes of text; null if only the connector's settings say how it has them."""
    from pyspark.sql import functions as F

    return (
        F.when(meaning.literal == "hex", F.unhex(text))
        .when(meaning.literal == "base64-url-safe", _bytes(F.translate(text, "-_", "+/")))
        .when(~F.coalesce(meaning.literal.isin(*_TEXTS), F.lit(False)), _bytes(text))
    )


def _decimal(text: Column, kind: DecimalType, meaning: Meaning) -> Conversion:
    """Return a decimal, written in one of the ways of `decimal.handling.mode`.

    A number of JSON is itself, as with `decimal.format=NUMERIC`. Text that may be digits, or bytes
    in base64, is neither unless the meaning is known.
    """
    from pyspark.sql import functions as F

    no = F.lit(False)
    is_bytes = F.coalesce((meaning.name == DECIMAL) | (meaning.literal == "bytes"), no)
    is_text = F.coalesce(meaning.literal.isin(*_TEXTS), no)
    is_either = text.rlike(r"^[+0-9eE]+$") & (F.length(text) % 4 == 0)
    way = yield (
        F.when(text.startswith("{"), "structure")
        .when(~meaning.is_quoted, "text")
        .when(is_bytes, "bytes")
        .when(is_text | (text.rlike(_NUMBER) & ~is_either), "text")
        .when(~text.rlike(_NUMBER), "bytes")
    )
    structure = yield F.when(way == "structure", F.from_json(text, "scale int, value string"))
    content = yield F.when(way == "bytes", _bytes(text)).otherwise(_bytes(structure["value"]))
    scale = F.when(way == "structure", structure["scale"]).otherwise(
        F.coalesce(meaning.scale, F.lit(kind.scale))
    )
    number = yield from _unscaled(content)
    shifted = yield from _shifted(number, (yield scale), kind)
    is_number = (way == "text") & text.rlike(_NUMBER)
    return F.when(is_number, _exact(text, kind)).otherwise(shifted)


def _unscaled(content: Column) -> Conversion:
    """Return a number in two's complement, at most 16 bytes, as decimal(38,0).

    Java's BigInteger.toByteArray writes it. A number of more than 38 digits is null.
    """
    from pyspark.sql import functions as F

    digits = yield F.hex(content)
    filled = F.when(digits < "8", F.lpad(digits, 32, "0")).otherwise(F.lpad(digits, 32, "F"))
    padded = yield F.when(F.length(digits).between(2, 32), filled)

    def word(number: int) -> Column:
        return F.conv(F.substring(padded, 8 * number + 1, 8), 16, 10).cast("decimal(10,0)")

    def times(factor: Column, power: int) -> Column:
        return F.try_multiply(factor, F.lit(str(1 << power)).cast("decimal(29,0)")).cast(_WIDE)

    is_short = (padded < "0" * 16 + "8") | (padded >= "F" * 16 + "8")
    sign = F.when(padded < "8", 0).otherwise(1 << 32).cast("decimal(10,0)")
    highest = (word(0) - sign).cast("decimal(10,0)")
    lowest = (times(word(2), 32) + word(3)).cast(_WIDE)
    long = F.try_add(times(highest, 96), F.try_add(times(word(1), 64), lowest))
    return F.when(is_short, F.conv(F.substring(padded, 17, 16), 16, -10).cast(_WIDE)).otherwise(
        long.cast(_WIDE)
    )


def _shifted(number: Column, scale: Column, kind: DecimalType) -> Conversion:
    """Return `number` times 10 to the minus `scale`; null if it does not fit the type exactly."""
    from pyspark.sql import functions as F

    number = yield number
    # Spark's `abs` rounds to 34 digits.
    digits = yield F.translate(number.cast("string"), "-", "")
    fraction = F.greatest(scale, F.lit(0))
    size = F.greatest(F.length(digits), fraction + 1)
    long = yield F.when(scale.between(-38, 76), F.lpad(digits, size, F.lit("0")))
    text = yield F.concat(
        F.when(number < 0, "-").otherwise(""),
        F.substring(long, F.lit(1), F.length(long) - fraction),
        F.repeat(F.lit("0"), F.greatest(-scale, F.lit(0))),
        F.lit("."),
        F.substring(long, F.length(long) - fraction + 1, fraction),
    )
    return _exact(text, kind)


def _exact(text: Column, kind: DecimalType) -> Column:
    """Return the decimal of a number's text; null if it has more digits than the type."""
    from pyspark.sql import functions as F

    fraction = F.regexp_extract(text, r"\.([0-9]*?)0*([eE]|$)", 1)
    power = F.regexp_extract(text, r"[eE]([-+]?[0-9]+)$", 1).try_cast("int")
    digits = F.length(fraction) - F.coalesce(power, F.lit(0))
    is_zero = ~text.rlike("^[^eE]*[1-9]")
    return F.when(is_zero | (digits <= kind.scale), text.try_cast(kind))
