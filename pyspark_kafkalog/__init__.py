"""Where Spark finds `format("kafkalog")`: it imports every top-level module named `pyspark_*`."""

from kafkalog.datasource.source import KafkaLogDataSource as DefaultSource

__all__ = ["DefaultSource"]
