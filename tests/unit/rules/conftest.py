"""Each rule runs in both places; where one is not held there yet, its mark `fault` says so."""

from __future__ import annotations

import pytest

from tests.unit.rules.places import log, place

__all__ = ["log", "place"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect a rule to fail where its mark `fault` names the place: `fault(objects="why")`."""
    for item in items:
        found = item.get_closest_marker("fault")
        kind = getattr(item, "callspec", None) and item.callspec.params.get("place")
        if found is not None and kind in found.kwargs:
            item.add_marker(pytest.mark.xfail(strict=True, reason=found.kwargs[kind]))
