"""Upserts: `foreachBatch` callables that keep a database table equal to a log's latest records.

    log.writeStream.foreachBatch(SQLiteUpsert("inventory.db", "stock")).start()

Each micro-batch reaches the database in one transaction together with the position it brings the
table to: a repeated micro-batch changes nothing, and the table itself says how far it is.
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
"""Each brings a database client, of which a program needs one."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = importlib.import_module(f"kafkalog.sink.upsert.{_HOMES[name]}")
        return getattr(home, name)
    raise AttributeError(f"module 'kafkalog.sink.upsert' has no attribute {name!r}")
