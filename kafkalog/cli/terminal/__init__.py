"""Output of the command line: tables, colours, bars, times and records."""
