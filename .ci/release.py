"""Makes a release: `python .ci/release.py [--publish]`, or `make release ARGS=--publish`.

It refuses unless what is committed can be this release. It then builds the sdist and this machine's
wheel, has twine check them, installs it with what users may add into a clean environment,
runs `kafkalog doctor` there, and lists what that environment has: a CycloneDX bill of materials.
All of it is in dist/. With --publish it pushes the tag. The job of .github/workflows/wheels.yml
then builds the wheels of every platform, and publishes them. --publish and the job have never been
run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "spark,connect,state,metrics,sqlite,postgres,object-store,schema-registry"
"""What users may add; the other extras are for work on kafkalog."""


def version_of(root: Path) -> str:
    """Return the version of a checkout, which three files have to name alike, with its day.

    Raises SystemExit.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    package = (root / "kafkalog" / "__init__.py").read_text()
    if f'__version__ = "{version}"\n' not in package:
        raise SystemExit(f"kafkalog/__init__.py: another version (expected {version}). Set it.")
    changelog = (root / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[(.+)\] - (.+)$", changelog, re.M)
    named, day = heading.groups() if heading else ("none", "none")
    if named != version or not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
        raise SystemExit(
            f"CHANGELOG.md: not the heading of a release (expected [{version}] and its day, found "
            f"[{named}] - {day}). Write the day."
        )
    return version


def check_repository(root: Path, tag: str) -> None:
    """Raise SystemExit if something is not committed, or if the tag is there."""
    if changed := _output(root, "git", "status", "--porcelain"):
        raise SystemExit(f"not committed:\n{changed}\nCommit it, or take it away.")
    if _output(root, "git", "tag", "--list", tag):
        raise SystemExit(f"the tag {tag} is there already. Raise the version.")


def build(root: Path, dist: Path) -> Path:
    """Build the sdist, and from it this machine's wheel; return the wheel."""
    shutil.rmtree(dist, ignore_errors=True)
    _run(root, sys.executable, "-m", "build", "--outdir", str(dist))
    files = sorted(map(str, dist.iterdir()))
    _run(root, sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = dist.glob("*.whl")
    return wheel


def try_out(root: Path, wheel: Path, bill: Path) -> None:
    """Install a wheel into a clean environment, run its doctor, and list what is there."""
    with tempfile.TemporaryDirectory(prefix="kafkalog-release-") as scratch:
        venv.create(scratch)
        commands = Path(scratch) / "bin"
        python = str(commands / "python")
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
        _run(Path(scratch), *pip, f"{wheel}[{EXTRAS}]")
        activated = os.pathsep.join([str(commands), os.environ["PATH"]])
        _run(Path(scratch), "env", f"PATH={activated}", str(commands / "kafkalog"), "doctor")
        bom = ("cyclonedx_py", "environment", "--pyproject", str(root / "pyproject.toml"))
        options = ("--mc-type", "library", "--output-reproducible", "--output-file", str(bill))
        _run(root, sys.executable, "-m", *bom, *options, python)


def publish(root: Path, tag: str) -> None:
    """Tag what is committed, and push the tag: the job that builds all wheels begins by it."""
    _run(root, "git", "tag", "--annotate", tag, "--message", f"kafkalog {tag.removeprefix('v')}")
    _run(root, "git", "push", "origin", tag)


def _output(root: Path, *command: str) -> str:
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def _run(cwd: Path, *command: str) -> None:
    if subprocess.run(command, cwd=cwd, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def main() -> None:
    """Make the release of what is committed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--publish", action="store_true", help="push the tag of the release")
    arguments = parser.parse_args()
    version = version_of(ROOT)
    check_repository(ROOT, f"v{version}")
    dist = ROOT / "dist"
    wheel = build(ROOT, dist)
    try_out(ROOT, wheel, dist / f"kafkalog-{version}.cdx.json")
    if arguments.publish:
        publish(ROOT, f"v{version}")


if __name__ == "__main__":
    main()
