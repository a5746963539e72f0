"""What all tests of the programs share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Let what a program silences be heard again by the tests after it."""
    logger = logging.getLogger("kafkalog")
    level = logger.level
    yield
    logging.disable(logging.NOTSET)
    logger.setLevel(level)
