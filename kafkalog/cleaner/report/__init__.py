"""Reports: the state of each partition, and the reasons for it."""
