"""Runs the commands of the Dockerfile in a chroot: where no engine builds images, or to be quick.

`python -m tests.acceptance.dockerfile_chroot [--base DIRECTORY] [--build]`, as root on Linux. The
base is a system's directory, such as `debootstrap` makes; without it, it is this machine's own.
Either is the lower layer of an overlay, so it is left as it was, and all that is done is gone at
the end. `--build` leaves out the command that a container runs.

On this machine's own system `apt-get install` only checks that the packages are there, and the
checkout comes with its virtual environment. On another base everything is installed, in minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests import ROOT

KNOWN: Final = ("FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD")
_INSTALLED: Final = """#!/bin/sh
[ "$1" = install ] || exit 0
for word; do case $word in -*|install) ;; *) dpkg-query --show "$word" || exit ;; esac; done
"""
_NETWORK: Final = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/pip.conf",
    "/etc/ssl/certs",
    "/usr/local/share/ca-certificates",
)
"""What a container gets from its engine, or from its host's certificates."""

_MOUNTS = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs {place}
mkdir {place}/up {place}/work {place}/root {place}/up-log {place}/work-log
mount -t overlay overlay -o lowerdir={base},upperdir={place}/up,workdir={place}/work,metacopy=on \
    {place}/root
mount -t proc proc {place}/root/proc
mount --rbind /dev {place}/root/dev
"""
_CHECKOUT = """
mkdir -p {place}/root{directory}
mount -t overlay overlay -o \
lowerdir={checkout},upperdir={place}/up-log,workdir={place}/work-log,metacopy=on \
    {place}/root{directory}
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, (name, argument) each; raises ValueError."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found = [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines) if name
    ]
    unknown = {name for name, _ in found} - set(KNOWN)
    if unknown:
        raise ValueError(f"Dockerfile: {sorted(unknown)} (expected one of {KNOWN})")
    return found


def script(text: str, place: Path, base: Path, checkout: Path, *, is_run: bool) -> str:
    """Return the shell script that does what a Dockerfile says, in a chroot."""
    lines = [_MOUNTS.format(place=place, base=base)]
    root, directory, user = place / "root", "/", "root"
    if base == Path("/"):
        lines.append(f"printf %s {shlex.quote(_INSTALLED)} > {root}/usr/local/sbin/apt-get")
        lines.append(f"chmod a+x {root}/usr/local/sbin/apt-get {root}/root")  # Python may lie there
    else:
        lines += [f"cp -RL --parents {name} {root} || true" for name in _NETWORK]

    def run(command: str) -> str:
        home = f"/home/{user}" if user != "root" else "/root"
        within = f"export HOME={home} && cd {shlex.quote(directory)} && {command}"
        return f"chroot --userspec={user} {root} /bin/sh -c {shlex.quote(within)}"

    for name, argument in instructions(text):
        lines.append(f"echo {shlex.quote(f'--- {name} {argument}')}")
        if name == "WORKDIR":
            directory = argument
        elif name == "COPY":
            if argument != ". .":
                raise ValueError(f"Dockerfile: COPY {argument} (expected COPY . .)")
            lines.append(_CHECKOUT.format(place=place, checkout=checkout, directory=directory))
        elif name == "USER":
            user = argument
        elif name == "RUN" or (name == "CMD" and is_run):
            lines.append(run(argument if name == "RUN" else shlex.join(json.loads(argument))))
    return "\n".join(lines)


def main() -> int:
    """Run them; return the exit status of the first command that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, default=Path("/"), help="the system's directory")
    parser.add_argument("--build", action="store_true", help="without the container's command")
    options = parser.parse_args()
    base = options.base.resolve()
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("tests.acceptance.dockerfile_chroot: needs root on Linux")
    with tempfile.TemporaryDirectory(prefix="kafkalog-image-") as directory:
        place = Path(directory, "place")
        place.mkdir()
        checkout = ROOT
        if base != Path("/"):  # without what .dockerignore names
            checkout = Path(directory, "checkout")
            subprocess.run(["git", "clone", "-q", f"file://{ROOT}", checkout], check=True)
        image = (ROOT / "Dockerfile").read_text()
        text = script(image, place, base, checkout, is_run=not options.build)
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", text]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
