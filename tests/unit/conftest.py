"""A unit test starts no JVM: the collection fails where one would. A log may be in two places."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage_engine.store_log import memory_address

DIRECTORY, OBJECT_STORE = "directory", "object store"

HERE = Path(__file__).parent
MARKS = ("spark", "peers")
FIXTURES = {"spark", "kafka"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test of this folder that needs Spark or a real Kafka."""
    wrong = [item.nodeid for item in items if HERE in item.path.parents and _needs_jvm(item)]
    if wrong:
        raise pytest.UsageError(
            "tests/unit: a test starts a JVM (expected none, found "
            f"{', '.join(wrong)}). Move it to tests/spark or tests/conformance."
        )


def _needs_jvm(item: pytest.Item) -> bool:
    fixtures: set[str] = set(getattr(item, "fixturenames", ()))
    return bool(FIXTURES & fixtures) or any(item.get_closest_marker(mark) for mark in MARKS)


@pytest.fixture(params=[DIRECTORY, OBJECT_STORE])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Return where a new log may be: what is the same everywhere is tested in both places.

    A test of one place says `@pytest.mark.parametrize("place", [DIRECTORY], indirect=True)`.
    """
    if request.param == DIRECTORY:
        return tmp_path / "log"
    return str(memory_address())
