"""Upserts into PostgreSQL."""
