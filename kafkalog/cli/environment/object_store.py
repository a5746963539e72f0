"""An object store: whether this process may use it, and whether it can hold a log."""

from __future__ import annotations

import secrets

from kafkalog.cli.environment.check import Check


def check_store(url: str) -> Check:
    """Check reading, listing, conditional writes and deletes below a URL; some 600 requests."""
    from kafkalog.errors import KafkaLogError
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.client import ObjectClient

    address = StoreAddress.parse(url)
    try:
        client = ObjectClient(address)
        client.probe(f"probe/{secrets.token_hex(16)}")
    except KafkaLogError as fault:
        place, separator, advice = str(fault).rpartition(". ")
        found, advice = (place, advice) if separator else (str(fault), "Correct it.")
        return Check("object store", found, advice)
    return Check("object store", f"{address}: conditional writes have one winner")
