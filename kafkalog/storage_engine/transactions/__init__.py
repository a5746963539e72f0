"""Transactions: producer states, aborted transactions, markers, outcomes."""
