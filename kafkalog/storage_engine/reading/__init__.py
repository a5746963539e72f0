"""Reading: a partition at one moment, its chunks, lookups of times, pins."""
