"""Builders of what tests are given: batches by hand, and logs through the engine."""
