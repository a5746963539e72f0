"""Upserts into Delta tables."""
