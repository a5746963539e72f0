"""Upserts into SQLite."""
