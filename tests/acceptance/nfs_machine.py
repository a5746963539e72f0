"""A machine with a server of NFS and two clients: Linux in user mode, on this machine's files.

`python -m tests.acceptance.nfs_machine [PYTEST ARGUMENTS]`, as root. The kernel of this machine
need not know NFS: Debian's `user-mode-linux` is a kernel that runs as a process, and has the server
and the client. The server exports an ext4 disk. Both mounts are of it, by NFS 4.2 and by NFS 4.1.
So the server takes them for two clients, and each has caches and locks of its own.

By default the tests are those of two processes that write, append and clean at once, of a cleaner
that is killed, of a sink that dies at each step, and of readers that may not write. Kernels in user
mode start a process in seconds, so the sink dies once at moments that are alike.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.torture.scratch import ending

KERNEL: Final = "linux.uml"
MODULES: Final = Path("/usr/lib/uml/modules")
PACKAGES: Final = "user-mode-linux nfs-kernel-server nfs-common kmod iproute2"
DISK_SIZE: Final = 3 << 30
OPTIONS: Final = "nosharecache,actimeo=0,lookupcache=none"
"""`nosharecache` lets one host have two; the others are those that docs/cluster.md asks for."""
SETTINGS: Final = {"KAFKALOG_SECONDS": None, "KAFKALOG_STEPS": "once", "KAFKALOG_SEED": None}
"""Variables that the tests get, with what they are unless they are given."""
CHOSEN: Final = (
    "tests/acceptance/test_concurrency.py::test_two_processes_that_take_themselves_for_one_writer"
    "_write_every_batch_once",
    "tests/acceptance/test_concurrency.py::test_the_records_of_two_processes_that_append_are_there"
    "_once_and_in_order",
    "tests/acceptance/test_concurrency.py::test_two_cleaners_clean_nothing_twice_and_lose_nothing",
    "tests/acceptance/test_concurrent_cleaning.py",
    "tests/acceptance/test_killed_steps.py::test_a_death_at_any_step_of_a_commit_loses_and_doubles"
    "_nothing",
    "tests/acceptance/test_safety.py",
)

_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc && mount -t sysfs sys /sys
for place in /run /var/lib/nfs /mnt; do mount -t tmpfs tmpfs $place; done
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /mnt/a /mnt/b /mnt/disk
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
modprobe -d {place} nfsd && modprobe -d {place} nfsv4
ip link set lo up
mount /dev/ubda /mnt/disk
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
exportfs -o rw,no_root_squash,sync,fsid=0,no_subtree_check,insecure '127.0.0.0/8:/mnt/disk'
rpc.mountd -N 2 -N 3 -u
echo 10 > /proc/fs/nfsd/nfsv4leasetime
rpc.nfsd -N 3 -V 4.1 -V 4.2 8
mount -t nfs4 -o vers=4.2,{options} 127.0.0.1:/ /mnt/a
mount -t nfs4 -o vers=4.1,{options} 127.0.0.1:/ /mnt/b
grep nfs4 /proc/mounts
cd {root}
export HOME={place} TMPDIR=/mnt/a KAFKALOG_MOUNTS=/mnt/a:/mnt/b {settings}
{command} && touch {place}/passed
umount /mnt/a /mnt/b
echo o > /proc/sysrq-trigger
sleep 60
"""


def run(arguments: list[str]) -> bool:
    """Run pytest in the machine; return whether it passed."""
    with ending(), tempfile.TemporaryDirectory(prefix="kafkalog-nfs-") as directory:
        place = Path(directory)
        (place / "lib" / "modules").mkdir(parents=True)
        for modules in MODULES.iterdir():
            (place / "lib" / "modules" / modules.name).symlink_to(modules)
        disk = place / "disk"
        with disk.open("wb") as file:
            file.truncate(DISK_SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp=/mnt/a/t"]
        command = shlex.join([*pytest, *arguments])
        init = place / "init"
        given = {name: os.environ.get(name, default) for name, default in SETTINGS.items()}
        settings = shlex.join(f"{name}={value}" for name, value in given.items() if value)
        text = _INIT.format(
            place=place, options=OPTIONS, root=ROOT, command=command, settings=settings
        )
        init.write_text(text)
        init.chmod(0o755)
        machine = [KERNEL, "mem=3G", f"ubd0={disk}", "rootfstype=hostfs", "root=/dev/root"]
        machine += ["rootflags=/", "rw", f"init={init}", "con=null", "con0=null,fd:1", "quiet"]
        with subprocess.Popen(machine, stdin=subprocess.DEVNULL, process_group=0) as kernel:
            try:
                kernel.wait()
            finally:
                if kernel.poll() is None:  # its processes are processes of this machine
                    os.killpg(kernel.pid, signal.SIGKILL)
        return (place / "passed").exists()


def missing() -> str | None:
    """Say what the machine needs and is not there; None if it can run."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if shutil.which(KERNEL) is None or shutil.which("rpc.nfsd") is None or not MODULES.is_dir():
        return f"needs a kernel in user mode and a server of NFS: apt-get install {PACKAGES}"
    return None


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        sys.exit(f"tests.acceptance.nfs_machine: {reason}")
    sys.exit(not run(sys.argv[1:] or [*CHOSEN, "-sv", "--durations=10"]))
