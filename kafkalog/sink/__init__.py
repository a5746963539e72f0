"""Spark writes into a log: exactly once, with the columns and options of Spark's Kafka sink.

The format "kafkalog" uses this package in `df.writeStream` and `df.write`. `Append` does the same
inside `foreachBatch`. `in_order` sorts the rows of each key first. The package `upsert` writes a
log's stream into databases.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kafkalog.sink.append import Append
from kafkalog.sink.order import in_order

if TYPE_CHECKING:
    from kafkalog.sink import upsert as upsert

__all__ = ["Append", "in_order"]


def __getattr__(name: str) -> Any:
    if name == "upsert":  # imported late, since it loads database clients
        return importlib.import_module("kafkalog.sink.upsert")
    raise AttributeError(f"module 'kafkalog.sink' has no attribute {name!r}")
