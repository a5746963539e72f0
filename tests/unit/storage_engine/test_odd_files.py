"""Files of a log are regular files: nothing else in their place is followed, waited for or taken.

And what kafkalog makes has the rights that the umask leaves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.storage_engine.odd_files import ENVIRONMENT, Case, all_cases, make_templates

PORTIONS = 8


def violations(cases: Sequence[Case], place: Path) -> list[str]:
    """Do cases in one process, whose memory is bounded; return what is wrong."""
    order = place / "order.json"
    templates = make_templates(place)
    text = json.dumps({"templates": templates, "place": str(place / "work"), "cases": cases})
    order.write_text(text)
    command = [sys.executable, "-m", "tests.unit.storage_engine.odd_files", str(order)]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    found = [line for line in lines if not line.startswith("begins")]
    if done.returncode:
        found.append(f"{lines[-1:]}: ended with {done.returncode}: {done.stderr[-2000:]}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_every_kind_of_file_in_place_of_every_file(portion: int, tmp_path: Path) -> None:
    """Time and memory are bounded, no link is followed, and `verify` calls none of it whole."""
    assert violations([*all_cases()][portion::PORTIONS], tmp_path) == []


MAKE = """
import os, sys, kafkalog
os.umask(int(sys.argv[2], 8))
log = kafkalog.open(sys.argv[1])
log.create_topic("t", config={"segment.bytes": "150"})
producer = log.producer("t")
for number in range(9):
    log.append("t", [(f"k{number % 3}", str(number))])
producer.send("k1", "2")
producer.close()
log.clean("t", force=True)
log.create_topic("u"); log.delete_topic("u")
log.status(); log.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("umask", ["000", "002", "022", "027", "077"])
def test_what_is_made_has_the_rights_that_the_umask_leaves(umask: str, tmp_path: Path) -> None:
    root = tmp_path / "log"
    subprocess.run([sys.executable, "-c", MAKE, str(root), umask], check=True)
    left = 0o777 & ~int(umask, 8)
    for path in (root, *root.rglob("*")):
        wanted = left if path.is_dir() else left & 0o666
        assert path.stat().st_mode & 0o777 == wanted, path
