"""The cleaning of a log in a directory."""
