"""The cleaner's memory, as `bench.dedup` measures it; the program ends where a limit is passed."""

from __future__ import annotations

import pytest

from bench import dedup


@pytest.mark.slow
def test_keys_far_beyond_the_budget_are_deduplicated_in_one_rewrite_within_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dedup.main(["--keys", "600000", "--budget", str(1 << 20), "--json"])
    assert "rewrites of the log" in capsys.readouterr().out
