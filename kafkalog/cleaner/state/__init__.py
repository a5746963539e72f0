"""State files of a partition's cleaning: its figures, its last rounds, why it failed."""
