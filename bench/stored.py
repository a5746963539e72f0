"""A log in an object store to measure: a prefix of a bucket of versitygw, on the loopback.

The server writes each object to the disk that is measured, and syncs none.
"""

from __future__ import annotations

from tests.object_store_server import BUCKET, StoreServer, fault

__all__ = ["StoreServer", "fault", "options_at", "url_of"]


def url_of(name: str) -> str:
    """Return the URL of a log of that name."""
    return f"s3://{BUCKET}/{name}"


def options_at(port: int) -> dict[str, str]:
    """Return Spark's options for the server, or for a proxy before it, at a port."""
    return {
        "store.endpoint": f"http://127.0.0.1:{port}",
        "store.region": "us-east-1",
        "store.allow_http": "true",
    }
