"""What tests build: batches by hand, and logs through kafkalog itself."""
