"""`register` without Spark: what it takes."""

from __future__ import annotations

from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError


@pytest.mark.parametrize("given", [None, "local[2]", object()])
def test_register_takes_a_session(given: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^register: it takes a session \(expected a Spar"):
        kafkalog.register(given)
