"""What is known of a partition's cleaning: its figures, its last round, why it failed."""
