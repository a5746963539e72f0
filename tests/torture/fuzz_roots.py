"""Fuzz targets that are a whole directory: one file of it is changed, and the log is used.

Here a decoder's value is believed by what comes after it: views, transactions, cleaning, appending,
adopting, verifying. Checksums are valid, so this is what a program that wrote nonsense, and not a
disk that lost bits, would leave behind.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pyarrow as pa

import kafkalog
from kafkalog.inspection.verify import verify
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import journal
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import Run, StagedFile, StagedMessage
from tests.torture import fuzz_checksums
from tests.torture.fuzz_target import Case, Target, exhaust, file_target, refusing
from tests.unit.storage_engine import sample_root
from tests.unit.storage_engine.sample_root import NOW_MS, Log, Root, Segment
from tests.unit.storage_engine.times import offset_since

_SCHEMA = changelog_schema(include_headers=True)
_PLAIN = changelog_schema()
_ACTIVE = Path("t-0") / layout.segment_file(60, layout.LOG)


def targets() -> list[Target]:
    """Return them all."""
    return [
        file_target(
            "journal", layout.COMMIT, _read_journal, _journals, mend=fuzz_checksums.journal
        ),
        Target(name="journal_record", begin=_journal_record, is_text=True, weight=2.0),
        Target(name="journal_state", begin=_journal_state, weight=2.0),
        _of_root("root_log", _ACTIVE, _use, mend=fuzz_checksums.batches),
        _of_root("root_journal", Path(layout.COMMIT), _use, mend=fuzz_checksums.journal),
        _of_root("root_clean", _ACTIVE, _clean, mend=fuzz_checksums.batches, is_written=True),
        _of_root("root_verify", _ACTIVE, _verify, mend=fuzz_checksums.batches),
        _of_broker("broker_log", _ACTIVE, fuzz_checksums.batches),
        _of_broker("broker_snapshot", _ACTIVE.with_suffix(".snapshot"), fuzz_checksums.snapshot),
        Target(name="raw_append", begin=_raw_append, mend=fuzz_checksums.batches),
        Target(name="staged", begin=_staged, mend=fuzz_checksums.batches),
    ]


# --- the journal ---------------------------------------------------------------------------------


def _journals(directory: Path) -> list[bytes]:
    root = Root(directory, logs=[sample_root.swapping(), sample_root.mirrored()])
    data = (root.path / layout.COMMIT).read_bytes()
    return [data[: len(data.rstrip(b"\0")) + 200]]


def _read_journal(path: Path) -> None:
    journal._READ_PAUSE_S = 0
    read = Journal(path)
    with refusing():
        read.published()
        read.is_recovered()
        read.published().snapshot()
    with refusing():
        exhaust(read.records()[1])
    Journal(path).recover()


def _journal_record(directory: Path) -> Case:
    """The last record of a journal says anything that JSON can say; its checksum is right."""
    root = Root(directory / "root", logs=[_small()])
    path = root.path / layout.COMMIT
    found = list(Journal(path).records()[1])
    seeds = [json.dumps(change).encode() for *_, change in found]
    write = _last_record(path)
    more = {"time_ms": 5, "unsynced": True, "rows": 2, "writers": {"w": [1, 2, 3], "x": None},
            "ends": {"w": "1-" + "0" * 32}, "forgotten_writers": {"x": 5},
            "deleting": {"id": ["t", 1, 7], "gone": None}}  # fmt: skip
    seeds += [json.dumps(more).encode(), json.dumps({**more, **found[-1][3]}).encode()]

    def decode(payload: bytes) -> None:
        write(path, payload)
        with refusing():
            _read_journal(path)
        _use(root.path)

    return Case(decode, seeds)


def _journal_state(directory: Path) -> Case:
    """The last record gives a partition any numbers of 64 bits; then it is read, and written to."""
    root = Root(directory / "root", logs=[_small()])
    write = _last_record(root.path / layout.COMMIT)
    *_, (*_, last) = Journal(root.path / layout.COMMIT).records()[1]
    known = last["partitions"]["t"]["0"]
    numbers = struct.Struct(f">{len(known)}q")

    def decode(data: bytes) -> None:
        values = numbers.unpack_from(data.ljust(numbers.size, b"\0"))
        change = {"time_ms": 5, "partitions": {"t": {"0": values}}}
        path = root.copy(directory / "copy")
        write(path / layout.COMMIT, json.dumps(change).encode())
        with refusing():
            _use(path)
        _clean(path)

    return Case(decode, [numbers.pack(*known)])


def _last_record(path: Path) -> Callable[[Path, bytes], None]:
    """Return what writes a journal whose last record has another payload."""
    before = path.read_bytes()
    last, _, number, _ = list(Journal(path).records()[1])[-1]

    def write(path: Path, payload: bytes) -> None:
        checksum = journal._checksum(number, payload)
        data = before[:last] + layout.JOURNAL_RECORD.pack(len(payload), checksum, number) + payload
        start = layout.JOURNAL_PUBLISHED_POSITION
        published = journal._published(len(data), len(data))
        data = data[:start] + published + data[start + len(published) :]
        path.write_bytes(data.ljust(len(before), b"\0") + bytes(64))

    return write


# --- a log of ours -------------------------------------------------------------------------------


def _small() -> Log:
    """Three segments with all codecs and transactions, one of them open."""
    return sample_root.varied()


def _of_root(
    name: str,
    file: Path,
    use: Callable[[Path], None],
    *,
    mend: Callable[[bytes], bytes],
    is_written: bool = False,
) -> Target:
    def begin(directory: Path) -> Case:
        root = Root(directory / "root", logs=[_small()])
        seed = (root.path / file).read_bytes()
        if file.name == layout.COMMIT:
            seed = seed[: len(seed.rstrip(b"\0")) + 100]
        return Case(_replacing(root, file, directory / "copy", use, is_written=is_written), [seed])

    return Target(name=name, begin=begin, mend=mend, weight=2.0)


def _replacing(
    root: Root, file: Path, copy: Path, use: Callable[[Path], None], *, is_written: bool
) -> Callable[[bytes], None]:
    """Return what uses a root with another content of one file: a copy, where it is written to."""
    size = (root.path / layout.COMMIT).stat().st_size if file.name == layout.COMMIT else 0

    def decode(data: bytes) -> None:
        path = root.copy(copy) if is_written else root.path
        (path / file).write_bytes(data.ljust(size, b"\0"))
        use(path)

    return decode


# With as many partitions as a topic may have, 100,000, this takes longer than one input has, and
# may: what is bounded is what one number in a file can ask for.
@mock.patch.object(layout, "PARTITIONS_MAX", 1_000)
def _use(path: Path) -> None:
    """Read everything there is, in every way."""
    journal._READ_PAUSE_S = 0
    log = kafkalog.open(path, read_only=True, create=False)
    with refusing():
        log.status(now_ms=NOW_MS)
    for topic in list(log.topics())[:3]:
        exhaust(log.latest(topic))
        with refusing():
            log.offsets(topic)
            log.lookup(topic, b"k1")
            log.explain(topic, now_ms=NOW_MS)
        for schema, is_committed in ((_SCHEMA, True), (_PLAIN, False)):
            with refusing(), directory_log_of(log).snapshot(topic, 0) as snapshot:
                start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
                exhaust(snapshot.read(start, end, schema=schema, read_committed=is_committed))
                for wanted in (0, 45, 61, 72):
                    with refusing():
                        snapshot.position_of(wanted)
                        offset_since(snapshot, 1000 + wanted)


def _clean(path: Path) -> None:
    log = kafkalog.open(path, create=False)
    with refusing():
        log.clean("t", force=True, now_ms=NOW_MS)
    _append(directory_log_of(log), "t")


def _append(log: DirectoryLog, topic: str) -> None:
    rows = pa.table({"key": [b"new"], "value": [b"v"]})
    with refusing():
        log.append(topic, rows, now_ms=NOW_MS)
    with refusing():
        exhaust(log.read(topic, 0))


def _verify(path: Path) -> None:
    exhaust(verify(path, deep=True))


# --- a broker's log ------------------------------------------------------------------------------


def _of_broker(name: str, file: Path, mend: Callable[[bytes], bytes]) -> Target:
    def begin(directory: Path) -> Case:
        root = Root(directory / "root", logs=[_small()])
        root.give_to_a_broker()
        for checkpoint in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
            (root.path / checkpoint).write_text("0\n1\nt 0 40\n")  # what is changed is looked at
        decode = _replacing(root, file, directory / "copy", _use_brokers, is_written=True)
        return Case(decode, [(root.path / file).read_bytes()])

    return Target(name=name, begin=begin, mend=mend, weight=2.0)


def _use_brokers(path: Path) -> None:
    with refusing():
        _use(path)
    adopt(path, config={"*": {"cleanup.policy": "delete"}}, now_ms=NOW_MS)
    _append(DirectoryLog(path, create=False), "t")


# --- what is brought to be written ---------------------------------------------------------------


def _fresh(directory: Path) -> Callable[[], tuple[KafkaLog, Path]]:
    """Return what opens an untouched copy of a root with a topic of one partition."""
    log = Log("t", 0, [Segment(layout.segment_file(0, layout.LOG), 0, [])])
    root = Root(directory / "root", logs=[log])

    def opened() -> tuple[KafkaLog, Path]:
        path = root.copy(directory / "copy")
        return kafkalog.open(path, create=False), path

    return opened


def _raw_append(directory: Path) -> Case:
    opened = _fresh(directory)
    source = directory / layout.segment_file(0, layout.LOG)

    def decode(data: bytes) -> None:
        source.write_bytes(data)
        log, _ = opened()
        try:
            log.append_raw("t", 0, source, now_ms=NOW_MS)
        finally:
            _append(directory_log_of(log), "t")

    varied, raw = sample_root.varied(), sample_root.mirrored()
    return Case(decode, [*_joined(varied.segments), *_joined(raw.segments)])


def _joined(segments: Sequence[Segment]) -> Iterator[bytes]:
    yield from (segment.data for segment in segments)
    yield b"".join(segment.data for segment in segments)


def _staged(directory: Path) -> Case:
    """Staged batches: in the message of a task, in a file of many runs, as a segment's file."""
    opened = _fresh(directory)

    def decode(data: bytes) -> None:
        from crc32c import crc32c

        for kind in ("message", "run", "segment"):
            log, path = opened()
            rows = 4
            run = Run("t", 0, -1, 0, len(data), rows)
            file: tuple[StagedFile, ...] = ()
            if kind != "message":
                name = f"t-0/{layout.staged_file('0' * 32, 1, 0, 0, 1)}{layout.STAGED}"
                (path / name).write_bytes(data)
                for suffix in (layout.STAGED_INDEX, layout.STAGED_TIME_INDEX):
                    (path / name).with_suffix(suffix).write_bytes(b"")
                file = (StagedFile(name, len(data), crc32c(data)),)
                run = Run("t", 0, 0, 0, len(data), rows, is_segment=kind == "segment")
            topic_id = log.describe("t").topic_id
            message = StagedMessage(
                topic_ids={"t": topic_id},
                files=file,
                runs=(run,),
                rows=rows,
                data=data if kind == "message" else b"",
            )
            with refusing():
                directory_log_of(log).commit([message], now_ms=NOW_MS)
            _append(directory_log_of(log), "t")
        shutil.rmtree(path)

    stored, some = sample_root.stored, sample_root.some
    one, two = stored(some(0, 4)), stored(some(0, 2)).data + stored(some(2, 2)).data
    return Case(decode, [one.data, two])
