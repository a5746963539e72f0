"""A follower of a directory reads on in the active segment that it has open."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

import kafkalog
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.change_signal import ChangeSignal
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from tests.builders.batch_builder import ABORT, COMMIT, batch, joined, marker

NOW_MS = 1_700_000_000_000


class Opened(FileSystem):
    """Notes which files of a topic are opened."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def open(self, path: Place, flags: int, mode: int = 0o777) -> int:
        if "/t-0/" in str(path):
            self.names.append(Path(path).name)
        return super().open(path, flags, mode)


class FailsOnce(FileSystem):
    """Fails one sync of a file."""

    def __init__(self) -> None:
        self.is_done = False

    def fsync(self, fd: int) -> None:
        if not self.is_done:
            self.is_done = True
            raise OSError(5, "Input/output error")
        super().fsync(fd)


def topic(root: Path, **config: str) -> KafkaLog:
    log = kafkalog.open(root)
    log.create_topic("t", 1, {key.replace("_", "."): text for key, text in config.items()})
    return log


def test_a_follower_opens_no_log_again_while_its_segment_is_the_active_one(tmp_path: Path) -> None:
    with topic(tmp_path / "log") as log, kafkalog.open(tmp_path / "log", read_only=True) as reader:
        followed = iter(reader.follow("t"))
        for number in range(3):
            log.append("t", [("k", str(number))])
            with file_system.replaced(Opened()):
                opened = file_system.current
                assert next(followed)["value"].to_pylist() == [b"%d" % number]
            assert isinstance(opened, Opened)
            assert any(name.endswith(".log") for name in opened.names) == (number == 0)


def test_a_follower_lets_go_of_a_segment_once_it_is_not_the_active_one(tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list the descriptors of a process")

    def held() -> list[str]:
        links = [os.readlink(link) for link in descriptors.iterdir() if link.is_symlink()]
        return [link for link in links if link.startswith(f"{tmp_path}/log/t-0/")]

    with topic(tmp_path / "log") as log, kafkalog.open(tmp_path / "log", read_only=True) as reader:
        with reader.follow("t", poll_s=0.01) as followed:
            batches = iter(followed)
            log.append("t", [("k", "1")])
            next(batches)
            log.append("t", [("k", "2")])
            assert next(batches)["value"].to_pylist() == [b"2"]
            assert [name[-4:] for name in held()] == [".log"]
            log.clean("t", force=True)
            threading.Timer(0.1, followed.close).start()
            assert next(batches, None) is None
        assert held() == []


@pytest.mark.parametrize("seed", range(6))
def test_a_follower_has_what_a_reader_has_whatever_comes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with (
        topic(tmp_path / "log", cleanup_policy="delete", segment_bytes="400") as log,
        kafkalog.open(tmp_path / "log", read_only=True) as reader,
    ):
        batches = iter(reader.follow("t", "earliest", poll_s=0.01))
        found: list[int] = []

        def own() -> None:
            log.append("t", [("k", "own")] * draw.randint(1, 3))

        def failed() -> None:
            with file_system.replaced(FailsOnce()), pytest.raises(kafkalog.errors.StorageError):
                own()

        def raw() -> None:
            end = log.offsets("t")[0][1] + draw.randint(0, 2)
            log.append_raw("t", 0, joined([batch(end, 1)]), now_ms=NOW_MS)

        def transaction() -> None:
            end = log.offsets("t")[0][1]
            outcome = draw.choice([ABORT, COMMIT])
            parts = [batch(end, 1, of=7), marker(end + 1, outcome, 7)]
            log.append_raw("t", 0, joined(parts), now_ms=NOW_MS)

        # Gaps and producers end the short way for good, so that they come late.
        for acts in ([own, own, failed], [own, own, failed, raw], [own, raw, transaction]):
            for _ in range(6):
                draw.choice(acts)()
                expected = [
                    offset for table in log.read("t", 0) for offset in table["offset"].to_pylist()
                ]
                while len(found) < len(expected):
                    found += next(batches)["offset"].to_pylist()
                assert found == expected


def test_a_signal_wakes_once_a_writer_of_its_file_is_done(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    with ChangeSignal(path) as signal:
        if signal._descriptor < 0:
            pytest.skip("this system does not tell of changes")
        (tmp_path / "commit.other").write_bytes(b"x")
        path.write_bytes(b"x")
        assert signal.wait(60)
        path.with_name("new").write_bytes(b"y")
        path.with_name("new").rename(path)
        assert signal.wait(60)
