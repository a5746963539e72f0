"""The latest offset of each key: the offset map, and its spill when the buffer is full."""
