"""What Spark and a log need of this host and this environment, for `kafkalog doctor`."""
