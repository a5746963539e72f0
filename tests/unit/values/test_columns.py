from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.values import columns, spark_avro


def test_an_argument_of_another_name_is_refused() -> None:
    misspelt: Any = {"json": "id int", "envlope": "debezium"}
    frame: Any = None
    with pytest.raises(InvalidInputError, match=r"no argument envlope= \(expected envelope=\)"):
        columns.value_columns(frame, **misspelt)


@pytest.mark.parametrize(
    ("name", "other", "is_same"),
    [("a", "A", True), ("\u00c4", "\u00e4", True), ("stra\u00dfe", "strasse", False),
     ("\ufb01rma", "firma", False)],
)  # fmt: skip
def test_names_are_the_same_where_their_lower_case_is(name: str, other: str, is_same: bool) -> None:
    """As in Spark; a folding that goes further would refuse columns that Spark tells apart."""
    conf = SimpleNamespace(get=lambda key, otherwise: otherwise)
    frame: Any = SimpleNamespace(sparkSession=SimpleNamespace(conf=conf))
    same = spark_avro.comparison(frame)
    assert (same(name) == same(other)) is is_same
    if is_same:
        with pytest.raises(InvalidInputError, match="the same to Spark"):
            columns._check_distinct([name, other], same)
    else:
        columns._check_distinct([name, other], same)
