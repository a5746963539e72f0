"""One directory as two hosts see it: `KAFKALOG_MOUNTS=A:B` names two mounts of one file system.

Without it both are one directory of this machine. `make nfs-test` names two mounts of a server of
NFS, each a client of its own (`nfs_machine`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

__all__ = ["Mounts", "two_mounts"]

Mounts = tuple[Path, Path]


@pytest.fixture(name="mounts")
def two_mounts(tmp_path: Path) -> Mounts:
    """Return the two paths of a new directory."""
    given = os.environ.get("KAFKALOG_MOUNTS")
    if given is None:
        return tmp_path, tmp_path
    first, second = (Path(place) for place in given.split(":"))
    name = f"{tmp_path.name}-{secrets.token_hex(4)}"
    (first / name).mkdir()
    return first / name, second / name
