"""This host and its boot: the journal asks by them what a power cut may have taken."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Name this boot of this host: unsynced bytes survive exactly as long as it lasts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@functools.cache
def host_id() -> str:
    """Name this host."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return os.uname().nodename
