"""Each rule runs in both places."""

from tests.unit.rules.places import log, place

__all__ = ["log", "place"]
