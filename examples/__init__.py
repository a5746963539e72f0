"""Programs that use kafkalog on real input; start with `git_table`."""
