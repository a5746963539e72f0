"""The commands of the Dockerfile run, in a chroot; `make image-test` runs them on a bare Debian."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.acceptance.dockerfile_chroot import instructions

pytestmark = pytest.mark.slow
IMAGE = (ROOT / "Dockerfile").read_text()


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="chroot needs root on Linux"
)
def test_every_command_that_builds_the_image_runs() -> None:
    command = [sys.executable, "-m", "tests.acceptance.dockerfile_chroot", "--build"]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line[4:] for line in done.stdout.splitlines() if line.startswith("--- ")]
    assert shown == [" ".join(one) for one in instructions(IMAGE)]


def test_an_instruction_that_the_chroot_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="ENTRYPOINT"):
        instructions('FROM debian\nENTRYPOINT ["make"]\n')
