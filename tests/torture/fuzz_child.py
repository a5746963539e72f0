"""The process that decodes: it may die, and its parent (`fuzz`) tells what it died of.

    python -m tests.torture.fuzz_child ENGINE ORDER.json

The order says targets, seconds, seed and the directory for what comes of it; ENGINE is `mutation`
(compiled kernels, changed seeds), `hypothesis` (the same, drawn by it), `coverage` (atheris: the
kernels are plain Python then) or `replay` (the inputs that the order names, once each). A line of
JSON per target goes to the standard output.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MENDED: Final = 0.75
"""Of the changed inputs, how many get valid checksums."""
_SECONDS_AS_PYTHON: Final = 20.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to do."""

    targets: list[str]
    seconds: float
    """Of the processor, for a target of weight 1."""
    seed: int
    directory: Path
    inputs: dict[str, list[str]]
    """By target: files to decode, and with `mutation` to begin with."""
    plant: str = ""
    """`module:function`, called first: where a test puts a fault into a decoder."""

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read what the parent has written."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "directory": Path(fields["directory"])})


def main(engine: str, order: Order) -> None:
    """Do what is ordered, target by target."""
    from tests.torture import fuzz_run
    from tests.torture.fuzz_targets import targets

    logging.disable()
    in_flight = fuzz_run.InFlight(order.directory / "in-flight")
    seconds = _SECONDS_AS_PYTHON if engine == "coverage" else fuzz_run.SECONDS
    spare = 0
    if engine == "hypothesis":
        from tests.torture import fuzz_hypothesis  # it takes memory, before that is bounded

        spare = fuzz_hypothesis.ROOM
    for name in order.targets:
        target = targets()[name]
        report = _Report(name, order)
        with fuzz_run.begun(target, in_flight, order.directory, seconds=seconds, spare=spare) as (
            runner,
            seeds,
        ):
            _ENGINES[engine](runner, seeds, target, order, report)
            report.tell(runner.executions)


def _plant(order: Order) -> None:
    """Put faults into decoders, if the order says so; before anybody has imported them."""
    if order.plant:
        module, _, function = order.plant.partition(":")
        getattr(__import__(module, fromlist=[function]), function)()


class _Report:
    """Keeps the inputs of findings, one for each place, and tells the parent of them."""

    def __init__(self, name: str, order: Order) -> None:
        self._name = name
        self._directory = order.directory / "found" / name
        self._found: dict[str, dict[str, str]] = {}

    def add(self, runner: Any, data: bytes, finding: Any, *, minimise: bool = True) -> None:
        """Note a finding; the first of its place is minimised and kept."""
        from tests.torture import fuzz_run

        if finding.place in self._found:
            return
        self._found[finding.place] = {}
        smaller = runner.minimised(data, finding) if minimise else data
        path = self._directory / fuzz_run.file_name(finding)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(smaller)
        told = {"path": str(path), "told": finding.told, "place": finding.place}
        self._found[finding.place] = told

    def note(self, path: str, finding: Any) -> None:
        """Note a finding of an input that is a file already."""
        told = {"path": path, "told": finding.told, "place": finding.place}
        self._found[f"{path} {finding.place}"] = told

    def tell(self, executions: int) -> None:
        """Print the line."""
        line = {"target": self._name, "executions": executions, "found": [*self._found.values()]}
        print(json.dumps(line), flush=True)


def _replay(runner: Any, _: list[bytes], __: Any, order: Order, report: _Report) -> None:
    for path in order.inputs.get(report._name, ()):
        finding = runner.run(Path(path).read_bytes())
        if finding is not None:
            report.note(path, finding)


def _begin_with(seeds: list[bytes], target: Any, order: Order) -> list[bytes]:
    return [*seeds, *(Path(path).read_bytes() for path in order.inputs.get(target.name, ()))]


def _mutate(runner: Any, seeds: list[bytes], target: Any, order: Order, report: _Report) -> None:
    """Change inputs until the time is over; what ends at a new place is changed further."""
    from tests.torture.fuzz_mutation import Mutator

    draw = random.Random(f"{order.seed} {target.name}")
    mutator = Mutator(draw, is_text=target.is_text)
    corpus = _begin_with(seeds, target, order)
    end = time.process_time() + order.seconds * target.weight
    while time.process_time() < end:
        data = mutator.mutated(corpus)
        if target.mend is not None and draw.random() < _MENDED:
            data = target.mend(data)
        if _is_worth_keeping(runner, data, report):
            corpus.append(data)


def _hypothesise(
    runner: Any, seeds: list[bytes], target: Any, order: Order, report: _Report
) -> None:
    """Let hypothesis draw inputs; each is run as it is, and mended."""
    from tests.torture.fuzz_hypothesis import hypothesise

    def run(data: bytes) -> bool:
        is_new = _is_worth_keeping(runner, data, report)
        if target.mend is not None:
            is_new |= _is_worth_keeping(runner, target.mend(data), report)
        return is_new

    hypothesise(
        run,
        _begin_with(seeds, target, order),
        random.Random(f"{order.seed} {target.name}").getrandbits(64),
        order.seconds * target.weight,
        is_text=target.is_text,
    )


def _is_worth_keeping(runner: Any, data: bytes, report: _Report) -> bool:
    """Decode an input; tell whether it has ended, and properly, where none has before."""
    finding, is_new = runner.is_new(data)
    if finding is not None:
        report.add(runner, data, finding)
    return is_new and finding is None


def _cover(runner: Any, seeds: list[bytes], target: Any, order: Order, report: _Report) -> None:
    """Let atheris find inputs that reach new lines; each is run as it is, and mended."""
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    corpus = order.directory / "corpus" / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    mend: Callable[[bytes], bytes] | None = target.mend
    end = time.process_time() + order.seconds * target.weight

    def one(data: bytes) -> None:
        for given in (data,) if mend is None else (data, mend(data)):
            finding = runner.run(given)
            if finding is not None:
                report.add(runner, given, finding)
        if time.process_time() > end:  # libFuzzer does not return: it ends the process
            report.tell(runner.executions)
            sys.stdout.flush()
            import os

            os._exit(0)

    options = [f"-seed={order.seed}", "-max_len=65536", "-timeout=120", "-rss_limit_mb=0"]
    # A death is told by the parent, who sees its signal.
    options += [
        f"-handle_{name}=0" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term")
    ]
    if target.is_text:
        options.append(f"-dict={_dictionary(order.directory)}")
    options += ["-print_final_stats=0", "-verbosity=0", "-len_control=0"]
    options += [f"-artifact_prefix={order.directory}/", str(corpus)]
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def _dictionary(directory: Path) -> Path:
    """Write words of text formats as libFuzzer reads them, which takes none above 64 bytes."""
    from tests.torture.fuzz_mutation import TOKENS

    words = ("".join(f"\\x{byte:02x}" for byte in token) for token in TOKENS if len(token) <= 64)
    path = directory / "words"
    path.write_text("".join(f'"{word}"\n' for word in words))
    return path


_ENGINES: Final = {
    "replay": _replay,
    "mutation": _mutate,
    "hypothesis": _hypothesise,
    "coverage": _cover,
}


if __name__ == "__main__":
    engine_name, order_path = sys.argv[1:]
    order = Order.read(Path(order_path))
    if engine_name == "coverage":
        import atheris

        with atheris.instrument_imports(include=["kafkalog"]):
            _plant(order)
            import tests.torture.fuzz_targets  # noqa: F401 - imports all decoders
    else:
        _plant(order)
    main(engine_name, order)
