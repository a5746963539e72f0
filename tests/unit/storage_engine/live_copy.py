"""A program that copies the files of a log one by one while the log is written to.

`CopyingFileSystem` lets it go on at drawn calls of the writer, so it sees every state that a tar, a
cp or an rsync can see: half a commit, half a swap, half a roll. It lists a directory when it gets
there, and reads some files in two halves.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import kafkalog
from kafkalog.storage_engine.fs.file_system import Data, FileSystem, Place

History = dict[tuple[str, int], dict[int, tuple[bytes | None, bytes | None]]]
"""By topic id and partition: what was appended at each offset."""


def copying(source: Path, target: Path, draw: random.Random) -> Iterator[None]:
    """Copy a directory; each step copies a file, half a file, or lists a directory."""
    places = [source]
    while places:
        place = places.pop(draw.randrange(len(places)))
        copy = target / place.relative_to(source)
        try:
            if place.is_dir():
                copy.mkdir()
                places += [place / name for name in os.listdir(place)]
                yield
                continue
            with place.open("rb") as file, copy.open("wb") as written:
                if draw.random() < 0.5:
                    written.write(file.read(draw.randrange(1, os.path.getsize(place) + 2)))
                    yield
                shutil.copyfileobj(file, written)
        except FileNotFoundError:
            pass  # it has vanished, as the copying programs say
        yield


class CopyingFileSystem(FileSystem):
    """Lets the copying program take a step before some of the writer's calls."""

    def __init__(self, steps: Iterator[None], draw: random.Random, chance: float) -> None:
        self._steps, self._draw, self._chance = steps, draw, chance

    def _step(self) -> None:
        while self._draw.random() < self._chance and next(self._steps, 1) is None:
            pass

    def pwrite(self, fd: int, data: Data, position: int) -> int:
        self._step()
        return super().pwrite(fd, data, position)

    def ftruncate(self, fd: int, size: int) -> None:
        self._step()
        super().ftruncate(fd, size)

    def replace(self, source: Place, target: Place) -> None:
        self._step()
        super().replace(source, target)

    def unlink(self, path: Place) -> None:
        self._step()
        super().unlink(path)

    def fdatasync(self, fd: int) -> None:
        self._step()
        super().fdatasync(fd)


class Writer:
    """Appends, cleans, deletes and creates in a log, and remembers what was appended."""

    def __init__(self, log: kafkalog.KafkaLog, draw: random.Random) -> None:
        self._log, self._draw = log, draw
        self.history: History = {}
        compacted = {"cleanup.policy": "compact", "delete.retention.ms": "0"}
        deleted = {"cleanup.policy": "delete", "retention.bytes": "800"}
        for name, config in {"c": compacted, "d": deleted}.items():
            common = {"segment.bytes": str(draw.choice([150, 300])), "file.delete.delay.ms": "0"}
            log.create_topic(name, config=config | common)

    def act(self) -> None:
        """Do something."""
        log, draw = self._log, self._draw
        kind = draw.choice(["append"] * 8 + ["clean", "clean", "records", "topic"])
        if kind == "append":
            self.append(draw.choice(["c", "c", "d"]))
        elif kind == "clean":
            log.clean("c", force=True)
        elif kind == "records":
            log.delete_records("d", 0, draw.choice(range(*log.offsets("d")[0][:2], 1) or [0]))
        elif "t" in log.topics():
            log.delete_topic("t")
        else:
            log.create_topic("t", config={"cleanup.policy": "delete"})
            self.append("t")

    def append(self, topic: str) -> None:
        """Append up to three records."""
        number = len(self.history)
        records = [
            (f"k{self._draw.randrange(4)}", self._draw.choice([None, f"v{number}.{each}"]))
            for each in range(self._draw.randrange(1, 4))
        ]
        first = self._log.offsets(topic)[0][1]
        self._log.append(topic, records)
        known = self.history.setdefault((self._log.describe(topic).topic_id, 0), {})
        for offset, (key, value) in enumerate(records, first):
            known[offset] = key.encode(), value and value.encode()
