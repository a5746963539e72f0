"""docs/backup.md: its commands make a log of a log, also while that one is written to."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog as package
from tests import ROOT
from tests.unit.cli.conftest import Command

BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "backup.md").read_text(), re.M | re.S)
ROWS = 200
PROGRAMS = {
    "cp": ["cp -a {log} {copy}"],
    "tar": ["tar -C {log} -cf {copy}.tar .", "mkdir {copy}", "tar -C {copy} -xf {copy}.tar"],
    "rsync": ["rsync -a {log}/ {copy}/", "rsync -a {log}/ {copy}/"],
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[package.KafkaLog]:
    with package.open(tmp_path / "data" / "shop") as opened:
        opened.create_topic("t", config={"segment.bytes": "2000"})
        append(opened, range(ROWS))
        yield opened


def append(log: package.KafkaLog, numbers: range) -> None:
    for number in numbers:
        log.append("t", [(f"key {number % 7}", f"value {number}")])


def values(path: Path) -> list[bytes]:
    with package.open(path, read_only=True, create=False) as log:
        return [value for rows in log.read("t", 0) for value in rows["value"].to_pylist()]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_commands_of_the_guide_make_a_sound_copy(
    log: package.KafkaLog, tmp_path: Path, kafkalog: Command, block: str, s3_url: str
) -> None:
    def path(word: str) -> str:
        if word.startswith("s3://"):
            return word.replace("s3://backup", s3_url)
        return re.sub("^/(?=data|backup|restore)", f"{tmp_path}/", word)

    for name in ("backup", "restore"):
        (tmp_path / name).mkdir()
    for _ in range(1 if "cp -a" in block else 2):
        append(log, range(10))
        for line in block.splitlines():
            command = [path(word) for word in shlex.split(line, comments=True)]
            if command[0] == "kafkalog":
                done = kafkalog(*command[1:])
                assert (done.status, "no damage" in done.out + done.err) == (0, "verify" in command)
            else:
                subprocess.run(command, check=True)
        place = path(re.findall("verify ([^ ]+)", block)[0])
        assert values(Path(place)) == values(tmp_path / "data" / "shop")


def test_the_guide_has_commands_for_both_ways() -> None:
    assert ["kafkalog copy" in block for block in BLOCKS] == [True, True, False]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_copy_of_files_that_was_made_during_writes_is_a_log_or_shows_damage(
    log: package.KafkaLog, tmp_path: Path, kafkalog: Command, program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here")
    copy, outcomes = tmp_path / "copy", set()
    for turn in range(3):
        first = ROWS + 60 * turn
        for command in PROGRAMS[program]:
            words = shlex.split(command.format(log=tmp_path / "data" / "shop", copy=copy))
            with subprocess.Popen(words, stderr=subprocess.PIPE) as running:
                while running.poll() is None:
                    append(log, range(first, first + 5))
                    first += 5
                running.communicate()
        verified = kafkalog("verify", copy, "--deep")
        outcomes.add(verified.status)
        if verified.status == 0:
            found, all_of_them = values(copy), values(tmp_path / "data" / "shop")
            assert found == all_of_them[: len(found)]
            assert len(found) >= ROWS
            with package.open(copy) as copied:
                copied.append("t", [("key 0", "last")])
            assert values(copy)[-1] == b"last"
        shutil.rmtree(copy)
    assert outcomes <= {0, 1}
