"""Kafka's formats: names, batch headers, compression."""
