"""A topic as a table, by single keys and without Spark."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kafkalog
from kafkalog import KTable
from kafkalog.errors import InvalidInputError, UnknownTopicError
from tests.unit.datasource.logs import NOW_MS, append_compacted


def test_a_key_is_looked_up_without_spark(tmp_path: Path) -> None:
    append_compacted(tmp_path, ("a", "1"), ("b", "1"), ("a", "2"))
    with KTable(None, tmp_path, "t") as table:
        found = table.lookup("a")
        assert found is not None
        assert (found.key, found.value, found.timestamp_ms) == (b"a", b"2", NOW_MS)
        append_compacted(tmp_path, ("a", None))
        assert table.lookup(b"a") is None
        table.close()
        assert table.lookup("b") is not None
        with pytest.raises(InvalidInputError, match="made without a Spark session"):
            table.df()


def test_a_table_may_be_closed_while_others_look_keys_up(tmp_path: Path) -> None:
    append_compacted(tmp_path, ("a", "1"))
    with kafkalog.open(tmp_path) as log:
        log.clean("t", force=True)  # so that there are key indexes to keep open
    table = KTable(None, tmp_path, "t")
    assert table.lookup("a")  # what is compiled or loaded for it is there
    table.close()
    before = len(os.listdir("/proc/self/fd"))
    faults: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(150):
                assert table.lookup("a")
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=look) for _ in range(3)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            table.close()
        table.close()
        after = len(os.listdir("/proc/self/fd"))
    finally:
        gc.enable()
    assert faults == []
    assert after == before


def test_a_lookup_loads_no_spark(tmp_path: Path) -> None:
    append_compacted(tmp_path, ("a", "1"))
    script = (
        "import sys, kafkalog\n"
        f"record = kafkalog.KTable(None, {str(tmp_path)!r}, 't').lookup('a')\n"
        "assert record.value == b'1'\n"
        "print([name for name in sys.modules if name.startswith(('pyspark', 'pandas'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_a_path_may_be_relative_or_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_compacted(tmp_path / "log", ("a", "1"))
    monkeypatch.chdir(tmp_path)
    for path in ("log", Path("log"), str(tmp_path / "log"), (tmp_path / "log").as_uri()):
        assert KTable(None, path, "t").lookup("a")


def test_a_missing_log_or_topic_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no log here"):
        KTable(None, tmp_path, "t")
    append_compacted(tmp_path, ("a", "1"))
    with pytest.raises(UnknownTopicError, match="'u' does not exist"):
        KTable(None, tmp_path, "u")
