"""Segments: files, indexes and gaps."""
