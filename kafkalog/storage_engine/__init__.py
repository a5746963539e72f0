"""The log: layouts, batches, files, segments, the journal. Start with `log.log.Log`."""
