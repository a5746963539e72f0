"""Remake a log that an old build of kafkalog has written: `old_logs/NAME.tar.xz`.

The archives' names say how many numbers the build wrote for a partition of a journal or an extent
of a commit. Run this file with PYTHONPATH at a work tree of the build's commit; builds before
`39e6ff2b` need numba too. The commits are:

    directory-8-numbers, -cleaned   6224af61   store-8-numbers           5e9d2167
    directory-9-numbers             b86a80d2   store-8-numbers-cleaned   4ef9f1e6
    directory-10-numbers            52f4ddde   store-9-numbers           6cc45240
    directory-10-numbers-keys-1     e11b3ecc   store-11-numbers          6e712690
    directory-10-numbers-keys-2     39e6ff2b   store-12-numbers          73bb5d2c
    directory-11-numbers            73bb5d2c

Logs are cleaned twice except in `directory-8-numbers`, `directory-9-numbers` and `store-8-numbers`.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import kafkalog

START_MS = 1_700_000_000_000
SNAPSHOT_COMMITS = 10
PARTITIONS = {"changes": 2, "plain": 1}
NOT_CLEANED = {"directory-8-numbers", "directory-9-numbers", "store-8-numbers"}


def rows_of(log: Any) -> dict[str, list[list[Any]]]:
    """Return offset, key and value of every record, by `topic-partition`."""
    found: dict[str, list[list[Any]]] = {}
    for topic, count in PARTITIONS.items():
        for partition in range(count):
            rows = found[f"{topic}-{partition}"] = []
            for batch in log.read(topic, partition):
                for offset, *cells in zip(
                    *(batch[name].to_pylist() for name in ("offset", "key", "value")), strict=True
                ):
                    rows.append([offset, *(cell and cell.decode() for cell in cells)])
    return found


def _append(log: Any, first: int, commits: int, now_ms: int) -> None:
    for number in range(commits):
        ids = range(first + 6 * number, first + 6 * number + 6)
        rows = {
            "key": pa.array([b"k%d" % (n % 7) for n in ids]),
            "value": pa.array([None if n % 11 == 5 else b"v%03d" % n for n in ids], pa.binary()),
            "partition": pa.array([n % 7 % 2 for n in ids], pa.int32()),
        }
        log.append("changes", pa.table(rows), now_ms=now_ms + number * 1000)
        log.append("plain", [(None, b"p%03d" % (first + number))], now_ms=now_ms + number * 1000)


def _fill(log: Any, name: str) -> None:
    compact = {"cleanup.policy": "compact", "segment.ms": "4000"}
    log.create_topic("changes", 2, compact, now_ms=START_MS)
    kept = {} if name.startswith("directory-8") else {"retention.ms": "-1"}
    log.create_topic("plain", 1, {"cleanup.policy": "delete", **kept}, now_ms=START_MS)
    _append(log, 0, 6, START_MS)
    if name == "store-8-numbers":
        log.create_topic("gone", 1, now_ms=START_MS + 7000)
        log.append("gone", [(b"k", b"v")], now_ms=START_MS + 7000)
        log.delete_topic("gone", now_ms=START_MS + 8000)
        _append(log, 100, 6, START_MS + 9000)
    if name not in NOT_CLEANED:
        for at_ms in (20_000, 40_000):
            log.clean("changes", force=True, now_ms=START_MS + at_ms)
            _append(log, at_ms // 400, 3, START_MS + at_ms + 1000)


def _stored(name: str) -> tuple[dict[str, bytes], dict[str, list[list[Any]]]]:
    from kafkalog.storage_engine.object_store import store_state
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.client import ObjectClient

    store_state.SNAPSHOT_COMMITS = SNAPSHOT_COMMITS
    url = "memory://old/log"
    with kafkalog.open(url) as log:
        _fill(log, name)
        rows = rows_of(log)
    client = ObjectClient(StoreAddress.parse(url))
    found = ((entry.name, client.get(entry.name)) for entry in client.list(""))
    return {name: bytes(stored.data) for name, stored in found if stored is not None}, rows


def _on_disk(name: str) -> tuple[dict[str, bytes], dict[str, list[list[Any]]]]:
    with tempfile.TemporaryDirectory() as root:
        with kafkalog.open(root) as log:
            _fill(log, name)
            rows = rows_of(log)
        files = [path for path in sorted(Path(root).rglob("*")) if path.is_file()]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}, rows


def main(name: str) -> None:
    """Write an archive: the files of a log under `log`, and its records."""
    files, rows = (_stored if name.startswith("store") else _on_disk)(name)
    content = {f"log/{path}": data for path, data in files.items()}
    content["records.json"] = json.dumps(rows).encode()
    with tarfile.open(f"{name}.tar.xz", "w:xz") as archive:
        for path, data in content.items():
            about = tarfile.TarInfo(path)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


if __name__ == "__main__":
    main(sys.argv[1])
