"""The rules of a log, each tested in both places that a log may be in: see `places`."""
