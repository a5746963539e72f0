"""Values as columns: JSON, Avro, schema registries and change events."""
