"""The index of a segment's keys: look up one key, and read the latest records."""
