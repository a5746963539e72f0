"""What all tests of the programs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let what a program silences, here or in a fixture of a whole file, be heard again."""
    yield
    logging.disable(logging.NOTSET)
    logging.getLogger("kafkalog").setLevel(logging.NOTSET)
