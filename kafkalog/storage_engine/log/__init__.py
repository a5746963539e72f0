"""The seam of every log, wherever it lies: in a directory, or in an object store."""
