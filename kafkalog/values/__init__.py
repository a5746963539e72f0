"""What records hold: JSON and Avro documents, schema registries, envelopes."""
