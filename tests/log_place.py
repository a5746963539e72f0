"""Where a test's log is: in a directory of its own, or below the address `KAFKALOG_TEST_PATH`.

With that variable the suites of tests/spark run on an object store, also on a user's own bucket.
Each log gets a prefix of its own. What a process of the tests has written is deleted as it ends.
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["TEST_PATH", "delete_logs", "in_a_directory", "log_in"]

TEST_PATH: Final = os.environ.get("KAFKALOG_TEST_PATH", "").rstrip("/")
_RUN: Final = f"{TEST_PATH}/kafkalog-{secrets.token_hex(4)}"


def log_in(directory: Path) -> Any:
    """Return the place of the log of a test with this directory: a path, or a URL.

    The log is created in a store, without the probe of some 600 requests that comes before.
    """
    if not TEST_PATH:
        return directory / "log"
    url = f"{_RUN}/{directory.name}"
    _create(url)
    return url


@functools.cache
def _create(url: str) -> None:
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.commit_log import CommitLog
    from tests.unit.storage_engine.store_log import WithoutProbe

    CommitLog.create(WithoutProbe(StoreAddress.parse(url)))


def in_a_directory(reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test whose log is always in a directory, and why."""
    return pytest.mark.skipif(bool(TEST_PATH), reason=f"only a directory has it: {reason}")


def delete_logs() -> None:
    """Delete the objects of this process's logs."""
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.client import ObjectClient

    client = ObjectClient(StoreAddress.parse(_RUN))
    client.delete([entry.name for entry in client.list("")])
