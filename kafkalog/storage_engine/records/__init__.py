"""Records: Arrow columns from batches, and batches from Arrow columns."""
