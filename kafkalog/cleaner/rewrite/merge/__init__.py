"""Batches that lost records are refilled from their neighbours (see `plan`)."""
