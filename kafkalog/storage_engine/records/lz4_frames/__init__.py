"""Ordinary lz4 frames, decompressed many at a time; the library does the others."""
