"""An upsert into PostgreSQL, and each way to apply rows by it; other targets have their own."""

from __future__ import annotations

import pytest

from kafkalog.sink.upsert import PostgresUpsert
from tests.unit.sink.postgres_rows import Apply, apply_small, by_tasks


@pytest.fixture
def upsert(postgres: str) -> PostgresUpsert:
    return PostgresUpsert(postgres, "stock")


@pytest.fixture(params=[apply_small, by_tasks])
def apply(request: pytest.FixtureRequest) -> Apply:
    way: Apply = request.param
    return way
