"""The log: layouts, batches, files, segments, the journal. Start with `engine.Engine`."""
