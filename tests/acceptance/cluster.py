"""A Spark standalone cluster on loopback: a master and two workers, each in a session of its own.

The workers have addresses of their own, so that Spark takes them for two hosts. Where mounting is
allowed (as root, on Linux) each worker also has a `/dev/shm` of its own, another machine's names,
and finds hidden directories empty: then what is not hidden is all that driver and executors share.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.spark_home import make_spark_home

MASTER_HOST = "127.0.0.1"
WORKER_HOSTS = ("127.0.0.2", "127.0.0.3")
SLOTS = 2
"""Tasks that a worker runs at a time."""
EXECUTOR_MB = 512
LIFETIME_S = 1800
"""An orphan ends by then; of a test that is killed nothing else would end it."""
PATIENCE_S = 240
SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_ALONE = """
set -e
mount --bind "$1" /proc/sys/kernel/random/boot_id
test ! -e /etc/machine-id || mount --bind "$1" /etc/machine-id
mount -t tmpfs none /dev/shm
"""


class Member:
    """A process of the cluster with all that it has started; it may be killed and started again."""

    def __init__(self, name: str, command: list[str], env: Mapping[str, str], scratch: Path):
        self.name = name
        self.command = command
        self.env = dict(env)
        self.scratch = scratch
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        scratch.mkdir(parents=True)

    @property
    def leader(self) -> int:
        """Its first process, which ends the others when their time is over."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> Path:
        return self.scratch / f"output-{self.starts}"

    def start(self) -> None:
        """Start it, for the first time or again."""
        assert self._process is None
        self.starts += 1
        limited = ["timeout", "--signal=KILL", str(LIFETIME_S), *self.command]
        with self.output.open("wb") as sink:
            self._process = subprocess.Popen(
                limited,
                env=self.env,
                cwd=self.scratch,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check_alive(self) -> None:
        assert self._process is not None
        is_alive = self._process.poll() is None
        assert is_alive, f"{self.name} has ended:\n{self.output.read_text()[-8000:]}"

    def wait_for(self, line: str) -> str:
        """Wait until it has written something that matches; returns the match's first group."""
        found: list[str] = []

        def is_there() -> bool:
            self.check_alive()
            found.extend(re.findall(line, self.output.read_text()))
            return bool(found)

        wait_until(is_there, f"{self.name} is not ready", pause=0.1)
        return found[0]

    def processes(self) -> list[int]:
        """Return it and all it has started."""
        return [] if self._process is None else session_processes(self._process.pid)

    def kill(self) -> int:
        """Kill it and all it has started, at once; returns how many processes that were."""
        if self._process is None:
            return 0
        count = kill_session(self._process)
        self._process = None
        return count


class Cluster:
    """A master and its workers below `directory`; `hidden` is what the workers must not see.

    In a directory that is hidden a worker finds its own scratch directory, and Spark.
    """

    def __init__(self, directory: Path, hidden: Path) -> None:
        self.home = make_spark_home(directory / "spark")
        self._directory = directory
        self._hidden = hidden
        self.master = Member(
            "master",
            self._command("master.Master", MASTER_HOST),
            self._env(MASTER_HOST, directory / "master"),
            directory / "master",
        )
        self.workers: list[Member] = []
        self.is_isolated = bool(self.prefix(directory / "master"))
        self.address = ""

    def prefix(self, scratch: Path) -> list[str]:
        """Return what stands before a command that sees of all that is hidden its scratch alone."""
        kept = [each for each in (scratch, self.home) if each.is_relative_to(self._hidden)]
        return alone(self._hidden, self._directory / "boot-id", kept)

    def start(self) -> None:
        """Start all. A driver may connect: Spark's tasks wait for the workers' executors."""
        self.master.start()
        self.address = self.master.wait_for(r"Starting Spark master at (spark://\S+)")
        for host in WORKER_HOSTS:
            scratch = self._directory / host
            command = [
                *self._command("worker.Worker", host),
                *("--cores", str(SLOTS), "--memory", f"{SLOTS * EXECUTOR_MB}m"),
                *("--work-dir", str(scratch / "work"), self.address),
            ]
            worker = Member(host, command, self._env(host, scratch), scratch)
            worker.command = [*self.prefix(scratch), *command]
            self.workers.append(worker)
            worker.start()

    def check_isolation(self) -> None:
        """No process of a worker may see the driver's files or shared memory, or its machine's id.

        `timeout`, which stands outside and starts the rest, is not asked.
        """
        mark = self._hidden / f"mark-{secrets.token_hex(8)}"
        mark.touch()
        try:
            for worker in self.workers:
                inside = [pid for pid in worker.processes() if pid != worker.leader]
                assert inside, f"{worker.name} has no processes"
                for pid in inside:
                    _check_alone(pid, mark, f"{worker.name}, process {pid}")
        finally:
            mark.unlink()

    def stop(self) -> None:
        """Kill all that still runs."""
        for member in [*self.workers, self.master]:
            member.kill()

    def _command(self, name: str, host: str) -> list[str]:
        launcher = str(self.home / "bin" / "spark-class")
        ports = ("--port", "0", "--webui-port", "0")
        return [launcher, f"org.apache.spark.deploy.{name}", "--host", host, *ports]

    def _env(self, host: str, scratch: Path) -> dict[str, str]:
        """Return the environment of one host; executors inherit it from their worker."""
        return {
            **os.environ,
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_DIRS": str(scratch / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": SMALL_JVM,
            "TMPDIR": str(scratch),
        }


def directory_of_cluster() -> tempfile.TemporaryDirectory[str]:
    """Make a directory that is not in `/dev/shm`: each worker has another one there."""
    return tempfile.TemporaryDirectory(prefix="kafkalog-cluster-")


def alone(hidden: Path, boot_id: Path, kept: Sequence[Path] = ()) -> list[str]:
    """Return what stands before a command that is to run as if on a machine of its own.

    Below `hidden` it finds the directories that are `kept` alone. The result is nothing where a
    process may not hide things from itself and those it starts.
    """
    if shutil.which("unshare") is None:
        return []
    boot_id.write_text("00000000-0000-4000-8000-000000000000\n")
    steps = []
    for number, path in enumerate(kept):
        steps += [f"mkdir /dev/shm/{number}", f"mount --bind {path} /dev/shm/{number}"]
    steps.append(f"mount -t tmpfs none {hidden}")
    for number, path in enumerate(kept):
        steps += [f"mkdir -p {path}", f"mount --move /dev/shm/{number} {path}"]
        steps += [f"rmdir /dev/shm/{number}"]
    script = "\n".join([_ALONE, *steps, *(f"cd {path}" for path in kept[:1]), 'shift && exec "$@"'])
    prefix = ["unshare", "--mount", "--ipc", "sh", "-c", script, "sh", str(boot_id)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if tried.returncode == 0 else []


def _check_alone(pid: int, hidden: Path, name: str) -> None:
    """A process must not see a hidden file, nor share what `alone` gives it."""
    root = Path(f"/proc/{pid}/root")
    assert not (root / hidden.relative_to("/")).exists(), f"{name} sees {hidden}"
    for kind in ("mnt", "ipc"):
        own, ours = (os.readlink(f"/proc/{p}/ns/{kind}") for p in (pid, "self"))
        assert own != ours, f"{name} shares {kind}"
    for path in ("dev/shm", "proc/sys/kernel/random/boot_id"):
        inner, outer = (base / path for base in (root, Path("/")))
        assert not inner.samefile(outer), f"{name} sees {outer}"


def may_isolate() -> bool:
    """Return whether this is root on Linux and may make namespaces, so that `alone` has to work."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    made = subprocess.run(["unshare", "--mount", "--ipc", "true"], capture_output=True, check=False)
    return made.returncode == 0


def session_processes(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            # pid (name) state parent group session ...; a name may hold anything
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(directory.name))
    return found


def kill_session(leader: subprocess.Popen[bytes]) -> int:
    """Kill every process of the session that a process leads; returns how many there were."""
    killed: set[int] = set()
    while found := session_processes(leader.pid):
        for pid in found:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(0.005)
    leader.wait()
    return len(killed)


def wait_until(is_true: Callable[[], object], otherwise: str, pause: float = 0.02) -> None:
    """Wait for something to be true; raises AssertionError after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"{otherwise} after {PATIENCE_S} s"
        time.sleep(pause)
