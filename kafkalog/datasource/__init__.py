"""Spark's way into the log: batch and streaming reads. Start with `source.KafkaLogDataSource`."""

__all__: list[str] = []
