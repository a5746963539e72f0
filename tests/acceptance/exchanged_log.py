"""A log that one processor writes and another reads: `python exchanged_log.py {write,show} DIR`.

Each prints a line of JSON: the bytes' digest of each file that Kafka defines, and what is read.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import kafkalog
from kafkalog.inspection.verify import verify

START_MS = 1_700_000_000_000
CODECS = ("uncompressed", "gzip", "snappy", "lz4", "zstd")
SMALL = {"segment.bytes": "20000", "index.interval.bytes": "512"}
KAFKAS = {".log", ".index", ".timeindex", ".txnindex"}


def write(root: Path) -> None:
    """Write a topic of each codec, with headers and tombstones, and clean each."""
    with kafkalog.open(root) as log:
        for codec in CODECS:
            config = {"compression.type": codec, "cleanup.policy": "compact"}
            log.create_topic(codec, partitions=3, config={**config, **SMALL})
            for start in range(0, 2000, 250):
                log.append(codec, [record(number) for number in range(start, start + 250)])
            log.clean(codec, force=True, now_ms=START_MS)
            log.append(codec, [record(number) for number in range(2000, 2100)])


def record(number: int) -> dict[str, Any]:
    return {
        "key": f"key {number * 7919 % 300}".encode(),
        "value": None if number % 11 == 0 else bytes(number * k % 251 for k in range(number % 97)),
        "headers": [("number", str(number).encode()), ("none", None)][: number % 3],
        "timestamp": START_MS + number * 1000,
    }


def show(root: Path) -> dict[str, Any]:
    """Return a digest of each of Kafka's files, of each topic's rows, and the damage found."""
    files = sorted(path for path in root.rglob("*") if path.suffix in KAFKAS)
    found: dict[str, Any] = {
        "files": {str(path.relative_to(root)): digest(path.read_bytes()) for path in files},
        "damage": [str(finding) for finding in verify(root, deep=True)],
    }
    with kafkalog.open(root, read_only=True) as log:
        for codec in CODECS:
            rows = [
                list(row.values())
                for partition in log.offsets(codec)
                for batch in log.read(codec, partition)
                for row in batch.to_pylist()
            ]
            table = [batch.to_pylist() for batch in log.latest(codec)]
            found[codec] = [len(rows), digest(repr(rows).encode()), digest(repr(table).encode())]
    return found


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    order, directory = sys.argv[1:]
    if order == "write":
        write(Path(directory))
    print(json.dumps(show(Path(directory)), sort_keys=True))


if __name__ == "__main__":
    main()
