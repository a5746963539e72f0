"""Tests that need a Spark session."""

from tests.day import todays

OWN_SPARK = todays(["guide to testing", "guide to a cluster", "suites on a store"], 3)
"""What starts a Spark of its own beside the session of the tests, and runs today."""
