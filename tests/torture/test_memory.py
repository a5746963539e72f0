"""A process that forgets is like one that has just begun."""

from __future__ import annotations

from pathlib import Path

from kafkalog.cleaner.state import notes
from kafkalog.storage_engine.transactions.transaction_markers import known_markers
from tests.torture import memory
from tests.torture.memory import elsewhere, forget, remembers
from tests.torture.workloads import Opened, prepare, small_files


def test_all_that_a_module_remembers_is_found_by_its_name() -> None:
    found = {(module.__name__.rpartition(".")[2], name) for module, name in memory._places(0)}
    assert ("notes", "_unwritten") in found
    assert ("transaction_markers", "known_markers") in found


def test_a_process_forgets_what_it_has_learned(tmp_path: Path) -> None:
    forget()
    _learn(tmp_path)
    assert remembers()
    forget()
    assert not remembers() and not notes._unwritten and not len(known_markers)


def test_what_a_process_knew_comes_back_to_it_and_what_another_one_learned_does_not(
    tmp_path: Path,
) -> None:
    forget()
    _learn(tmp_path)
    known = len(known_markers)
    with elsewhere():
        assert not remembers()
        notes._unwritten["u-0", b"", "mark"] = "full", ()
    assert len(known_markers) == known
    assert list(notes._unwritten) == [("t-0", b"", "mark")]
    forget()


def _learn(root: Path) -> None:
    with small_files():
        prepare(root)
        log = Opened(root)
        log.perform("transact")
        list(log.engine.read("t", 1))
    notes._unwritten["t-0", b"", "mark"] = "full", ()
    assert len(known_markers)
