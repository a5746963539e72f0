"""The table of what differs between the places is complete, and nothing is left out in silence."""

from __future__ import annotations

from pathlib import Path

from tests.unit.rules.places import DIRECTORY, OBJECTS, Place, Property

HERE = Path(__file__).parent
SUITE = {path: path.read_text() for path in HERE.glob("test_*.py") if path != Path(__file__)}
PROPERTIES = {name: one for name, one in vars(Place).items() if isinstance(one, Property)}


def test_each_property_is_asked_for_and_differs_for_a_reason() -> None:
    assert PROPERTIES
    for name, one in PROPERTIES.items():
        assert one.has[DIRECTORY] != one.has[OBJECTS], name
        assert len(one.reason) > 20, name
        assert any(f".{name}" in text for text in SUITE.values()), name


def test_no_rule_is_skipped_or_asks_for_the_kind_of_a_place() -> None:
    for path, text in SUITE.items():
        for word in ("pytest.skip", "mark.skip", "ObjectLog", "DirectoryLog", "place.kind"):
            assert word not in text, path


def test_no_rule_imports_what_decides_when_and_how_to_clean() -> None:
    for path, text in SUITE.items():
        for room in ("schedule", "report", "rewrite"):
            assert f"import kafkalog.cleaner.{room}" not in text, path
            assert f"from kafkalog.cleaner.{room}" not in text, path
