"""Writing: staged files, the commit, appends, retention and deletion."""
