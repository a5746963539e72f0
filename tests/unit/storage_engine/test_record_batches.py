"""The forms in which `append` takes records, and what it refuses rather than guesses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.errors import InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.schema import HEADERS
from kafkalog.storage_engine.records.record_batches import record_batches
from tests.builders.log_builder import LogBuilder

TIME_MS = 1_700_000_000_000
FORMS = ('[("k1", "v1")]', '[{"key": "k1", "value": "v1"}]')


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    with LogBuilder(tmp_path / "log").topic(policy="delete") as log:
        yield log


def rows(log: KafkaLog, topic: str = "t") -> list[tuple[Any, ...]]:
    """Return all records as (key, value, headers, timestamp in epoch ms)."""
    return [
        (row["key"], row["value"], row["headers"], round(row["timestamp"].timestamp() * 1000))
        for batch in log.read(topic, 0, include_headers=True)
        for row in batch.to_pylist()
    ]


# --- what is a record ----------------------------------------------------------------------------


class Named(NamedTuple):
    """A tuple with the names of a record's fields, in another order."""

    value: str
    key: str


class Mixed(NamedTuple):
    """A tuple of which some names are a record's fields."""

    topic: str
    key: str
    value: str | None


@pytest.mark.parametrize(
    "record",
    [
        ("k", "v"),
        (b"k", b"v"),
        ["k", "v"],
        ("k", "v", None),
        ("k", "v", None, None),
        ("k", "v", [], TIME_MS),
        {"key": "k", "value": "v"},
        {"value": b"v", "key": b"k"},
        {"key": "k", "value": "v", "headers": None, "timestamp": None},
        MappingProxyType({"key": "k", "value": "v"}),
        Named(key="k", value="v"),
    ],
    ids=repr,
)
def test_a_record_is_a_tuple_or_a_dict_of_its_fields(log: KafkaLog, record: Any) -> None:
    log.append("t", [record], now_ms=TIME_MS)
    assert rows(log) == [(b"k", b"v", None, TIME_MS)]


def test_the_fields_of_a_spark_row_are_taken_by_name(log: KafkaLog) -> None:
    row = pytest.importorskip("pyspark.sql").Row
    log.append("t", [row(value="v", key=b"k"), row(a="k", b="v")], now_ms=TIME_MS)
    assert rows(log) == [(b"k", b"v", None, TIME_MS)] * 2


def test_a_bytearray_is_taken_for_bytes(log: KafkaLog) -> None:
    row = {"key": bytearray(b"k"), "value": bytearray(b"v")}
    log.append("t", [tuple(row.values()), row])  # type: ignore[list-item]
    assert [row[:2] for row in rows(log)] == [(b"k", b"v")] * 2


def test_tuples_and_dicts_mix_in_one_append(log: KafkaLog) -> None:
    mixed = [("a", "1"), {"key": "b", "value": "2"}, ("c", "3", {"by": "ann"}, TIME_MS + 1)]
    log.append("t", iter(mixed), now_ms=TIME_MS)
    assert rows(log) == [
        (b"a", b"1", None, TIME_MS),
        (b"b", b"2", None, TIME_MS),
        (b"c", b"3", [{"key": "by", "value": b"ann"}], TIME_MS + 1),
    ]


def test_a_dict_without_a_key_has_a_null_key(log: KafkaLog) -> None:
    log.append("t", [{"value": "v"}], now_ms=TIME_MS)
    assert rows(log) == [(None, b"v", None, TIME_MS)]


def test_a_value_of_none_is_a_tombstone_in_a_dict_too(log: KafkaLog) -> None:
    log.append("t", [{"key": "k", "value": None}], now_ms=TIME_MS)
    assert rows(log) == [(b"k", None, None, TIME_MS)]


@pytest.mark.parametrize(
    "headers",
    [
        {"by": "ann", "at": None},
        [("by", b"ann"), ("at", None)],
        [["by", "ann"], ["at", None]],
        [{"key": "by", "value": b"ann"}, {"value": None, "key": "at"}],
        [Named("ann", "by"), ("at", None)],
    ],
    ids=repr,
)
def test_append_takes_headers_as_mapping_pairs_or_as_read(log: KafkaLog, headers: Any) -> None:
    log.append("t", [("k", "v", headers)], now_ms=TIME_MS)
    log.append("t", [{"key": "k", "value": "v", "headers": headers}], now_ms=TIME_MS)
    read = [{"key": "by", "value": b"ann"}, {"key": "at", "value": None}]
    assert rows(log) == [(b"k", b"v", read, TIME_MS)] * 2


def test_an_append_of_no_records_succeeds(log: KafkaLog) -> None:
    for nothing in ([], (), iter(())):
        assert log.append("t", nothing).rows == 0


TEXT = st.none() | st.binary(max_size=5) | st.text(max_size=5)
PAIRS = st.lists(st.tuples(st.text(max_size=5), TEXT), max_size=3)
TIMES = st.none() | st.integers(0, TIME_MS)
RECORDS = st.lists(st.tuples(TEXT, TEXT, st.none() | PAIRS, TIMES), max_size=6)


@given(RECORDS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_dicts_and_tuples_and_a_mixture_are_the_same_records(
    records: list[tuple[Any, ...]], is_dict: list[bool]
) -> None:
    names = ("key", "value", "headers", "timestamp")
    dicts = [dict(zip(names, record, strict=True)) for record in records]
    mixed = [dicts[n] if is_dict[n] else record for n, record in enumerate(records)]
    few = [{name: dict_[name] for name in names if dict_[name] is not None} for dict_ in dicts]
    few = [{"value": None, **dict_} for dict_ in few]
    (expected,) = record_batches(records)
    for form in (dicts, mixed, few):
        (found,) = record_batches(form)
        assert found.equals(expected)
    assert expected.num_rows == len(records)


# --- what is none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("ab", "records[1]: not a record (expected a tuple or a dict, found str 'ab')"),
        (b"ab", "found bytes b'ab'"),
        (bytearray(b"ab"), "found bytearray"),
        (memoryview(b"ab"), "found memoryview"),
        (None, "found NoneType"),
        (1, "found int"),
        ({"k", "v"}, "found set"),
        (pa.array(["k", "v"]), "found StringArray"),
        (iter(("k", "v")), "found tuple_iterator"),
        (
            ("k",),
            "records[1]: not a record (expected (key, value[, headers, timestamp]), found a tup",
        ),
        (("k", "v", None, None, 0), "found a tuple of 5"),
        ({"apple": "1"}, "records[1]: unknown field 'apple' (expected key, value, headers, times"),
        ({"key": "k", "val": "v"}, "records[1]: unknown field 'val' (expected key, value, headers"),
        ({"key": "k", "value": "v", "partition": 0}, "timestamp). Leave it out, or append with dr"),
        ({1: "k", 2: "v"}, "unknown field 1 "),
        (Mixed("shop", "k", None), "records[1]: unknown field 'topic' (expected key, value"),
        (pa.table({"key": ["k"]}), "found Table pyarrow.Table"),
        ({"key": "k"}, "records[1]: a record without a value (expected the field 'value', found k"),
        ({"key": "k", "headers": []}, "found key, headers). Give None as the value of a tombstone"),
        ({}, "a record without a value"),
        (("k", 3), "records[1]: value: int is neither bytes nor text"),
        ((("k", "v"), ("k", "v")), "records[1]: key: tuple is neither bytes nor text"),
        ({"key": {"a": "b"}, "value": "v"}, "records[1]: key: dict is neither bytes nor text"),
        (("k", "\ud800"), "records[1]: value: 'utf-8' codec can't encode"),
        (("k", "v", "ab"), "records[1]: headers: str is not a list of headers"),
        (("k", "v", ["ab"]), "records[1]: headers: a header is a pair, not 'ab'"),
        (("k", "v", TIME_MS), "records[1]: headers: 'int' object is not iterable"),
        (
            ("k", "v", {"key": "a", "value": "b"}),
            "records[1]: headers: one header must be in a ",
        ),
        (("k", "v", None, "1"), "records[1]: timestamp: str is not a whole number"),
        (("k", "v", None, True), "records[1]: timestamp: bool is not a whole number"),
        ({"value": "v", "timestamp": 2**63}, "records[1]: timestamp: 9223372036854775808 takes"),
    ],
)
def test_what_is_not_a_record_is_named_and_nothing_of_the_append_is_written(
    log: KafkaLog, record: Any, told: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(told)) as fault:
        log.append("t", [("before", "1"), record, ("after", "2")])
    assert all(form in str(fault.value) for form in FORMS)
    assert "\n" not in str(fault.value)
    assert log.offsets("t") == {0: (0, 0)}


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (("k1", "v1"), "records[0]: not a record (expected a tuple or a dict, found str 'k1')"),
        (("k1", None), "found str 'k1'"),
        ((b"k1", b"v1"), "found bytes b'k1'"),
        (["ab"], "found str 'ab'"),
        (
            {"key": "k1", "value": "v1"},
            "records: not a list of records (expected tuples or dicts in",
        ),
        ({"apple": "1"}, "found dict). "),
        ("ab", "found str)"),
        ("", "found str)"),
        (b"", "found bytes)"),
        (bytearray(b"ab"), "found bytearray)"),
        (memoryview(b"ab"), "found memoryview)"),
        (None, "found NoneType)"),
        (7, "found int)"),
    ],
)
def test_what_is_not_a_list_of_records_is_refused_with_the_forms(
    log: KafkaLog, records: Any, told: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(told)) as fault:
        log.append("t", records)
    assert all(form in str(fault.value) for form in FORMS)
    assert log.offsets("t") == {0: (0, 0)}


def test_only_a_dict_of_keys_and_values_is_told_of_its_items(log: KafkaLog) -> None:
    with pytest.raises(InvalidInputError, match=r"A dict of keys and values has \.items\(\)"):
        log.append("t", {"apple": "1"})
    with pytest.raises(InvalidInputError) as fault:
        log.append("t", {"key": "apple", "value": "1"})
    assert "items" not in str(fault.value)


def test_an_error_of_the_callers_own_iterator_stays_what_it_is(log: KafkaLog) -> None:
    def broken() -> Iterator[tuple[str, str]]:
        yield "k", "v"
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        log.append("t", broken())
    assert log.offsets("t") == {0: (0, 0)}


@pytest.mark.parametrize("name", ["key", "value"])
def test_a_table_with_a_column_twice_is_refused(log: KafkaLog, name: str) -> None:
    columns = [pa.array([text]) for text in ("a", "b", "c")]
    with pytest.raises(InvalidInputError, match=f"more than one column '{name}'"):
        log.append("t", pa.table(columns, names=["key", "value", name]))
    assert log.offsets("t") == {0: (0, 0)}


def test_a_time_that_no_record_can_have_is_refused(log: KafkaLog) -> None:
    times = pa.array([2**61 + 1], pa.timestamp("s"))
    with pytest.raises(InvalidInputError, match="column timestamp: "):
        log.append("t", pa.table({"key": ["k"], "value": ["v"], "timestamp": times}))
    assert log.offsets("t") == {0: (0, 0)}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_of_any_unit_is_rounded_down_to_milliseconds(log: KafkaLog, unit: str) -> None:
    scale = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    count = TIME_MS // 1000 * scale + (scale // 1000 * 7 + scale // 2000)
    times = pa.array([count], pa.timestamp(unit))
    log.append("t", pa.table({"key": ["k"], "value": ["v"], "timestamp": times}))
    (row,) = rows(log)
    assert row[3] == count * 1000 // scale


def test_a_tables_headers_are_those_of_tuples(log: KafkaLog) -> None:
    columns = {"value": pa.array([b"v"]), "headers": pa.array([[("by", b"ann")]], HEADERS)}
    log.append("t", pa.table(columns), now_ms=TIME_MS)
    log.append("t", [(None, "v", [("by", "ann")])], now_ms=TIME_MS)
    first, second = rows(log)
    assert first == second


def test_the_help_of_append_shows_the_forms() -> None:
    text = KafkaLog.append.__doc__ or ""
    for form in ('[("k1", "v1")', '[{"key": "k4", "value": ', "pyarrow.table("):
        assert form in text


def test_what_a_read_gives_is_taken_but_for_its_extra_columns(log: KafkaLog) -> None:
    log.append("t", [("a", "1", {"by": "ann"}, TIME_MS), ("b", None, None, TIME_MS + 1)])
    before = rows(log)
    table = pa.Table.from_batches(log.read("t", include_headers=True))
    for records in (table, table.to_batches()[0], table.to_pylist()):
        with pytest.raises(InvalidInputError, match=r"unknown (column|field) 'topic'"):
            log.append("t", records)
        log.append("t", records, drop_extra=True)
    assert rows(log) == before * 4


def test_a_datetime_is_a_timestamp_if_it_has_a_time_zone(log: KafkaLog) -> None:
    time = datetime.fromtimestamp(TIME_MS / 1000, UTC)
    log.append("t", [("k", "v", None, time + timedelta(microseconds=999))])
    assert rows(log) == [(b"k", b"v", None, TIME_MS)]
    with pytest.raises(InvalidInputError, match=r"records\[0\]: timestamp: .* has no time zone"):
        log.append("t", [("k", "v", None, time.replace(tzinfo=None))])


def test_append_takes_what_read_yields(log: KafkaLog) -> None:
    log.append("t", [("a", "1", [("h", b"x")], TIME_MS), ("b", None, None, TIME_MS)])
    written = rows(log)
    result = log.append("t", log.read("t", include_headers=True), drop_extra=True)
    assert result.rows == 2
    assert rows(log) == written * 2
    reader = pa.RecordBatchReader.from_batches(pa.schema({"value": pa.string()}), [])
    assert log.append("t", reader).rows == 0


def test_record_batches_and_tuples_are_not_mixed(log: KafkaLog) -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["1"]})
    with pytest.raises(InvalidInputError, match="1 record batches and 1 other records"):
        log.append("t", [batch, ("a", "1")])
    assert rows(log) == []
