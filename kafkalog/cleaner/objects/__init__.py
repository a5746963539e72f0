"""The cleaning of a log in an object store."""
