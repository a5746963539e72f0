"""Erasing keys: their deletions written, the log cleaned, and every file searched for a trace."""
