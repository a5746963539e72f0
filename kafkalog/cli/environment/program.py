"""Runs a program for what it prints about itself."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

_PATIENCE_S: Final = 60


def printed_by(command: Sequence[str]) -> tuple[str, str]:
    """Return what a program prints, and why it cannot be run: one of both may be empty."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PATIENCE_S} s"
    except OSError as fault:
        return "", fault.strerror or str(fault)
    return done.stdout.decode(errors="replace"), ""
