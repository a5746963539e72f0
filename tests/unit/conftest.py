"""A unit test starts no JVM: the collection fails where one would."""

from __future__ import annotations

from pathlib import Path

import pytest

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
