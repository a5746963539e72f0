"""Debezium's events in Avro, and written framed values; see `debezium_avro_rules`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.values.avro_process import run_rules

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_events_in_avro_give_rows_and_rows_become_framed_values(tmp_path: Path) -> None:
    run_rules(Path(__file__).with_name("debezium_avro_rules.py"), tmp_path)
