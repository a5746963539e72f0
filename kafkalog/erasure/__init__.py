"""Erase keys: write tombstones, clean the log, and search every file for occurrences."""
