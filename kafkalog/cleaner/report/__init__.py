"""Reports: the state of each partition, and why it is as it is."""
