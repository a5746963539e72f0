import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from tests.builders.log_builder import LogBuilder

SHORT = st.lists(st.sampled_from([0, 1, 255]), max_size=3).map(bytes)
"""Few bytes, so that keys are often equal, or differ by zero bytes at the end alone."""


def read(root: Path, keys: ChosenKeys | None, start: int = 0) -> list[dict[str, object]]:
    with DirectoryLog(root, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        batches = snapshot.read(
            start, snapshot.state.high_watermark, schema=changelog_schema(), keys=keys
        )
        return [row for batch in batches for row in batch.to_pylist()]


def log_of(root: Path, keys: list[bytes | None]) -> None:
    pairs = [(key, "v") for key in keys]
    log = LogBuilder(root).topic(policy="delete")
    log.commits(pairs[first : first + 7] for first in range(0, len(keys), 7)).close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(SHORT | st.none(), min_size=1, max_size=40),
    st.lists(SHORT, max_size=5),
    st.integers(0, 1),
)
def test_the_records_of_chosen_keys_are_read_and_no_others(
    written: list[bytes | None], chosen: list[bytes], start: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        log_of(Path(root), written)

        found = read(Path(root), ChosenKeys(chosen), start)

        assert found == [row for row in read(Path(root), None, start) if row["key"] in chosen]


@pytest.mark.parametrize("at", [0, 40, 100, 199])
def test_long_keys_are_compared_by_all_bytes(tmp_path: Path, at: int) -> None:
    key = bytes(range(200))
    other = key[:at] + b"\xff" + key[at + 1 :]
    log_of(tmp_path, [key, other, key[:-1], key + b"\0", None, key])

    assert [row["offset"] for row in read(tmp_path, ChosenKeys([key]))] == [0, 5]
    assert [row["offset"] for row in read(tmp_path, ChosenKeys([other, key]))] == [0, 1, 5]
