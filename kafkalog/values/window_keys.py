"""The windows in the keys of Kafka Streams as columns of their own.

A windowed key is the record's key, and then the window, in big-endian numbers:

| form | bytes after the key | where |
|---|---|---|
| `window-store` | start (8), a number of the record (4) | changelog of a window store |
| `session` | end (8), start (8) | changelog of a session store, and its output topic |
| `window` | start (8) | output topic of a time window |

Times are milliseconds since 1970. A time window has no end here, because its size is the
application's. Values need no codec: a changelog has them as the store's serde wrote them, and the
timestamp of a timestamped store is the record's own.

Kafka: WindowKeySchema, SessionKeySchema, TimeWindowedSerializer, SessionWindowedSerializer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kafkalog.errors import InvalidInputError
from kafkalog.values.bad_values import PLACE, raised

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    Bools = npt.NDArray[np.bool_]
    Records = TypeVar("Records", DataFrame, pa.Table, pa.RecordBatch)

_START, _END, _NUMBER = "window_start", "window_end", "window_number"
_SIZES: Final = {_START: 8, _END: 8, _NUMBER: 4}
_FORMS: Final = {
    "window-store": (_START, _NUMBER),
    "session": (_END, _START),
    "window": (_START,),
}
_LATEST_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999; other bytes that are read as a time are far above."""
_LARGEST: Final = {_START: _LATEST_MS, _END: _LATEST_MS, _NUMBER: 2**31 - 1}
_SHOWN: Final = 40
"""Bytes of a key in an error."""


def window_columns(records: Records, form: str) -> Records:
    """Return records of a topic of Kafka Streams with the windows of their keys as columns.

    `records` is a Spark DataFrame, also of a stream, or a pyarrow Table or RecordBatch, with a
    binary column `key`. `form` is one of the table in this module. In the result, `key` is the
    key that the application knows. The timestamp `window_start` comes after the other columns.
    With `session` the timestamp `window_end` follows, and with `window-store` the int
    `window_number`. A null key stays null, and so does its window.

    A key that cannot be of the form is an error with the record's place. It is too short, has a
    time before 1970 or after 9999, or a session that ends before it starts. With Spark the query
    fails then. Raises InvalidInputError for such a key in pyarrow, for another form, and for
    columns that are missing or there already. Kafka: WindowKeySchema, SessionKeySchema.
    """
    if form not in _FORMS:
        raise InvalidInputError(f"window_columns: form is one of {', '.join(_FORMS)}, not {form!r}")
    of_spark = hasattr(records, "sparkSession")
    names = records.columns if of_spark else records.schema.names
    if "key" not in names:
        raise InvalidInputError(
            f"window_columns: there is no column key; the columns are: {', '.join(names)}"
        )
    if there := [name for name in _FORMS[form] if name in names]:
        raise InvalidInputError(f"window_columns: there is a column {there[0]} already; rename it")
    return _of_spark(records, form) if of_spark else _of_arrow(records, form)


def _named(form: str) -> list[str]:
    """Return the columns of a form in the order of the result."""
    return [name for name in _SIZES if name in _FORMS[form]]


def _reason(form: str) -> str:
    size = sum(_SIZES[name] for name in _FORMS[form])
    return f"expected a key with the window of the form {form} in its last {size} bytes, found "


def _of_spark(df: DataFrame, form: str) -> DataFrame:
    from pyspark.sql import functions as F

    key, left = F.col("key"), sum(_SIZES[name] for name in _FORMS[form])
    is_sound = F.length(key) >= left
    own = key.substr(F.lit(1), F.length(key) - left)
    numbers: dict[str, Column] = {}
    for name in _FORMS[form]:
        digits = F.hex(F.substring(key, -left, _SIZES[name]))
        numbers[name] = F.conv(digits, 16, -10).cast("bigint")
        is_sound &= numbers[name].between(0, _LARGEST[name])
        left -= _SIZES[name]
    if _END in numbers:
        is_sound &= numbers[_START] <= numbers[_END]
    columns = {
        name: each.cast("int") if name == _NUMBER else F.timestamp_millis(each)
        for name, each in numbers.items()
    }
    found = F.concat(F.lit(_reason(form) + "X'"), F.hex(F.substring(key, 1, _SHOWN)), F.lit("'"))
    fault = raised(df, found, "window_columns")
    fields = [own.alias("key"), *(column.alias(name) for name, column in columns.items())]
    window = F.when(is_sound, F.struct(*fields)).when(key.isNotNull(), fault)
    kept = [window["key"].alias("key") if name == "key" else F.col(name) for name in df.columns]
    return df.select(*kept, *(window[name].alias(name) for name in _named(form)))


def _of_arrow(records: pa.Table | pa.RecordBatch, form: str) -> pa.Table | pa.RecordBatch:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = records.column("key")
    keys = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    size = sum(_SIZES[name] for name in _FORMS[form])
    is_null = keys.is_null().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.binary_length(keys), size).to_numpy(zero_copy_only=False)
    _check(records, form, lengths >= size)
    tails = pc.binary_slice(keys, -size).drop_null().cast(pa.binary(size))
    data = np.frombuffer(tails.buffers()[1], np.uint8)[tails.offset * size :].reshape(-1, size)
    found, is_sound = {}, np.ones(len(keys), bool)
    for name in _FORMS[form]:
        number = np.ascontiguousarray(data[: len(tails), : _SIZES[name]])
        data = data[:, _SIZES[name] :]
        found[name] = np.zeros(len(keys), np.int64)
        found[name][~is_null] = number.view(f">i{_SIZES[name]}")[:, 0]
        is_sound &= (found[name] >= 0) & (found[name] <= _LARGEST[name])
    if _END in found:
        is_sound &= found[_START] <= found[_END]
    _check(records, form, is_sound)
    place = records.schema.get_field_index("key")
    result = records.set_column(place, records.schema.field(place), pc.binary_slice(keys, 0, -size))
    for name in _named(form):
        is_time = name != _NUMBER
        numbers = pa.array(found[name] * 1000 if is_time else found[name], mask=is_null)
        kind = pa.timestamp("us", "UTC") if is_time else pa.int32()
        result = result.append_column(name, numbers.cast(kind))
    return result


def _check(records: pa.Table | pa.RecordBatch, form: str, is_sound: Bools) -> None:
    """Raise InvalidInputError for the first key that is not sound, with its place if it has one."""
    if is_sound.all():
        return
    row = records.slice(int(is_sound.argmin()), 1).to_pylist()[0]
    place = "window_columns"
    if row.keys() >= set(PLACE):
        place = "{}-{} offset {}".format(*(row[name] for name in PLACE))
    raise InvalidInputError(f"{place}: {_reason(form)}X'{row['key'][:_SHOWN].hex().upper()}'")
