"""The entry by which Spark finds `format("kafkalog")`: it imports all modules named `pyspark_*`."""

from kafkalog.datasource.source import KafkaLogDataSource as DefaultSource

__all__ = ["DefaultSource"]
