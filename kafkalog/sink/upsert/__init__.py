"""Upserts: `foreachBatch` callables that keep a database table equal to a log's newest records.

    log.writeStream.foreachBatch(SQLiteUpsert("inventory.db", "stock")).start()

Each micro-batch is reduced to the newest record per key by Spark's tasks, and reaches the database
in one transaction together with its batch id: a repeated micro-batch changes nothing.
"""

from kafkalog.sink.upsert.sqlite import SQLiteUpsert

__all__ = ["SQLiteUpsert"]
