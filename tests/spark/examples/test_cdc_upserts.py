"""Change events become the table they tell of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import cdc_upserts

pytestmark = [pytest.mark.spark, pytest.mark.slow]
TOMBSTONE = None


def made(
    spark: Any, *values: str | None, key: str = '{"id":1}', becomes: str = '{"id":1}'
) -> list[str | None]:
    """Return what becomes of the values of one key's records."""
    rows = [
        (key.encode(), value and value.encode(), "events", 0, number)
        for number, value in enumerate(values)
    ]
    schema = "key binary, value binary, topic string, partition int, offset bigint"
    found = cdc_upserts.keyed_changes(spark.createDataFrame(rows, schema).coalesce(1)).collect()
    assert {row.key for row in found} == {becomes}
    return [row.value for row in found]


def event(op: str, after: object, **more: object) -> str:
    return json.dumps({"before": None, "after": after, "op": op, **more}, separators=(",", ":"))


def test_the_table_is_what_the_events_lead_to(spark: Any, tmp_path: Path) -> None:
    assert cdc_upserts.run(spark, tmp_path) == [
        "at first",
        "1 ann Oslo",
        "2 bob Rome",
        "3 cem Oslo",
        "at last",
        "1 ann Kiel",
        "4 dag Rome",
        "5 cem Oslo",
    ]


def test_creations_updates_and_reads_are_upserts_and_the_rest_deletions(spark: Any) -> None:
    values = [event(op, {"id": 1, "of": {"op": "d"}}) for op in "cur"]
    found = made(spark, *values, event("d", None), TOMBSTONE)
    assert found == ['{"id":1,"of":{"op":"d"}}'] * 3 + [None, None]


def test_an_event_with_its_schema_means_the_same(spark: Any) -> None:
    whole = [
        json.dumps({"schema": {"type": "struct"}, "payload": json.loads(value)})
        for value in (event("c", {"id": 1}), event("d", None))
    ]
    key = '{"schema":{"type":"struct"},"payload":{"id":1}}'
    assert made(spark, *whole, TOMBSTONE, key=key) == ['{"id":1}', None, None]


def test_a_schema_of_null_is_an_envelopes_too(spark: Any) -> None:
    whole = [f'{{"schema":null,"payload":{event(op, {"id": 1})}}}' for op in "cd"]
    assert made(spark, *whole, key='{"schema":null,"payload":{"id":1}}') == ['{"id":1}', None]


@pytest.mark.parametrize(
    "key",
    [
        '{"schema":"public"}',
        '{"schema":"public","payload":1}',
        '{"schema":{"type":"struct"}}',
        '{"id":1,"payload":2,"schema":null}',
        '{"payload":{"id":1}}',
    ],
)
def test_a_key_may_have_columns_of_these_names(spark: Any, key: str) -> None:
    assert made(spark, event("c", {"id": 1}), key=key, becomes=key) == ['{"id":1}']


def test_the_key_of_an_envelope_may_be_one_value(spark: Any) -> None:
    key = '{"schema":{"type":"int32","optional":false},"payload":7}'
    assert made(spark, event("c", {"id": 7}), key=key, becomes="7") == ['{"id":7}']


def test_decimals_are_kept_as_strings(spark: Any) -> None:
    long, short = "12345678901234567890.123456789", "1.10"
    row = f'{{"price":"{long}","rate":{short}}}'
    (found,) = made(spark, f'{{"before":null,"after":{row},"op":"u"}}')
    assert found == f'{{"price":"{long}","rate":1.1}}'


@pytest.mark.parametrize("value", [event("t", None), event("u", None), "no JSON", "{}"])
def test_what_is_not_an_event_of_a_row_is_named(spark: Any, value: str) -> None:
    with pytest.raises(Exception, match="events-0 offset 1: no event of a row: ") as caught:
        made(spark, event("c", {"id": 1}), value)
    assert value in str(caught.value)
