"""Spark finds `format("kafkalog")` here, because it imports all modules named `pyspark_*`."""

from kafkalog.datasource.source import KafkaLogDataSource as DefaultSource

__all__ = ["DefaultSource"]
