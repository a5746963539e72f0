"""What happens to the files of a drawn log: lost, short, wrong and stale ones, torn tails, remains.

Each act takes the draw, the log and Kafka, which cleans a copy where a swap's remains are wanted.
It does nothing where the log has no such file.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.builders.segment_files import name
from tests.conformance.twin_kafka import KafkaCleaner, KafkaRefusedError
from tests.torture.twin_draws import LARGE_MAP, Drawn

__all__ = ["spoil"]

_INDEXES: Final = (".index", ".timeindex", ".txnindex")
_SWAPPED: Final = (".log", *_INDEXES)


def spoil(draw: random.Random, drawn: Drawn, kafka: KafkaCleaner) -> None:
    """Do up to three acts to a log; `drawn.spoiled` tells which."""
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        act = draw.choice((*_ACTS, *_OF_INDEXES, *_OF_INDEXES))
        told = act(draw, drawn, kafka)
        if told:
            drawn.spoiled.append(f"{act.__name__.strip('_')} {told}")


def _pick(draw: random.Random, drawn: Drawn, *suffixes: str) -> Path | None:
    found = sorted(path for path in drawn.directory.iterdir() if path.suffix in suffixes)
    return draw.choice(found) if found else None


def _lose_index(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = _pick(draw, drawn, *_INDEXES)
    if path is None:
        return ""
    path.unlink()
    return path.name


def _shorten_index(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = _pick(draw, drawn, *_INDEXES)
    if path is None or not path.stat().st_size:
        return ""
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])
    return path.name


def _flip_index(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = _pick(draw, drawn, *_INDEXES)
    return "" if path is None else _flip(draw, path)


def _zero_index(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Leave the room that a broker preallocates."""
    path = _pick(draw, drawn, ".index", ".timeindex")
    if path is None:
        return ""
    room = int(drawn.config["segment.index.bytes"])
    entry = 8 if path.suffix == ".index" else 12
    with path.open("ab") as stream:
        stream.truncate(max(room // entry * entry, path.stat().st_size))
    return path.name


def _stale_index(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Put another segment's index in the place of one."""
    path = _pick(draw, drawn, *_INDEXES)
    if path is None:
        return ""
    other = _pick(draw, drawn, path.suffix)
    assert other is not None
    if other != path:
        shutil.copyfile(other, path)
    return f"{other.name} in the place of {path.name}" if other != path else ""


def _tear(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Cut the last segment, or rarely another one."""
    logs = sorted(drawn.directory.glob("*.log"))
    path = logs[-1] if draw.random() < 0.8 else draw.choice(logs)
    data = path.read_bytes()
    if not data:
        return ""
    path.write_bytes(data[: draw.randrange(len(data))])
    return path.name


def _tear_to_zeros(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Leave zeros behind a place, as a file system does after a power cut."""
    path = max(drawn.directory.glob("*.log"))
    data = path.read_bytes()
    at = draw.randint(0, len(data))
    path.write_bytes(data[:at] + bytes(max(len(data) - at, 100)))
    return path.name


def _add_garbage(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = max(drawn.directory.glob("*.log"))
    with path.open("ab") as stream:
        stream.write(draw.randbytes(draw.choice((1, 16, 61, 200))))
    return path.name


def _flip_log(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    return _flip(draw, draw.choice(sorted(drawn.directory.glob("*.log"))))


def _flip(draw: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    if not data:
        return ""
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{path.name} at {place}"


def _lose_snapshots(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    found = sorted(drawn.directory.glob("*.snapshot"))
    if not found:
        return ""
    gone = found if draw.random() < 0.5 else [draw.choice(found)]
    for path in gone:
        path.unlink()
    return " ".join(path.name for path in gone)


def _flip_snapshot(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = _pick(draw, drawn, ".snapshot")
    return "" if path is None else _flip(draw, path)


def _lose_epochs(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    path = drawn.directory / "leader-epoch-checkpoint"
    if not path.exists():
        return ""
    path.unlink()
    return path.name


def _lose_segment(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Lose a segment, or its log alone."""
    bases = drawn.bases()
    if len(bases) < 2:
        return ""
    base = draw.choice(bases)
    suffixes = (".log",) if draw.random() < 0.5 else _SWAPPED
    for suffix in suffixes:
        (drawn.directory / name(base, suffix)).unlink(missing_ok=True)
    return f"{base} {' '.join(suffixes)}"


def _move_log_start(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    bases = drawn.bases()
    drawn.log_start = draw.choice((0, draw.randint(0, bases[-1] + 3), bases[-1], 10**6))
    return str(drawn.log_start)


def _leave_deleted(draw: random.Random, drawn: Drawn, _: KafkaCleaner) -> str:
    """Leave a copy of a segment's file with a suffix that asks for its removal."""
    path = _pick(draw, drawn, *_SWAPPED)
    if path is None:
        return ""
    suffix = draw.choice((".deleted", ".deleted", ".cleaned"))
    shutil.copyfile(path, path.with_name(path.name + suffix))
    return path.name + suffix


def _leave_swap(draw: random.Random, drawn: Drawn, kafka: KafkaCleaner) -> str:
    """Leave what a broker has that dies in some step of replacing segments by a cleaned one."""
    if "compact" not in drawn.config["cleanup.policy"]:
        return ""
    copy = drawn.root / f"{drawn.directory.name}-copy" / drawn.directory.name
    shutil.copytree(drawn.directory, copy)
    try:
        group = _cleaned_group(drawn, kafka, copy)
        return "" if group is None else _die_in_swap(draw, drawn.directory, copy, *group)
    finally:
        shutil.rmtree(copy.parent)


def _cleaned_group(drawn: Drawn, kafka: KafkaCleaner, copy: Path) -> tuple[int, list[int]] | None:
    """Let Kafka clean a copy; return a segment that it made, and the ones that it was made of."""
    label = "copy"
    try:
        kafka.load(
            drawn.now_ms, label, copy, drawn.config, is_clean=True, log_start=drawn.log_start,
            recovery_point=0,
        )  # fmt: skip
        kafka.clean(drawn.now_ms, label, drawn.log_start, LARGE_MAP)
    except KafkaRefusedError:
        return None
    finally:
        kafka.drop(label)
    before = drawn.bases()
    after = sorted(int(path.stem) for path in copy.glob("*.log"))
    for place, base in enumerate(after):
        path = name(base, ".log")
        following = after[place + 1] if place + 1 < len(after) else before[-1] + 1
        sources = [other for other in before if base <= other < following]
        is_new = base in before and (
            (copy / path).read_bytes() != (drawn.directory / path).read_bytes()
        )
        if is_new and sources and before[-1] not in sources:
            return base, sources
    return None


def _die_in_swap(
    draw: random.Random, directory: Path, copy: Path, base: int, sources: list[int]
) -> str:
    step = draw.choice(("cleaned", "cleaning", "swap", "deleting", "deleted", "renaming"))
    suffixes = [suffix for suffix in _SWAPPED if (copy / name(base, suffix)).exists()]
    stages = dict.fromkeys(suffixes, ".cleaned" if step == "cleaned" else ".swap")
    if step == "cleaning":  # some files of the segment have their next names
        stages |= dict.fromkeys(suffixes[draw.randrange(len(suffixes)) :], ".cleaned")
    for suffix, stage in stages.items():
        shutil.copyfile(copy / name(base, suffix), directory / name(base, suffix + stage))
    if step in ("deleting", "deleted", "renaming"):
        gone = sources if step != "deleting" else sources[: draw.randint(1, len(sources))]
        for source in gone:
            for suffix in _SWAPPED:
                path = directory / name(source, suffix)
                if path.exists():
                    path.rename(path.with_name(path.name + ".deleted"))
    if step == "renaming":
        for suffix in suffixes[: draw.randint(1, len(suffixes))]:
            path = directory / name(base, suffix + ".swap")
            path.rename(path.with_suffix(""))
    return f"{step} {base} of {sources}"


_Act = Callable[[random.Random, Drawn, KafkaCleaner], str]
_OF_INDEXES: Final[tuple[_Act, ...]] = (
    _lose_index,
    _shorten_index,
    _flip_index,
    _zero_index,
    _stale_index,
)
_ACTS: Final[tuple[_Act, ...]] = (
    _tear,
    _tear,
    _tear_to_zeros,
    _add_garbage,
    _flip_log,
    _lose_snapshots,
    _flip_snapshot,
    _lose_epochs,
    _lose_segment,
    _move_log_start,
    _leave_deleted,
    _leave_swap,
    _leave_swap,
)
