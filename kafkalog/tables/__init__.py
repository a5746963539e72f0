"""The files of materialized tables: their moment, manifests, and places."""
