"""What a program does to a directory: the acts that a `Recorder` sees and a `Disk` may lose.

Files and directories are numbers that never come again: a name of a removed file may be given to
another one, and the file system may give that one the same inode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Act", "Allocate", "Names", "Resize", "Sync", "Write"]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes put into a file."""

    file: int
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file cut, or extended with zeros, to a size."""

    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """A file extended with zeros, if it is shorter."""

    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Names:
    """Names set (to a file or directory) and removed (None), together or not at all.

    `made` is the file or directory that this act has made, and whether it is a directory.
    """

    changes: tuple[tuple[int, str, int | None], ...]
    made: tuple[int, bool] | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """A file's content, or a directory's names, made durable; or not, where the sync failed."""

    of: int
    failed: bool = False


Act: TypeAlias = Write | Resize | Allocate | Names | Sync
