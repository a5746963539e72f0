"""Rows and the columns of a Delta table: what fits, and what is named when it does not."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import types
from pyspark.sql.types import StructType

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert.delta.columns import delta_type, first_fault, table_schema
from kafkalog.sink.upsert.delta.upsert import DeltaUpsert
from tests.unit.sink.delta_driver_batches import Row, batch, driver_batch, rows_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def upsert(path: Path) -> DeltaUpsert:
    return DeltaUpsert(path)


def columns(**kinds: Any) -> StructType:
    return table_schema(list(kinds), list(kinds.values()))


NAMES = ["key", "n", "name"]
KINDS = columns(key=types.StringType(), n=types.LongType(), name=types.StringType())


def shaped(upsert: DeltaUpsert, batch_id: int, *rows: Row) -> bool:
    kinds = [pa.string(), pa.int64(), pa.string()]
    return upsert.apply(batch(batch_id), KINDS, lambda: iter([driver_batch(rows, NAMES, kinds)]))


def test_a_narrower_column_takes_what_fits_and_names_the_record_that_does_not(
    upsert: DeltaUpsert, path: Path
) -> None:
    schema = pa.schema([("n", pa.int32()), ("KEY", pa.string()), ("name", pa.string())])
    DeltaTable.create(path, schema)
    assert shaped(upsert, 0, (0, "a", 1, "x"))
    rows = [(n, f"k{n}", n << 24, "x") for n in range(1, 300)]
    with pytest.raises(
        InvalidInputError, match=r"^t-0 offset 128: Delta table .*: column n is int32, which does "
    ):
        shaped(upsert, 1, (900, "gone", "DELETE", None), *rows)
    assert rows_of(path) == [(1, "a", "x")]
    position = upsert.position("q")
    assert position is not None
    assert position.batch_id == 0


def test_another_type_names_the_record(upsert: DeltaUpsert, path: Path) -> None:
    DeltaTable.create(
        path, pa.schema([("key", pa.string()), ("n", pa.string()), ("name", pa.string())])
    )
    with pytest.raises(
        InvalidInputError, match=r"^t-0 offset 7: .*column n is string, the row brings int64; cast"
    ):
        shaped(upsert, 0, (7, "a", 1, "x"))


def test_a_column_that_may_not_be_null_names_the_record(upsert: DeltaUpsert, path: Path) -> None:
    name = pa.field("name", pa.string(), nullable=False)
    DeltaTable.create(path, pa.schema([("key", pa.string()), ("n", pa.int64()), name]))
    assert shaped(upsert, 0, (0, "a", 1, "x"), (1, "b", "DELETE", None))
    with pytest.raises(InvalidInputError, match=r"^t-0 offset 3: .*column name may not be null"):
        shaped(upsert, 1, (2, "c", 1, "x"), (3, "d", 1, None))


def test_a_row_that_a_constraint_refuses_fails_the_micro_batch_with_deltas_error(
    upsert: DeltaUpsert, path: Path
) -> None:
    DeltaTable.create(
        path, pa.schema([("key", pa.string()), ("n", pa.int64()), ("name", pa.string())])
    )
    DeltaTable(path).alter.add_constraint({"few": "n < 100"})
    DeltaTable(path).alter.add_constraint({"named": "name <> ''"})
    rows = [(n, f"k{n}", n, "x") for n in range(150)]
    with pytest.raises(
        StorageError, match=r"micro-batch 0: .*50 rows failed validation check.*k100"
    ):
        shaped(upsert, 0, (500, "gone", "DELETE", None), *rows)
    assert rows_of(path) == []
    assert shaped(upsert, 0, *rows[:100])


def test_a_table_without_the_columns_is_refused(upsert: DeltaUpsert, path: Path) -> None:
    DeltaTable.create(path, pa.schema([("key", pa.string()), ("amount", pa.int64())]))
    with pytest.raises(InvalidInputError, match="has the columns key, amount; missing: n, name"):
        shaped(upsert, 0, (0, "a", 1, "x"))


def test_further_columns_are_left_as_they_are(upsert: DeltaUpsert, path: Path) -> None:
    schema = pa.schema(
        [("more", pa.string()), ("key", pa.string()), ("n", pa.int64()), ("name", pa.string())]
    )
    write_deltalake(path, pa.table([["m"], ["a"], [0], ["z"]], schema=schema))
    shaped(upsert, 0, (0, "a", 1, "x"), (1, "b", 2, "y"))
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    found = {row["key"]: tuple(row.values()) for row in rows}
    assert found == {"a": ("m", "a", 1, "x"), "b": (None, "b", 2, "y")}
    assert upsert.apply(
        batch(0, query_id="new", is_replacing=True),
        KINDS,
        lambda: iter(
            [driver_batch([(0, "c", 3, "z")], NAMES, [pa.string(), pa.int64(), pa.string()])]
        ),
    )
    assert DeltaTable(path).to_pyarrow_table().to_pylist() == [
        {"more": None, "key": "c", "n": 3, "name": "z"}
    ]


def test_a_further_column_that_may_not_be_null_is_named(upsert: DeltaUpsert, path: Path) -> None:
    more = pa.field("more", pa.string(), nullable=False)
    DeltaTable.create(
        path, pa.schema([("key", pa.string()), ("n", pa.int64()), ("name", pa.string()), more])
    )
    with pytest.raises(InvalidInputError, match="column more may not be null, and the rows do not"):
        shaped(upsert, 0, (0, "a", 1, "x"))


def test_a_partitioned_table_follows(upsert: DeltaUpsert, path: Path) -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64()), ("name", pa.string())])
    DeltaTable.create(path, schema, partition_by=["name"])
    shaped(upsert, 0, (0, "a", 1, "x y"), (1, "b", 2, "x y"))
    shaped(upsert, 1, (2, "a", 3, "z"), (3, "b", "DELETE", None))
    assert shaped(upsert, 2)
    assert rows_of(path) == [("a", 3, "z")]


def test_keys_that_select_made_equal_are_refused(upsert: DeltaUpsert, path: Path) -> None:
    rows = [(0, "a", 1, "x", 1), (1, "b", 1, "x", 2)]
    kinds = [pa.string(), pa.int64(), pa.string(), pa.int64()]
    with pytest.raises(InvalidInputError, match=r"^t-0 offset 1: .*one key of several keys"):
        upsert.apply(
            batch(0), KINDS, lambda: iter([driver_batch(rows, [*NAMES, "kl_count"], kinds)])
        )


def test_all_types_of_spark_arrive(upsert: DeltaUpsert, path: Path) -> None:
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)
    inner = types.StructType().add("x", types.ShortType())
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "key": (types.ByteType(), pa.int8(), 1),
        "f": (types.FloatType(), pa.float32(), 0.5),
        "b": (types.BooleanType(), pa.bool_(), True),
        "d": (types.DecimalType(20, 3), pa.decimal128(20, 3), decimal.Decimal("1.234")),
        "day": (types.DateType(), pa.date32(), when.date()),
        "at": (types.TimestampType(), pa.timestamp("us", "Europe/Rome"), when),
        "local": (types.TimestampNTZType(), pa.timestamp("us"), when.replace(tzinfo=None)),
        "list": (types.ArrayType(inner), pa.list_(pa.struct([("x", pa.int16())])), [{"x": 3}]),
        "map": (
            types.MapType(types.StringType(), types.LongType()),
            pa.map_(pa.string(), pa.int64()),
            [("k", 1)],
        ),
        "se `l` \"e'ct": (types.StringType(), pa.large_string(), "é"),
        "kl": (inner, pa.struct([("x", pa.int16())]), {"x": None}),
    }
    schema = columns(**{name: kind[0] for name, kind in kinds.items()})
    rows = [(0, *(kind[2] for kind in kinds.values()))]
    made = driver_batch(rows, list(kinds), [kind[1] for kind in kinds.values()])
    for number in range(2):  # an insertion, an update
        assert upsert.apply(batch(number), schema, lambda: iter([made]))
    (found,) = DeltaTable(path).to_pyarrow_table().to_pylist()
    assert found == {name: kind[2] for name, kind in kinds.items()}


def test_what_delta_does_not_know_becomes_text() -> None:
    interval = types.DayTimeIntervalType()
    assert delta_type(interval) is None
    assert delta_type(types.ArrayType(interval)) is None
    assert delta_type(types.MapType(types.StringType(), types.NullType())) is None
    assert delta_type(types.StructType().add("x", interval)) is None
    plain = types.StructType().add("x", types.ArrayType(types.DecimalType(5, 1)))
    assert delta_type(plain) == plain


@pytest.mark.parametrize("given", [pa.int32(), pa.int64(), pa.decimal128(20, 4)])
def test_a_decimal_takes_the_numbers_that_fit_and_names_the_record_of_another(
    upsert: DeltaUpsert, path: Path, given: pa.DataType
) -> None:
    DeltaTable.create(path, pa.schema([("key", pa.string()), ("n", pa.decimal128(5, 2))]))
    schema = columns(key=types.StringType(), n=types.LongType())

    def applied(batch_id: int, *values: int) -> bool:
        rows = [(n, f"k{n}", decimal.Decimal(value)) for n, value in enumerate(values)]
        if pa.types.is_integer(given):
            rows = [(offset, key, int(value)) for offset, key, value in rows]
        made = driver_batch(rows, ["key", "n"], [pa.string(), given])
        return upsert.apply(batch(batch_id), schema, lambda: iter([made]))

    assert applied(0, 5, -999, 0)
    stored = [("k0", 5), ("k1", -999), ("k2", 0)]
    assert rows_of(path) == stored
    with pytest.raises(
        InvalidInputError, match=r"^t-0 offset 1: .*column n is decimal128\(5, 2\), which does not"
    ):
        applied(1, 7, 1000)
    assert rows_of(path) == stored


def test_integers_become_decimals_in_nested_columns_too(upsert: DeltaUpsert, path: Path) -> None:
    inner = pa.decimal128(5, 2)
    there = {
        "list": pa.list_(inner),
        "map": pa.map_(pa.string(), inner),
        "s": pa.struct({"x": inner}),
    }
    DeltaTable.create(path, pa.schema({"key": pa.string(), **there}))
    kind = types.ArrayType(types.LongType())
    given = [pa.string(), pa.list_(pa.int64()), pa.map_(pa.string(), pa.int32())]
    made = driver_batch(
        [(0, "a", [1, None], [("k", 2)], {"x": 3}), (1, "b", None, None, None)],
        ["key", *there],
        [*given, pa.struct({"x": pa.int8()})],
    )
    schema = columns(key=types.StringType(), list=kind, map=kind, s=kind)
    assert upsert.apply(batch(0), schema, lambda: iter([made]))
    assert rows_of(path) == [("a", [1, None], [("k", 2)], {"x": 3}), ("b", None, None, None)]


@pytest.mark.parametrize("value", [7 * 10**25, 3 * 10**36, 10**30])
def test_a_large_decimal_is_never_stored_as_another_number(
    upsert: DeltaUpsert, path: Path, value: int
) -> None:
    """Values whose product with the power of ten wraps around in 128 bits."""
    for places in (20, 30):
        table = path / str(places)
        DeltaTable.create(
            table, pa.schema([("key", pa.string()), ("n", pa.decimal128(38, places))])
        )
        made = driver_batch(
            [(3, "a", decimal.Decimal(value))], ["key", "n"], [pa.string(), pa.decimal128(38, 0)]
        )
        schema = columns(key=types.StringType(), n=types.DecimalType(38, 0))
        with pytest.raises(InvalidInputError, match=f"^t-0 offset 3: .*does not hold {value}$"):
            DeltaUpsert(table).apply(batch(0), schema, lambda made=made: iter([made]))


@pytest.mark.parametrize(
    ("kind", "arrow", "per_day"),
    [
        (types.DateType(), pa.date32(), 1),
        (types.TimestampType(), pa.timestamp("us", "UTC"), 86_400_000_000),
        (types.TimestampType(), pa.timestamp("us", "Asia/Tokyo"), 86_400_000_000),
        (types.TimestampNTZType(), pa.timestamp("us"), 86_400_000_000),
    ],
)
@pytest.mark.parametrize("name", ["key", "v"])
def test_a_time_that_makes_the_table_unreadable_is_named(
    upsert: DeltaUpsert, path: Path, name: str, kind: Any, arrow: pa.DataType, per_day: int
) -> None:
    """The first and the last of the years 1 to 9999 are readable."""
    arrows = {"key": pa.int64(), "v": pa.int64(), name: arrow}
    schema = columns(**{"key": types.LongType(), "v": types.LongType(), name: kind})
    first, last = -719_162 * per_day, 2_932_897 * per_day - 1

    def applied(batch_id: int, *times: int) -> bool:
        rows = [(n, t, 1) if name == "key" else (n, n, t) for n, t in enumerate(times)]
        made = driver_batch(rows, ["key", "v"], list(arrows.values()))
        return upsert.apply(batch(batch_id), schema, lambda: iter([made]))

    assert applied(0, 0, first, last)
    for far in (first - 1, last + 1, 2**31 - 1 if per_day == 1 else 2**63 - 1):
        with pytest.raises(
            InvalidInputError, match=rf"^t-0 offset 2: .*column {name} .* by {far} (days|us) from"
        ):
            applied(1, 0, last, far, far)
    assert DeltaTable(path).to_pyarrow_table().num_rows == 3


def text(*values: bytes | None) -> pa.Array:
    """Text as Spark makes it of any bytes."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


BAD_TEXT = text(b"good", None, "\u00e9".encode(), b"\xffno", b"good", b"\xc3")
"""Offset 3 is the first that is no UTF-8."""


@pytest.mark.parametrize(
    "made",
    [
        BAD_TEXT,
        pa.ListArray.from_arrays(pa.array(range(7), pa.int32()), BAD_TEXT),
        pa.StructArray.from_arrays([pa.array(range(6)), BAD_TEXT], ["n", "s"]),
        pa.MapArray.from_arrays(pa.array(range(7), pa.int32()), pa.array(list("abcdef")), BAD_TEXT),
        pa.ListArray.from_arrays(
            pa.array(range(7), pa.int32()), pa.StructArray.from_arrays([BAD_TEXT], ["s"])
        ),
    ],
    ids=["text", "list", "struct", "map", "list of structs"],
)
def test_text_that_is_no_utf8_names_the_record_and_leaves_the_table_whole(
    upsert: DeltaUpsert, path: Path, made: pa.Array
) -> None:
    keys = [(offset, f"k{offset}", None) for offset in range(6)]
    rows = driver_batch(keys, ["key", "v"], [pa.string(), made.type])
    rows = rows.set_column(6, rows.schema.field(6), made)
    DeltaTable.create(path, pa.schema([("key", pa.string()), ("v", made.type)]))
    schema = columns(key=types.StringType(), v=types.StringType())
    with pytest.raises(
        InvalidInputError, match=r"^t-0 offset 3: .*column v is text, .* bytes that are not UTF-8"
    ):
        upsert.apply(batch(0), schema, lambda: iter([rows]))
    assert rows_of(path) == []
    assert upsert.apply(batch(0), schema, lambda: iter([rows.slice(0, 3)]))
    assert [row[0] for row in rows_of(path)] == ["k0", "k1", "k2"]


def test_a_deleted_key_that_is_no_utf8_is_named_too(upsert: DeltaUpsert) -> None:
    rows = driver_batch([(8, "a", "x"), (9, "b", "DELETE")], ["key", "v"], [pa.string()] * 2)
    rows = rows.set_column(5, rows.schema.field(5), text(b"a", b"\xff"))
    schema = columns(key=types.StringType(), v=types.StringType())
    with pytest.raises(InvalidInputError, match=r"^t-0 offset 9: .*column key is text"):
        upsert.apply(batch(0), schema, lambda: iter([rows]))


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_halving_finds_the_first_fault(count: int) -> None:
    for wrong in range(count):
        bad = {wrong, count - 1}
        found = first_fault(count, lambda start, n, bad=bad: not bad & set(range(start, start + n)))
        assert found == wrong
