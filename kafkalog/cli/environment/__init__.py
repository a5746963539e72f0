"""Checks of this host and this environment, for `kafkalog doctor`: one module per part."""
