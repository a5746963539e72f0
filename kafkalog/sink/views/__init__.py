"""Views that Spark keeps: a log's latest records as a table of files."""
