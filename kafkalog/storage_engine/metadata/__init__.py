"""Metadata: the journal, the state it publishes, configs, checkpoints, owners."""
