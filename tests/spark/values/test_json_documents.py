"""JSON documents whose records may be bad: what Spark's `from_json` would pass over or change."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

import kafkalog
from tests.spark.values.values_session import values_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BAD = object()
VALUES: list[tuple[str, str, Any]] = [
    ("decimal(5,2)", "1.2500", Decimal("1.25")),
    ("decimal(5,2)", "1E+2", Decimal("100.00")),
    ("decimal(5,2)", "1.255", BAD),
    ("decimal(5,2)", "999.995", BAD),
    ("array<decimal(3,1)>", "[1.2, 1.25]", BAD),
    ("struct<d: decimal(3,1)>", '{"d": 1.25}', BAD),
    ("map<string, tinyint>", '{"a": 127}', {"a": 127}),
    ("map<string, tinyint>", '{"a": 200}', BAD),
    ("double", "1e308", 1e308),
    ("double", "1e309", BAD),
    ("double", "-Infinity", float("-inf")),
    ("float", "1e39", BAD),
    ("array<double>", "[0.5, -1e309]", BAD),
    ("map<string, float>", '{"a": 1e39}', BAD),
    ("bigint", "9223372036854775808", BAD),
    ("int", "1.0", BAD),
    ("date", '"9999-12-31"', dt.date(9999, 12, 31)),
    ("date", '"20240102"', BAD),
    ("timestamp", "9999999999999", BAD),
    ("timestamp_ntz", '"10000-01-01T00:00:00"', BAD),
]
"""A type, how a value of it is written, and what it is taken for."""


def test_no_number_and_no_time_is_rounded_or_taken_for_another(spark: Any) -> None:
    row = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(VALUES))
    documents = [f'{{"c{n}": {text}}}'.encode() for n, (_, text, _) in enumerate(VALUES)]
    frame = kafkalog.value_columns(values_of(spark, *documents), json=row, bad_column="bad")
    found = frame.orderBy("offset").collect()
    for n, (each, (kind, text, expected)) in enumerate(zip(found, VALUES, strict=True)):
        assert (each.bad is not None) == (expected is BAD), (kind, text, each[f"c{n}"])
        assert expected is BAD or each[f"c{n}"] == expected, (kind, text)


@pytest.mark.parametrize("begin", [b"", b"\0\0\0\0\x07"], ids=["bare", "framed"])
def test_a_record_has_one_document_and_nothing_behind_it(spark: Any, begin: bytes) -> None:
    fine = [b'{"n": 1}', b' {"n": 1}\n', b'{"n": 1, "n": 2}', b"{}"]
    bad = [b"", b" ", b"null", b"1", b'{"n": 1} x', b'{"n": 1}{"n": 2}', b'{"n": 1}\n{"n": 2}',
           b'{"n": 1}, {"n": 2}', b'[{"n": 1}]', b'[{"n": 1}, {"n": 2}]', b'{"n": 1}\0', b'{"n": 1',
           b'{"n": 1,}', b'{"n": "\xff"}', b'{"n": 1}, null', b'{"n": 1}]} x', b'{"n": 1}], "x": [',
           b'{"n": 1}], "x": [2']  # fmt: skip
    values = values_of(spark, *[begin + text for text in [*fine, *bad]])
    found = kafkalog.value_columns(values, json="n int", bad_column="bad").orderBy("offset")
    rows = found.collect()
    assert [(row.n, row.bad) for row in rows[: len(fine)]] == [
        *[(1, None), (1, None), (2, None), (None, None)]
    ]
    assert [row.offset for row in rows if row.bad is None] == list(range(len(fine)))
