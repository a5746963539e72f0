"""Copies of a log: from a directory, a broker's or an object store, to a directory or a store."""
