"""What is fuzzed: a decoder, the inputs it begins with, and what it may do with any other."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kafkalog.errors import KafkaLogError
from kafkalog.inspection import dump_text
from kafkalog.inspection.dump import dump_file
from kafkalog.inspection.dump_entry import DumpOptions

MEMORY: Final = 512 << 20
Decode = Callable[[bytes], object]
_Errors = type[Exception] | tuple[type[Exception], ...]
places: Final[set[str]] = set()
"""Where decoders have ended in an error: an input that ends at a new one is worth keeping."""


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder ready to run: it takes any bytes, and returns or raises what it documents."""

    decode: Decode
    seeds: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A decoder by its name.

    `begin` prepares it in a scratch directory. `mend` makes the checksums of a changed input valid.
    An exception that is not one of `errors` is a finding, and so is a run that takes more than
    `memory` bytes above what was held before it.
    """

    name: str
    begin: Callable[[Path], Case]
    mend: Callable[[bytes], bytes] | None = None
    errors: tuple[type[Exception], ...] = (KafkaLogError,)
    is_text: bool = False
    memory: int = MEMORY
    weight: float = 1.0
    """Its part of the time, where others have 1: a slow one, which much depends on, has more."""


@contextlib.contextmanager
def refusing(errors: _Errors = KafkaLogError) -> Iterator[None]:
    """Suppress what a decoder documents, and note where that was."""
    try:
        yield
    except errors as fault:
        places.add(place_of(fault))


def place_of(fault: BaseException, *, innermost: bool = True) -> str:
    """Return the type of an exception and the last line of ours that it came through."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)
    ]
    ours = [found for found in frames if "/kafkalog/" in found[0]] or frames[-1:]
    name, line = ours[-1 if innermost else 0]
    return f"{type(fault).__name__} {Path(name).name}:{line}"


def file_target(
    name: str,
    path: str,
    decode: Callable[[Path], object],
    seeds: Callable[[Path], list[bytes]],
    **more: Any,
) -> Target:
    """Return the target of a file's decoder: it is written, decoded, and shown by `dump` too.

    `decode` gets the path below the scratch directory.
    """

    def begin(directory: Path) -> Case:
        found = seeds(directory / "seeds")
        file = directory / "work" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        errors: tuple[type[Exception], ...] = more.get("errors", (KafkaLogError,))

        def run(data: bytes) -> None:
            file.write_bytes(data)
            with refusing(errors):
                decode(file)
            dump(file)

        return Case(run, found)

    return Target(name=name, begin=begin, **more)


def dump(path: Path) -> None:
    """Show a file, as far as its name says that it can be: nothing in one may stop that."""
    for options in (DumpOptions(print_data_log=True), DumpOptions(index_sanity_check=True)):
        with refusing():
            for entry in dump_file(path, options):
                if entry["type"] == "finding":
                    dump_text.heading(entry)
                dump_text.line(entry, bytes.hex)


def exhaust(*many: Iterable[object]) -> None:
    """Take everything out of iterators, each of which may end in a typed error."""
    for one in many:
        with refusing():
            for _ in one:
                pass
