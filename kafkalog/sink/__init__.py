"""Spark writes into a log: exactly once, with the columns and options of Spark's Kafka sink.

`df.writeStream.format("kafkalog")` and `df.write.format("kafkalog")` come here by themselves.
`Append` does the same inside `foreachBatch`, `in_order` brings the rows of a key into order first,
`upsert` takes a log's stream into databases.
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
    if name == "upsert":  # not for every task: it brings database clients
        return importlib.import_module("kafkalog.sink.upsert")
    raise AttributeError(f"module 'kafkalog.sink' has no attribute {name!r}")
