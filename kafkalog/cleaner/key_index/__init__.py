"""The index of a segment's keys: to look one up, and to read the latest records."""
