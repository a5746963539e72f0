"""Spark Connect: each feature runs in a session of a local server and of a started one."""
