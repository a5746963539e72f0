"""A difference between a file and what `verify` expects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in a file, what is expected there, and what was found: damage, or else a notice."""

    path: Path | str
    """A file, or the address of an object."""
    position: int
    """Byte of the file; 0 if the finding is about the whole file or directory."""
    expected: str
    found: str
    is_damage: bool = True

    def __str__(self) -> str:
        return f"{self.path}: at byte {self.position}: expected {self.expected}, found {self.found}"
