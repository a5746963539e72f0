"""Runs one decoder on one input after the other, and notes what it may not do.

The input at work lies in a mapped file, where the parent finds it if this process dies of it. Time
is that of the processor, so that a busy machine makes no findings; memory is bounded by the
operating system, which refuses more: for all inputs of a decoder together, so that leaks count.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import mmap
import os
import resource
import signal
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from tests.torture.fuzz_target import Case, Target, place_of, places

SECONDS: Final = 2.0
"""Of the processor, for one input."""
_HEAD: Final = struct.Struct(">64sQQ")  # target, executions so far, size of the input that follows
_ROOM: Final = 4 << 20
_MINIMISING_RUNS: Final = 150
_LEAK: Final = "leak:"
_LAST_CALL: Final = 3
"""Times that many seconds the process is ended that did not hear of its overtime."""


class OvertimeError(BaseException):
    """A decoder did not come to an end in time; no `except Exception` of a decoder catches it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a decoder did with an input, told in a line, and where: two of one place are one."""

    place: str
    told: str


class InFlight:
    """The mapped file with the input at work."""

    def __init__(self, path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(_ROOM)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _ROOM)

    def note(self, target: str, executions: int, data: bytes) -> None:
        """Write down what is about to be decoded."""
        self._map[: _HEAD.size] = _HEAD.pack(target.encode(), executions, len(data))
        self._map[_HEAD.size : _HEAD.size + len(data)] = data

    @staticmethod
    def read(path: Path) -> tuple[str, int, bytes]:
        """Return target, executions and input of a process that has died."""
        content = path.read_bytes()
        name, executions, size = _HEAD.unpack_from(content)
        return (
            name.rstrip(b"\0").decode(),
            executions,
            content[_HEAD.size : _HEAD.size + size],
        )


class Runner:
    """Runs a target's decoder within its bounds; counts executions."""

    def __init__(
        self, target: Target, case: Case, in_flight: InFlight, *, seconds: float = SECONDS
    ) -> None:
        self.executions = 0
        self._target = target
        self._case = case
        self._in_flight = in_flight
        self._seconds = seconds

    def run(self, data: bytes) -> Finding | None:
        """Decode an input; what is not allowed is returned."""
        self.executions += 1
        self._in_flight.note(self._target.name, self.executions, data)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        # A compiled kernel hears no signal that Python handles; this one ends the process.
        signal.setitimer(signal.ITIMER_VIRTUAL, _LAST_CALL * self._seconds)
        try:
            self._case.decode(data)
        except self._target.errors as fault:
            places.add(_place(fault))
        except MemoryError as fault:
            _disarm()
            return self._memory_finding(data, fault)
        except (Exception, OvertimeError) as fault:
            _disarm()
            return Finding(_place(fault), f"{type(fault).__name__}: {str(fault)[:200]}")
        finally:
            _disarm()
        return None

    def _memory_finding(self, data: bytes, fault: MemoryError) -> Finding:
        """Tell an input that takes too much from one that came when too much was held already."""
        limit_memory(self._target.memory)
        try:
            self._case.decode(data)
        except self._target.errors:
            pass
        except MemoryError:
            return Finding(_place(fault), f"{type(fault).__name__}: {str(fault)[:200]}")
        told = (
            f"{_LEAK} above {self._target.memory >> 20} MiB held after {self.executions:,} inputs"
        )
        return Finding(_LEAK, f"{told}; run --target {self._target.name} again")

    def is_new(self, data: bytes) -> tuple[Finding | None, bool]:
        """Decode an input; also tell whether it has ended where none has before."""
        before = len(places)
        return self.run(data), len(places) > before

    def minimised(self, data: bytes, finding: Finding) -> bytes:
        """Return a shorter input that does the same, if a few tries find one."""
        mend = self._target.mend or bytes
        # How deep is too deep depends on the caller, what is held on all inputs; and each try of
        # what does not end takes its time.
        is_stable = not finding.told.startswith(("RecursionError", "OvertimeError", _LEAK))
        size = len(data) // 2 if is_stable else 0
        runs = 0
        while size and runs < _MINIMISING_RUNS:
            start = 0
            while start < len(data) and runs < _MINIMISING_RUNS:
                shorter = mend(data[:start] + data[start + size :])
                found = self.run(shorter)
                runs += 1
                if found is not None and found.place == finding.place:
                    data = shorter
                else:
                    start += size
            size //= 2
        return data


@contextlib.contextmanager
def bounded(memory: int) -> Iterator[None]:
    """Let this process have no more than `memory` bytes above what it has, and stop overtime."""
    before = signal.signal(signal.SIGPROF, _stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(memory)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)


def limit_memory(memory: int) -> None:
    """Let this process have no more than `memory` bytes above what it has now.

    AddressSanitizer reserves address space without end: under it there is no limit.
    """
    if "ASAN_OPTIONS" in os.environ:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + memory, hard))


@contextlib.contextmanager
def begun(
    target: Target,
    in_flight: InFlight,
    directory: Path,
    *,
    seconds: float = SECONDS,
    spare: int = 0,
) -> Iterator[tuple[Runner, list[bytes]]]:
    """Yield the runner of a target and its seeds; it works in a new directory below this one.

    `spare` bytes are for who draws the inputs, and no decoder's.
    """
    places.clear()
    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")  # pyarrow does so when it needs to, for seconds with ASan
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=directory) as scratch:
        case = target.begin(Path(scratch))
        runner = Runner(target, case, in_flight, seconds=seconds)
        for seed in case.seeds:  # everything is imported and compiled before it is measured
            with contextlib.suppress(*target.errors):
                case.decode(seed)
        with bounded(target.memory + spare):
            yield runner, case.seeds


def file_name(finding: Finding) -> str:
    """Return the name under which the input of a finding is kept."""
    word = finding.told.partition(":")[0]
    return f"{word}-{hashlib.sha256(finding.place.encode()).hexdigest()[:8]}"


def _place(fault: BaseException) -> str:
    """Return where it was; of a deep recursion, and of an alarm, the innermost line is chance."""
    return place_of(fault, innermost=not isinstance(fault, RecursionError | OvertimeError))


def _disarm() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _stop(_: int, __: FrameType | None) -> None:
    raise OvertimeError(f"no end after {SECONDS} s of the processor")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
