"""Upserts: `foreachBatch` callables that keep a database table equal to a log's latest records.

    log.writeStream.foreachBatch(SQLiteUpsert("inventory.db", "stock")).start()

One transaction of the database stores each micro-batch with the table's new position, so a repeated
micro-batch changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.upsert import Batch, Upsert

if TYPE_CHECKING:
    from kafkalog.sink.upsert.delta.upsert import DeltaUpsert as DeltaUpsert
    from kafkalog.sink.upsert.postgres.upsert import PostgresUpsert as PostgresUpsert
    from kafkalog.sink.upsert.sqlite.upsert import SQLiteUpsert as SQLiteUpsert

__all__ = ["Batch", "DeltaUpsert", "Position", "PostgresUpsert", "SQLiteUpsert", "Upsert"]

_HOMES = {
    "DeltaUpsert": "delta.upsert",
    "PostgresUpsert": "postgres.upsert",
    "SQLiteUpsert": "sqlite.upsert",
}
"""The module of each class. Each imports a database client, so it is imported on demand."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = importlib.import_module(f"kafkalog.sink.upsert.{_HOMES[name]}")
        return getattr(home, name)
    raise AttributeError(f"module 'kafkalog.sink.upsert' has no attribute {name!r}")
