"""Spark's reads of the log, in batches and streams. Start with `source.KafkaLogDataSource`."""

__all__: list[str] = []
