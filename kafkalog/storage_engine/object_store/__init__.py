"""A log in an object store: its client, and the commit log that decides who commits."""
