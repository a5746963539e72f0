"""The Spark examples print what follows from the orders, whose sums are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples import shop_batch, shop_join, shop_sql, shop_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def spent(minutes: range) -> list[str]:
    """Orders and their sum by customer: order n is of customer n modulo 3, and costs n."""
    orders = {
        name: [n for n in minutes if n % 3 == i] for i, name in enumerate(("ann", "bob", "cem"))
    }
    return [f"{name} {len(amounts)} {sum(amounts)}" for name, amounts in orders.items()]


def test_the_batch_example_sums_up_an_hour(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shop_batch.main(shop_batch.run, shop_batch.__doc__, ["--path", str(tmp_path)]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert printed == ["at 10:30", *spent(range(60, 90)), "at 11:00", *spent(range(60, 120))]


def test_the_stream_example_writes_each_half_hour_once(spark: Any, tmp_path: Path) -> None:
    # The last order is of 12:19, so the watermark is 11:19: the window that ends at 11:30 is open.
    assert shop_stream.run(spark, tmp_path) == [
        f"{9 + window // 2:02}:{30 * (window % 2):02} {sum(range(30 * window, 30 * window + 30))}"
        for window in range(4)
    ]


def test_the_join_example_sees_customers_move(spark: Any, tmp_path: Path) -> None:
    assert shop_join.run(spark, tmp_path) == [
        "0 ann Oslo",
        "1 bob Rome",
        "2 cem Oslo",
        "3 ann Bern",
        "4 bob Rome",
        "5 cem None",
    ]


def test_the_sql_example_finds_the_table_as_it_is(spark: Any, tmp_path: Path) -> None:
    assert shop_sql.run(spark, tmp_path) == [
        "before",
        "Oslo 2",
        "Rome 1",
        "after",
        "Bern 1",
        "Rome 2",
    ]
