"""Files of a log are regular files: nothing else in their place is followed, waited for or taken.

And what kafkalog makes has the rights that the umask leaves.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.inspection.dump import dump_file
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.ownership.adopt import adopt

TARGET = b"what a link leads to"


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "target")
    (path.parent / "target").write_bytes(TARGET)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        made.bind(path.name)
        os.chdir(before)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a symbolic link": make_link,
    "a directory": Path.mkdir,
    "a socket": make_socket,
}
SEGMENT, ACTIVE = "t-0/00000000000000000000", "t-0/00000000000000000004"
FILES = [
    *(f"{SEGMENT}{suffix}" for suffix in (".log", ".index", ".timeindex")),
    *(f"{ACTIVE}{suffix}" for suffix in (".log", ".index", ".timeindex")),
    *("commit", ".lock", "kl-commit.lock", "cleaner-offset-checkpoint"),
    *("t-0/kl-segments.lock", "t-0/kl-cleaner.lock", "t-0/partition.metadata"),
    *("t-0/leader-epoch-checkpoint", "t-0/kl-gaps", "t-0/kl-last-cleaning"),
    *("t-0/kl-delete-horizon", "t-0/kl-00000000000000000000.keys"),
]
ACTS: dict[str, Callable[[Path], object]] = {
    "read": lambda root: [*kafkalog.open(root, read_only=True).read("t", 0, 5)],
    "latest": lambda root: [*kafkalog.open(root, read_only=True).latest("t")],
    "lookup": lambda root: kafkalog.open(root, read_only=True).lookup("t", "k1"),
    "append": lambda root: kafkalog.open(root).append("t", [("new", "1")]),
    "clean": lambda root: kafkalog.open(root).clean("t", force=True),
    "status": lambda root: kafkalog.open(root, read_only=True).status(),
    "verify": lambda root: [*verify(root, deep=True)],
    "adopt": lambda root: adopt(root, now_ms=1),
    "dump": lambda root: [[*dump_file(path)] for path in root.glob("t-0/*.*[gx]")],
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd") / "log"
    with kafkalog.open(root) as log:
        log.create_topic("t", config={"segment.bytes": "150"})
        for number in range(4):
            log.append("t", [(f"k{number % 3}", str(number))])
        log.clean("t", force=True)
        log.append("t", [("k9", "1")])
    assert all((root / name).exists() for name in FILES)
    return root


@pytest.fixture
def deadline() -> Iterator[None]:
    """End a test that waits for ever."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.usefixtures("deadline")
def test_what_is_no_regular_file_is_an_error_of_ours_and_is_not_touched(
    file: str, kind: str, template: Path, tmp_path: Path
) -> None:
    for name, act in ACTS.items():
        root = tmp_path / name
        shutil.copytree(template, root)
        path = root / file
        path.unlink()
        KINDS[kind](path)
        try:
            act(root)
        except KafkaLogError as fault:
            assert "None" not in str(fault)
            if "expected a regular file" in str(fault):
                assert kind in str(fault) and file in str(fault)
        target = path.parent / "target"
        assert not target.exists() or target.read_bytes() == TARGET


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", [f"{SEGMENT}.log", f"{ACTIVE}.log", "commit"])
@pytest.mark.usefixtures("deadline")
def test_records_whose_file_is_no_regular_one_are_damage_and_are_not_read(
    file: str, kind: str, template: Path, tmp_path: Path
) -> None:
    root = tmp_path / "log"
    shutil.copytree(template, root)
    (root / file).unlink()
    KINDS[kind](root / file)
    assert any(found.is_damage for found in verify(root))
    if kind == "a directory" and file != "commit":
        return  # no segment has the name of a directory, so that one is missing
    with pytest.raises(StorageError, match=f"expected a regular file, found {kind}"):
        for _ in kafkalog.open(root, read_only=True).read("t", 0, 5):
            pass


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
