"""Spark writes into a log: exactly once, with the columns and options of Spark's Kafka sink.

`df.writeStream.format("kafkalog")` and `df.write.format("kafkalog")` come here by themselves.
`Append` does the same inside `foreachBatch`, `in_order` brings the rows of a key into order first,
`upsert` takes a log's stream into databases.
"""

from kafkalog.sink.append import Append
from kafkalog.sink.order import in_order

__all__ = ["Append", "in_order"]
