"""Files beside the logs, damaged: a sample, and that what would be wrong is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from unittest.mock import ANY

import pytest

from kafkalog.cleaner.key_index import key_index
from kafkalog.storage_engine.broker import metadata_log
from kafkalog.storage_engine.directory import ended_pins, pin_file, staged_contents
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.log_scanner import METADATA, FaultAction
from tests.unit.storage_engine.damage import BrokerJudge, Judge, cases, flipped, kind_of, places
from tests.unit.storage_engine.damage_beside import JUDGES, BesideJudge
from tests.unit.storage_engine.sample_root import Root

SAMPLE = 12
"""Places of each root; `python -m tests.torture.damage` takes them all."""


@pytest.fixture(scope="module", params=JUDGES)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BesideJudge:
    return JUDGES[request.param].of(tmp_path_factory.mktemp(request.param))


def test_undamaged_they_are_of_use_and_missing_they_do_no_harm(judge: BesideJudge) -> None:
    for name in judge.files():
        data = (judge.root.path / name).read_bytes()
        assert judge.judge(name, data, len(data), write=True) == "whole", judge.faults
        judge.judge(name, None, 0, write=True)
    assert not judge.faults


def test_cut_and_flipped_they_are_refused_or_harmless(judge: BesideJudge) -> None:
    step = sum(len(places(judge.root.path, name)) for name in judge.files()) // SAMPLE
    for name, data, place, write in cases(judge, 5, step):
        judge.judge(name, data[:place], place, write=write)
        judge.judge(name, flipped(data, place, 1), place, write=write)
    assert not judge.faults


def test_a_missing_file_leaves_nothing_that_hides_the_next_damage(judge: BesideJudge) -> None:
    for name in judge.files():
        data = (judge.root.path / name).read_bytes()
        judge.judge(name, None, 0, write=True)
        judge.judge(name, flipped(data, 0, 1), 0, write=True)
    assert not judge.faults


def test_every_name_that_a_file_can_have_is_among_the_damaged(tmp_path: Path) -> None:
    """A new kind of file has to be damaged, too, or to be one that nothing is read from."""
    ours, brokers = Root(tmp_path / "ours"), Root(tmp_path / "brokers")
    brokers.give_to_a_broker()
    judges: list[Judge] = [Judge(ours, tmp_path), BrokerJudge(brokers, tmp_path)]
    judges += [JUDGES[name].of(tmp_path / name) for name in JUDGES]
    kinds = {kind_of(name) for judge in judges for name in judge.files()}
    named = {
        word: text
        for word, text in vars(layout).items()
        if word.isupper() and isinstance(text, str) and text.startswith((".", layout.OURS))
        if not word.startswith("STORED_")  # objects of an object store, and no files
    }
    unread = {
        "CLEANED", "SWAP", "DELETED", "TEMPORARY", "OURS", "SPILL",  # parts of names
        "COMMIT_TEMPORARY", "SNAPSHOT_TEMPORARY",  # written, and renamed or removed
        "CANARY", "CLEAN_SHUTDOWN", "GUARD", "UNRECORDED",  # there or not
    }  # fmt: skip
    for word, text in named.items():
        is_lock = text.endswith((".lock", ".turnstile"))
        assert is_lock or word in unread or text in kinds, f"{word} ({text}) is never damaged"


@pytest.mark.parametrize(
    ("root", "kind", "check", "unchecked", "token"),
    [
        ("cleaned", layout.KEYS, (key_index, "_is_sound"), lambda _: True, b""),
        ("cleaned", layout.PIN, (pin_file, "crc32c"), lambda _: ANY, b"12,12]"),
        ("cleaned", layout.ENDED_PINS, (ended_pins, "_is_whole"), lambda *_: True, b"kl-pin-"),
        ("staged", layout.STAGED, (staged_contents, "crc32c"), lambda *_: ANY, b"value 3"),
        (
            "released",
            f"{layout.METADATA_DIRECTORY} .log",
            (metadata_log, "METADATA"),
            dataclasses.replace(METADATA, checksum=FaultAction.IGNORE),
            b"900",
        ),
    ],
)
def test_without_its_check_a_flipped_bit_is_found_by_what_it_does(
    root: str,
    kind: str,
    check: tuple[ModuleType, str],
    unchecked: object,
    token: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = JUDGES[root].of(tmp_path)
    names = [name for name in judge.files() if kind_of(name) == kind]
    contents = {name: (judge.root.path / name).read_bytes() for name in names}
    name, data = next((name, data) for name, data in contents.items() if token in data)
    start = data.index(token) + 1 if token else layout.KEYS_BLOCK
    places = range(start, start + (1 if token else 64))

    def flip_all() -> None:
        for place in places:
            judge.judge(name, flipped(data, place, 1), place, write=False)

    flip_all()
    assert not judge.faults
    monkeypatch.setattr(*check, unchecked)
    flip_all()
    assert judge.faults
