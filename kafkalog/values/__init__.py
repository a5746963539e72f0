"""The values of records: JSON and Avro documents, schema registries, envelopes."""
