"""What is fuzzed: a decoder, the inputs it begins with, and what it may do with any other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.inspection import dump_text
from kafkalog.storage_engine.inspection.dump import DumpOptions, dump_file

MEMORY: Final = 512 << 20
Decode = Callable[[bytes], object]


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
            with contextlib.suppress(*errors):
                decode(file)
            dump(file)

        return Case(run, found)

    return Target(name=name, begin=begin, **more)


def dump(path: Path) -> None:
    """Show a file, as far as its name says that it can be: nothing in one may stop that."""
    for options in (DumpOptions(print_data_log=True), DumpOptions(index_sanity_check=True)):
        with contextlib.suppress(KafkaLogError):
            for entry in dump_file(path, options):
                if entry["type"] == "finding":
                    dump_text.heading(entry)
                dump_text.line(entry, bytes.hex)


def exhaust(*many: Iterable[object]) -> None:
    """Take everything out of iterators, each of which may end in a typed error."""
    for one in many:
        with contextlib.suppress(KafkaLogError):
            for _ in one:
                pass
