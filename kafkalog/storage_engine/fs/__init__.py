"""Files, locks, this host and the clock: no other room opens, lists, changes, syncs or locks files.

`files` and `locks` are for the other rooms. `file_system` makes the calls of the operating system,
and is where a test gives other ones. Existence and size of a file are asked of the system anywhere.
"""
