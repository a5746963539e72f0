"""A log in a directory: its commits, its retention, its snapshots and its pins."""
