"""The disk of a broker that had groups of every type, and what Kafka's own tools say of it.

`python -m tests.conformance.group_disk` makes `tests/unit/storage_engine/groups.tar.xz`, with which
tests do without a broker.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.conformance.group_traffic import write_groups
from tests.conformance.installation import Program, chosen
from tests.conformance.kafka import KafkaBroker, dump_log_segments

ARCHIVE: Final = ROOT / "tests/unit/storage_engine/groups.tar.xz"
_SETTINGS: Final = {
    "offsets.topic.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "2",
}
_TOOL_SECONDS: Final = 120
_AT_ONCE: Final = 3
_LEFT_OUT: Final = (".index", ".timeindex", ".lock", "quorum-state")


class GroupDisk:
    """The directories of a broker that was killed, and what Kafka's tools said before."""

    def __init__(self, directory: Path, seeds: int) -> None:
        self.root = directory / "log-0"
        self.metadata = directory / "metadata"
        with KafkaBroker(directory, settings=_SETTINGS) as broker:
            programs = Program.CONSUMER_GROUPS, Program.SHARE_GROUPS
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                written = list(threads.map(partial(write_groups, broker), range(seeds)))
                self.groups, self.shared = threads.map(partial(self._rows, broker), programs)
            broker.kill()
        self.read = {group: read for each in written for group, read in each.read.items()}

    def _rows(self, broker: KafkaBroker, program: Program) -> list[dict[str, str]]:
        """Return what a tool prints of all groups, a row for each partition."""
        result = chosen().installation.run(
            program,
            *("--bootstrap-server", broker.bootstrap),
            *("--describe", "--all-groups", "--offsets", "--verbose"),
            directory=broker.directory,
            timeout=_TOOL_SECONDS,
        )
        assert result.status == 0, result.errors[-2000:]
        names: list[str] = []
        rows = []
        for words in filter(None, map(str.split, result.output.splitlines())):
            if words[0] == "GROUP":
                names = words
            elif len(words) == len(names):
                rows.append(dict(zip(names, words, strict=True)))
        return rows

    def logs(self, topic: str) -> list[Path]:
        """Return the files of a topic that have records."""
        paths = sorted(self.root.glob(f"{topic}-*/*.log"))
        return [path for path in paths if path.stat().st_size]

    def files(self) -> dict[str, list[Path]]:
        """Return the files of Kafka's own topics by the option that decodes them."""
        metadata = self.metadata / "__cluster_metadata-0"
        return {
            "--offsets-decoder": self.logs("__consumer_offsets"),
            "--transaction-log-decoder": self.logs("__transaction_state"),
            "--share-group-state-decoder": self.logs("__share_group_state"),
            "--cluster-metadata-decoder": sorted(
                path for path in metadata.iterdir() if path.suffix in (".log", ".checkpoint")
            ),
        }

    def printed(self, files: Mapping[str, Sequence[Path]]) -> list[list[str]]:
        """Return the sorted lines that kafka-dump-log prints with each option."""
        with ThreadPoolExecutor() as threads:
            outputs = list(threads.map(dump_log_segments, files.values(), files))
        return [sorted(filter(None, output.splitlines())) for output in outputs]


def archive(work: Path) -> None:
    """Write the archive: directories of a killed broker, and what the tools printed."""
    disk = GroupDisk(work, 2)
    files = disk.files()
    names = {
        option: [str(path.relative_to(work)) for path in paths] for option, paths in files.items()
    }
    lines = [
        [line for line in printed if not line.startswith("Dumping ")]
        for printed in disk.printed(files)
    ]
    said = {
        "groups": disk.groups,
        "shared": disk.shared,
        "read": disk.read,
        "files": names,
        "lines": dict(zip(files, lines, strict=True)),
    }
    (work / "said.json").write_text(json.dumps(said, indent=0))
    for path in work.rglob("*-delete"):
        shutil.rmtree(path)
    with tarfile.open(ARCHIVE, "w:xz") as made:
        for name in ("log-0", "metadata", "said.json"):
            made.add(work / name, name, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(_LEFT_OUT) else member


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        archive(Path(work))
    print(ARCHIVE.stat().st_size, "bytes")
