"""Reading: snapshots of partitions, their chunks, lookups of times, pins."""
