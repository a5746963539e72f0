"""What every log offers, wherever it lies: in a directory, or in an object store."""
