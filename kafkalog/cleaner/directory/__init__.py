"""Cleaning a partition in a log directory: its turn, its round, its swap."""
