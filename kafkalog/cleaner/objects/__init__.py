"""Cleaning a partition in an object store: its turn, its round, its commit."""
