"""Copies of a log in a store in memory, each in a store of its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import obstore

from kafkalog.storage_engine.object_store import client
from kafkalog.storage_engine.object_store.address import StoreAddress

__all__ = ["Stores", "memory_address", "other"]


class Stores:
    """The objects of one log, and fresh copies of them; a new copy ends the ones before."""

    def __init__(self, address: StoreAddress) -> None:
        store = _store(address)
        paths = [entry["path"] for page in obstore.list(store) for entry in page]
        start = len(f"{address.prefix}/")
        self.objects: Mapping[str, bytes] = {
            path[start:]: bytes(obstore.get(store, path).bytes()) for path in paths
        }

    def fresh(self, changed: Mapping[str, bytes | None] = {}) -> StoreAddress:
        """Return the address of a copy in which some objects have other bytes, or are missing."""
        client._memory_stores.clear()
        address = memory_address()
        store = _store(address)
        for name, data in {**self.objects, **changed}.items():
            if data is not None:
                obstore.put(store, f"{address.prefix}/{name}", data)
        return address


def memory_address() -> StoreAddress:
    """Return the address of a log in a new store."""
    return StoreAddress.parse(f"memory://{secrets.token_hex(8)}/log")


def other(address: StoreAddress, name: str) -> StoreAddress:
    """Return the address of another log in the same store."""
    return StoreAddress.parse(f"memory://{address.bucket}/{name}")


def _store(address: StoreAddress) -> Any:
    return client._opened(address, 1.0, None, client.UsersCredentials.of(address))
