"""Hosts with a network of their own, joined to this one by a cable: namespaces of Linux.

A process that does nothing else keeps a namespace; with it the cable is gone. It needs root on
Linux. Without that, tests are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

__all__ = ["Host", "host"]

_ENTERED = 'ip link set lo up && ip addr add "$1" dev eth0 && ip link set eth0 up'


@dataclass(frozen=True)
class Host:
    """A host with another network; `address` is where it finds this one."""

    address: str
    prefix: Sequence[str]
    """Stands before a command that is to run there."""


@contextlib.contextmanager
def host() -> Iterator[Host]:
    """Make a host; skip the test where that cannot be done."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root on Linux, to make a network namespace")
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    keeper = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    cable = f"kl{secrets.token_hex(5)}"
    # 198.18.0.0/15 is for tests of networks; four addresses each.
    net = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
    first = 4 * secrets.randbelow(64)
    here, there = (f"{net}.{first + number}" for number in (1, 2))
    prefix = ["nsenter", "--target", str(keeper.pid), "--net"]
    try:
        if keeper.stdout.readline() != "ready\n":
            pytest.skip(f"may not make a network: {keeper.communicate()[1].strip()}")
        _run(
            "ip",
            "link",
            "add",
            cable,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(keeper.pid),
        )
        _run("ip", "addr", "add", f"{here}/30", "dev", cable)
        _run("ip", "link", "set", cable, "up")
        _run(*prefix, "sh", "-c", _ENTERED, "sh", f"{there}/30")
        yield Host(here, prefix)
    finally:
        subprocess.run(["ip", "link", "del", cable], capture_output=True, check=False)
        keeper.communicate()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
