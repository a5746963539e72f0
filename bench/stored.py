"""A log in an object store to measure: a prefix of a bucket of versitygw, on the loopback.

The server writes each object to the disk that is measured, and syncs none.
"""

from __future__ import annotations

import os
import secrets

from tests.object_store_server import BUCKET, StoreServer, fault

__all__ = ["BUCKET", "StoreServer", "fault", "make_secret", "options_at", "url_of"]


def make_secret() -> None:
    """Let this process, and those that it starts, have a secret of the server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, secrets.token_hex(16))


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
