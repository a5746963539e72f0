"""Kafka's default partitioner, for columns of keys."""
