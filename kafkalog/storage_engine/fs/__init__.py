"""The file system: the only place that opens, syncs, renames and locks."""
