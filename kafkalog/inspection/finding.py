"""What `verify` finds: something in a file that is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A place in a file, what the format or another file demands there, and what is there.

    Where `is_damage` is false it is a notice: nothing that is lost or wrong, but worth knowing.
    """

    path: Path
    position: int
    """Byte of the file; 0 where it is about the file, or the directory, as a whole."""
    expected: str
    found: str
    is_damage: bool = True

    def __str__(self) -> str:
        return f"{self.path}: at byte {self.position}: expected {self.expected}, found {self.found}"
