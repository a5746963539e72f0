"""What the host says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.storage_engine.fs.host import memory_limit

SMALL = 64 << 20
HUGE = 9223372036854771712
"""What version 1 shows for no limit."""


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{SMALL}"}, SMALL),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{SMALL}"}, SMALL),
        ("4:memory:/a\n1:cpu:/\n", {"memory/a/memory.limit_in_bytes": f"{SMALL}"}, SMALL),
        ("4:memory:/outer\n", {"memory/memory.limit_in_bytes": f"{SMALL}"}, SMALL),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{HUGE}"}, None),
        ("1:cpu:/a\n", {"memory/a/memory.limit_in_bytes": f"{SMALL}"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_limit_is_the_least_of_the_groups_and_those_above(
    groups: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        place = tmp_path / "sys" / "fs" / "cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")
    assert memory_limit(tmp_path) == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
