"""Transactions: producer states, control records, aborted transactions, markers, outcomes."""
