"""What may stand in place of a log's file on a rescued disk, and what is then done with the log.

    python -m tests.unit.storage_engine.odd_files ORDER.json

The order has the two templates, a directory to work in, and the cases: template, file, kind, act.
Every case gets a copy of its template. The process has a limit of memory and an alarm, and it
prints each case that it begins, and what is wrong with it. It may be killed: its parent
(`test_odd_files`) tells by the last line which case that was.

An act ends in an error of ours, or in the right result. Nothing that a link leads to changes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import kafkalog
from kafkalog import cli
from kafkalog.errors import KafkaLogError
from kafkalog.inspection.dump import dump_file
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests.torture.memory import forget
from tests.unit.storage_engine.sample_root import NOW_MS, Root, varied

OURS, BROKERS = "ours", "broker's"
MEMORY: Final = 1 << 30
"""Bytes that a process may have: Python with Arrow, a buffer of 256 MiB, and no terabyte."""
ENVIRONMENT: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Arrow's other pools reserve more than that."""
SECONDS: Final = 60
"""For a case, on a machine that is busy; it takes some milliseconds."""
_TERABYTE: Final = 1 << 40
_PRECIOUS: Final = b"root:x:0:0\n"


class Case(NamedTuple):
    template: str
    file: str
    kind: str
    act: str


# --- what stands in place of a file --------------------------------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        made.bind(path.name)
        os.chdir(before)


def _outside(path: Path) -> Path:
    """Return a directory out of the log, beside its root."""
    root = path.parent if path.parent.name == "log" else path.parent.parent
    return root.with_name("outside")


def _device(minor: int) -> Callable[[Path], None]:
    return lambda path: os.mknod(path, 0o020_644, os.makedev(1, minor))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, _TERABYTE)


KINDS: Final[dict[str, Callable[[Path], None]]] = {
    "a pipe": os.mkfifo,
    "a link to a file": lambda path: path.symlink_to(_outside(path) / "precious"),
    "a link to a directory": lambda path: path.symlink_to(_outside(path)),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(_outside(path) / "nothing"),
    "a directory": Path.mkdir,
    "a socket": _socket,
    "/dev/zero": _device(5),
    "/dev/null": _device(3),
    "a terabyte of zeros": _sparse,
    "the file and a terabyte of zeros": _sparse,
    "an empty file": Path.touch,
}
REGULAR: Final = {"a terabyte of zeros", "the file and a terabyte of zeros", "an empty file"}
DEVICES: Final = {"/dev/zero", "/dev/null"}
"""Only root makes them."""

# --- what is done with the log -------------------------------------------------------------------


def _read(root: Path) -> Any:
    log = kafkalog.open(root, read_only=True)
    return [batch.to_pylist() for batch in log.read("t", 0)]


def _latest(root: Path) -> Any:
    return kafkalog.open(root, read_only=True).table("t").to_pylist()


def _lookup(root: Path) -> Any:
    log = kafkalog.open(root, read_only=True)
    return [log.lookup("t", key) for key in ("k1", "none")]


def _times(root: Path) -> Any:
    log = kafkalog.open(root, read_only=True)
    return [log.offset_for_time("t", time) for time in (0, 1 << 50)]


def _verify(root: Path) -> list[str]:
    return [str(found.path) for found in verify(root, deep=True, now_ms=NOW_MS) if found.is_damage]


def _writes(act: Callable[[kafkalog.KafkaLog], object]) -> Callable[[Path], None]:
    def done(root: Path) -> None:
        with kafkalog.open(root) as log:
            act(log)

    return done


def _produce(log: kafkalog.KafkaLog) -> None:
    with log.producer("t") as producer:
        producer.send("k1", "2")


def _command(*arguments: str) -> Callable[[Path], None]:
    def done(root: Path) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            status = cli.run([*arguments[:1], str(root), *arguments[1:]])
        assert status in (0, 1, 2), f"status {status}: {said.getvalue()}"

    return done


ACTS: Final[dict[str, Callable[[Path], object]]] = {
    "read": _read,
    "latest": _latest,
    "lookup": _lookup,
    "times": _times,
    "verify": _verify,
    "status": lambda root: kafkalog.open(root, read_only=True).status(now_ms=NOW_MS),
    "explain": lambda root: kafkalog.open(root, read_only=True).explain(now_ms=NOW_MS),
    "copy": lambda root: kafkalog.copy(root, root.with_name("copy")),
    "adopt": lambda root: adopt(root, now_ms=NOW_MS),
    **{
        f"kafkalog {verb}": _command(verb, *more)
        for verb, *more in (["status"], ["verify"], ["read", "t"], ["tail", "t"], ["groups"])
    },
}
WRITES: Final[dict[str, Callable[[Path], object]]] = {
    "append": _writes(lambda log: log.append("t", [("new", "1")])),
    "produce": _writes(_produce),
    "clean": _writes(lambda log: log.clean("t", force=True)),
    "turn": _writes(lambda log: log.clean(now_ms=NOW_MS)),
    "erase": _writes(lambda log: log.erase("t", ["k1"])),
    "create": _writes(lambda log: log.create_topic("u")),
    "delete": _writes(lambda log: log.delete_topic("t")),
    "release": lambda root: release(root, now_ms=NOW_MS),
}
_ANSWERS: Final = {"read", "latest", "lookup", "times"}
_DUMP: Final = "dump"

# --- the templates -------------------------------------------------------------------------------

_OF_PARTITION: Final = ("partition.metadata", "leader-epoch-checkpoint")
_OF_ROOT: Final = (
    *(".lock", "cleaner-offset-checkpoint", "log-start-offset-checkpoint"),
    *("recovery-point-offset-checkpoint", "replication-offset-checkpoint"),
)
_SUFFIXES: Final = (".log", ".index", ".timeindex")
FILES: Final = {
    OURS: (
        *_OF_ROOT,
        *("commit", "kl-commit.lock", "kl-ended-pins", "kl-pin-x", "kl-x-0-0-0.staged"),
        *(f"t-0/{name}" for name in _OF_PARTITION),
        *(f"t-0/{base:020d}{suffix}" for base in (0, 4) for suffix in _SUFFIXES),
        *("t-0/00000000000000000000.log.deleted", "t-0/kl-canary.deleted"),
        *("t-0/kl-segments.lock", "t-0/kl-segments.turnstile", "t-0/kl-cleaner.lock"),
        *("t-0/kl-gaps", "t-0/kl-raw-gaps", "t-0/kl-last-cleaning", "t-0/kl-uncleanable"),
        *("t-0/kl-delete-horizon", "t-0/kl-00000000000000000000.keys"),
    ),
    BROKERS: (
        *_OF_ROOT,
        *("meta.properties", ".kafka_cleanshutdown", "bootstrap.checkpoint"),
        *(f"t-0/{name}" for name in _OF_PARTITION),
        *(f"t-0/{base:020d}{suffix}" for base in (0, 60) for suffix in _SUFFIXES),
        *("t-0/00000000000000000060.txnindex", "t-0/00000000000000000060.snapshot"),
        "t-0/00000000000000000073.snapshot",
    ),
}
"""Some are in no template: a dead process or a broker may leave them."""


def make_templates(place: Path) -> dict[str, str]:
    """Make a log of ours, and one of a broker; return their directories."""
    with (
        mock.patch.object(layout, "JOURNAL_SIZE", 8 << 10),  # a copy then costs little
        kafkalog.open(place / "ours") as log,
    ):
        log.create_topic("t", config={"segment.bytes": "150"})
        for number in range(4):
            log.append("t", [(f"k{number % 3}", str(number))])
        log.clean("t", force=True)
        log.append("t", [("k9", "1")])
    root = Root(place / "brokers", [varied()])
    root.give_to_a_broker()
    (root.path / "log-start-offset-checkpoint").write_text("0\n1\nt 0 0\n")
    (root.path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 60\n")
    return {OURS: str(place / "ours"), BROKERS: str(root.path)}


def all_cases() -> Iterator[Case]:
    """Yield everything that is done; devices only where this process may make them."""
    for template, names in FILES.items():
        acts = [*ACTS, _DUMP, *(WRITES if template == OURS else ())]
        for file in names:
            for kind in KINDS:
                if kind not in DEVICES or os.geteuid() == 0:
                    yield from (Case(template, file, kind, act) for act in acts)


# --- a case --------------------------------------------------------------------------------------


def _prepared(case: Case, template: str, place: Path) -> Path:
    """Return the root of a copy, with what stands in place of the file."""
    shutil.rmtree(place, ignore_errors=True)
    root = Path(shutil.copytree(template, place / "log"))
    (place / "outside").mkdir()
    (place / "outside" / "precious").write_bytes(_PRECIOUS)
    path = root / case.file
    data = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    KINDS[case.kind](path)
    if case.kind == "the file and a terabyte of zeros":
        with path.open("r+b") as file:
            file.write(data)
    return root


def _judged(case: Case, root: Path, right: object) -> str | None:
    """Do what a case says; return what is wrong."""
    acts = {**ACTS, **WRITES, _DUMP: lambda root: [*dump_file(root / case.file)]}
    try:
        found = acts[case.act](root)
    except KafkaLogError as fault:
        return f"an error that names nothing: {fault}" if "None" in str(fault) else None
    except BaseException:
        return traceback.format_exc()
    if case.act in _ANSWERS and case.template == OURS and found != right:
        return f"{found} instead of {right}"
    if case.act == "verify" and case.kind not in REGULAR and str(root / case.file) not in found:
        return f"called whole: {found}"
    return None


def _touched(place: Path) -> str | None:
    outside = place / "outside"
    if os.listdir(outside) != ["precious"] or (outside / "precious").read_bytes() != _PRECIOUS:
        return f"what lies out of the log was changed: {os.listdir(outside)}"
    return None


def main(order: Path) -> None:
    """Do all cases of an order."""
    given = json.loads(order.read_text())
    place = Path(given["place"])
    warnings.simplefilter("ignore")
    logging.disable()
    right = {act: ACTS[act](Path(given["templates"][OURS])) for act in _ANSWERS}
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for case in map(Case._make, given["cases"]):
        print("begins", *case, sep=" | ", flush=True)
        root = _prepared(case, given["templates"][case.template], place)
        forget()
        signal.alarm(SECONDS)
        fault = _judged(case, root, right.get(case.act)) or _touched(place)
        signal.alarm(0)
        if fault is not None:
            print("VIOLATION", *case, fault, sep=" | ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
