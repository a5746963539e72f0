"""What the command line prints: tables, colours, bars, times and records."""
