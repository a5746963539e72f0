"""The loops over bytes, compiled: arrays in, arrays out.

Nothing here raises, allocates per record or knows a file. A kernel returns a status, and its caller
names the place in an error.

Bytes come from disks and strangers, so each kernel proves its bounds before it reads a byte.
Integers wrap like Java's. The test suite also runs builds with bounds checks and sanitizers.
"""
