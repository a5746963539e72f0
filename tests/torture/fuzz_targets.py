"""Every decoder there is: whatever in kafkalog reads bytes that it may not have written itself."""

from __future__ import annotations

from functools import cache

from tests.torture import fuzz_batches, fuzz_files, fuzz_roots, fuzz_stores
from tests.torture.fuzz_target import Target


@cache
def targets() -> dict[str, Target]:
    """Return them by their names."""
    modules = (fuzz_batches, fuzz_files, fuzz_roots, fuzz_stores)
    found = [target for module in modules for target in module.targets()]
    by_name = {target.name: target for target in found}
    assert len(by_name) == len(found), "two targets of one name"
    return by_name
