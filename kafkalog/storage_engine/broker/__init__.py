"""A broker's log directory: read as it is, loaded by Kafka's rules, adopted and given back."""
