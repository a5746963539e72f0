"""Fuzz targets of the files beside a log: indexes, snapshots, checkpoints, marks, JSON, text."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from crc32c import crc32c

from kafkalog.cleaner.dedup.latest_records import _read_deaths
from kafkalog.cleaner.key_index.key_index import KeyIndex, KeyIndexWriter, key_hashes
from kafkalog.cleaner.state.delete_horizon import read_delete_horizon
from kafkalog.cleaner.state.last_cleaning import read_cleanings
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.cli import append as cli_append
from kafkalog.cli import release as cli_release
from kafkalog.cli.terminal.json_records import json_record
from kafkalog.cli.terminal.output import Encoding
from kafkalog.cli.terminal.text_records import TextLines
from kafkalog.datasource.checkpoint import read_checkpoint
from kafkalog.datasource.offsets import StartOrEnd, from_json, parse_object
from kafkalog.errors import InvalidInputError
from kafkalog.sink.query import end_offsets
from kafkalog.sink.views.generations import Generations
from kafkalog.storage_engine.directory import ended_pins, pin_file
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.remote_log_starts import read_remote_log_starts
from kafkalog.storage_engine.ownership import adopted_topics
from kafkalog.storage_engine.records.records import index_records, scan_batches
from kafkalog.storage_engine.segment.gaps import GapFile
from kafkalog.storage_engine.segment.index import OffsetIndex, TimeIndex
from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile
from kafkalog.storage_engine.segment.segments import SegmentFiles
from kafkalog.storage_engine.transactions.producer_snapshot import parse_snapshot
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedRanges,
    aborted_transactions,
    size_kept,
)
from tests.torture import fuzz_checksums
from tests.torture.fuzz_target import Case, Target, file_target
from tests.unit.storage_engine import sample_root

_ID: Final = "AAAAAAAAAAAAAAAAAAAAAQ"
_REMOTE: Final = f"t 0 {_ID} 5 40 0 5 3 30\n".encode()


def targets() -> list[Target]:
    """Return them all."""
    return [
        Target(name="offset_index", begin=_index(layout.INDEX)),
        Target(name="time_index", begin=_index(layout.TIME_INDEX)),
        file_target("transaction_index", _name(layout.TRANSACTION_INDEX), _aborted(), _entries),
        file_target(
            "producer_snapshot",
            _name(layout.SNAPSHOT),
            lambda path: parse_snapshot(path.read_bytes(), path),
            lambda _: [sample_root.varied().snapshot(offset) for offset in (0, 60, 73)],
            mend=fuzz_checksums.snapshot,
        ),
        Target(name="key_index", begin=_keys, mend=fuzz_checksums.blocks),
        file_target("gaps", layout.GAPS, _gaps, _gap_lists, mend=fuzz_checksums.gaps),
        *_texts(),
    ]


def _name(suffix: str) -> str:
    return layout.segment_file(0, suffix)


# --- indexes -------------------------------------------------------------------------------------


def _segment(directory: Path) -> OpenSegmentFile:
    """A sound segment of eight batches at base offset 0."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / _name(layout.LOG)
    items = [sample_root.stored(sample_root.some(n * 4, 4)) for n in range(8)]
    log.write_bytes(b"".join(item.data for item in items))
    files = SegmentFiles(directory, 0, log.stat().st_size)
    return OpenSegmentFile(files, end_offset=layout.INT64_MAX, committed=None)


def _index(suffix: str) -> Callable[[Path], Case]:
    """An index is a hint: whatever is in it, the segment beside it is read as without one."""

    def begin(directory: Path) -> Case:
        segment = _segment(directory)
        path = directory / _name(suffix)

        def found() -> list[object]:
            return [
                *([p for p, _ in segment.batches_from(offset)] for offset in (0, 5, 17, 31, 40)),
                *([p for p, _ in segment.batches_since(time)] for time in (0, 1005, 1017, 9999)),
                max((header.max_timestamp for _, header in segment.batches_since_largest()[1])),
            ]

        expected = found()

        def decode(data: bytes) -> None:
            path.write_bytes(data)
            index = OffsetIndex(path, 0) if suffix == layout.INDEX else TimeIndex(path, 0)
            index.last_entry()
            for wanted in (0, 1, 1017, layout.INT64_MAX):
                assert len(list(index.hints(wanted))) <= len(data) // index.entry_size
            if isinstance(index, OffsetIndex):
                index.entry_at(500)
            got = found()
            assert got == expected, f"{got} instead of {expected}"

        position = segment.limit // 8
        pairs = [(n * 4 + 3, n * position) for n in range(1, 8)]
        if suffix == layout.INDEX:
            data = b"".join(layout.OFFSET_INDEX_ENTRY.pack(*pair) for pair in pairs)
        else:
            data = b"".join(layout.TIME_INDEX_ENTRY.pack(1000 + n, n) for n, _ in pairs)
        return Case(decode, [data, data + bytes(40), data[:20]])

    return begin


def _entries(_: Path) -> list[bytes]:
    rows = [(0, 7, 40, 47, 48), (0, 7, 51, 62, 63), (0, 9, 1, 70, 70)]
    return [b"".join(struct.pack(">hqqqq", *row) for row in rows[:n]) for n in (1, 3)]


def _aborted() -> Callable[[Path], None]:
    """The entries are compared with the batches of a segment with transactions."""
    data = sample_root.varied().segments[1].data

    def decode(path: Path) -> None:
        size_kept(path, lambda entry: entry.last_offset < 50)
        found = AbortedRanges.of(aborted_transactions(path))
        table, _, _ = scan_batches(data)
        found.cover(table)
        found.end_at(table.producer_ids, table.last_offsets)
        found.overlapping(0, 60).ending_within(0, 60)

    return decode


def _keys(directory: Path) -> Case:
    """A key index is of its segment, or not used; if it is, positions come out."""
    segment = _segment(directory)
    data = segment.files.log.read_bytes()
    table, _, _ = scan_batches(data)
    records = index_records(data, table, path="seed", file_position=0)
    rows = np.flatnonzero(records.key_sizes >= 0).astype(np.int64)
    secret = bytes(range(16))
    hashes = key_hashes(records, rows, secret)
    positions = table.positions[records.batch_index[rows]]
    seeds = []
    for times in (1, 100):
        writer = KeyIndexWriter(directory, 0, secret)
        writer.add(np.tile(hashes, times), np.tile(positions, times))
        writer.finish(segment.files.log, segment.limit, table.positions.tolist())
        seeds.append(writer.temporary.read_bytes())
        writer.temporary.unlink()
    path = directory / layout.key_index_file(0)
    wanted = np.unique(hashes)

    def decode(changed: bytes) -> None:
        path.write_bytes(changed)
        index = KeyIndex.open(directory, segment)
        if index is None:
            return
        try:
            for key in (b"k1", b"none", b""):
                index.positions(key)
            index.positions_of(wanted)
        finally:
            index.close()

    return Case(decode, seeds)


def _gaps(path: Path) -> None:
    file = GapFile(path)
    try:
        for section in file.sections():
            _ = section.is_unlisted, section.last_to(), list(section.all())
            section.between(0, 50)
            list(section.data())
        file.sections_of(0)
    finally:
        file.close()


def _gap_lists(_: Path) -> list[bytes]:
    logs = (sample_root.mirrored(), sample_root.swapping(), sample_root.varied())
    return [data for log in logs for data in sample_root.gap_lists(log).values()]


# --- text and JSON -------------------------------------------------------------------------------


def _texts() -> list[Target]:
    epochs = b"0\n3\n0 0\n2 60\n5 900\n"
    offsets = b"0\n2\nt 0 100\nsome.topic-1 1 9223372036854775807\n"
    properties = (
        b"#\n#Mon\nversion=1\ncluster.id=c\nnode.id=1\ndirectory.id=AAAAAAAAAAAAAAAAAAAAAA\n"
    )
    horizon = {"version": 1, "first_dirty_offset": 0, "earliest_delete_horizon_ms": 5}
    names = ("ended_ms", "elapsed_ms", "start_offset", "end_offset", "rounds", "records_read",
             "records_kept", "bytes_read", "bytes_written", "tombstones")  # fmt: skip
    last = {"version": 1, **dict.fromkeys(names, 7)}
    mark = {"version": 1, "reason": "why", "failures": 1, "since_ms": 1, "retry_at_ms": 2,
            "config": {"a": "b"}}  # fmt: skip
    pin = {"version": 1, "number": 3, "topics": {"t": [_ID, [[0, 10, 10], [5, 6, 6]]]}, "crc": 0}
    view = {"topic": "t", "topic_id": _ID, "query_ids": ["a", "b"], "was_emptied": False}
    checkpoint = b'v1\n{"batchWatermarkMs":0}\n{"t":{"0":10,"1":20}}\n-\n'
    named = b'v2\n{"batchWatermarkMs":0}\n0:{"t":{"0":10}}\n1:-\n'
    rows = [
        {"key": "k", "value": "v", "headers": [{"key": "h", "value": "00"}], "timestamp": 5},
        {"key": None, "value": None, "partition": 1, "topic": "t", "offset": 3},
    ]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    config = {"cleanup.policy": "compact,delete", "segment.bytes": "1000", "retention.ms": "-1",
              "min.cleanable.dirty.ratio": "0.5", "compression.type": "zstd"}  # fmt: skip
    specific = b'{"t":{"0":23,"1":-1},"u":"earliest"}'
    found = {
        layout.LEADER_EPOCH_CHECKPOINT: (_epochs, [epochs]),
        layout.RECOVERY_POINT_CHECKPOINT: (checkpoints.read_offset_checkpoint, [offsets]),
        layout.LOG_START_CHECKPOINT: (checkpoints.read_offset_checkpoint, [offsets]),
        layout.CLEANER_CHECKPOINT: (checkpoints.read_offset_checkpoint, [offsets]),
        layout.REPLICATION_CHECKPOINT: (checkpoints.read_offset_checkpoint, [offsets]),
        layout.PARTITION_METADATA: (
            lambda path: checkpoints.read_topic_id(path.parent),
            [checkpoints.partition_metadata(_ID)],
        ),
        layout.META_PROPERTIES: (checkpoints.read_properties, [properties]),
        layout.DELETE_HORIZON: (
            lambda path: read_delete_horizon(DirectoryNotes(path.parent), 0),
            [_json(horizon)],
        ),
        layout.LAST_CLEANING: (
            lambda path: read_cleanings(DirectoryNotes(path.parent)),
            [_json(last)],
        ),
        layout.UNCLEANABLE: (_mark, [_json(mark)]),
        layout.SPILLING: (
            lambda path: _read_deaths(path.parent),
            [_json({"version": 1, "deaths": 2})],
        ),
        layout.ADOPTED_TOPICS: (
            lambda path: adopted_topics._read(path.parent),
            [f"t {_ID}\nu {_ID}\n".encode()],
        ),
        layout.REMOTE_LOG_STARTS: (
            lambda path: read_remote_log_starts(path.parent),
            [b"%d\n%b" % (crc32c(_REMOTE), _REMOTE)],
        ),
        layout.PIN + "0" * 16 + "-1-" + "0" * 16: (
            pin_file.read,
            [fuzz_checksums.pin(_json(pin))],
        ),
        layout.ENDED_PINS: (
            lambda path: ended_pins.find(path.parent, _PIN),
            [fuzz_checksums.ended_pins(b"%s 5 {}\n%s0 6 -\n" % (_PIN.encode(), _PIN.encode()))],
        ),
        "1.json": (_view, [_json(view)]),
        "offsets/3": (lambda path: read_checkpoint(str(path.parents[1])), [checkpoint, named]),
        "metadata": (_query_id, [_json({"id": "0b0c"})]),
        "topic-ids": (cli_release._read_ids, [f"t {_ID}\nu={_ID}\n".encode()]),
        "lines": (_append, [lines, lines * 3]),
        "config": (_config, [_json(config)]),
        "spark-offsets": (_offsets, [specific, b"latest", b'{"t":{"0":10}}']),
    }
    names_of = {layout.PIN: "pin", "1.json": "view_generation", "offsets/3": "spark_checkpoint",
                "metadata": "spark_query_id", "lines": "cli_append"}  # fmt: skip
    return [
        file_target(
            next((n for start, n in names_of.items() if path.startswith(start)), _plain(path)),
            path,
            decode,
            lambda _, seeds=seeds: seeds,  # type: ignore[misc]
            mend=_MENDED.get(path[: len(layout.PIN)]),
            is_text=True,
        )
        for path, (decode, seeds) in found.items()
    ]


_PIN: Final = layout.PIN + "0" * 16 + "-x-" + "0" * 16
_MENDED: Final = {
    layout.PIN: fuzz_checksums.pin,
    layout.ENDED_PINS[: len(layout.PIN)]: fuzz_checksums.ended_pins,
}


def _plain(path: str) -> str:
    return path.removeprefix(layout.OURS).replace("-", "_").replace(".", "_")


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _epochs(path: Path) -> None:
    found = checkpoints.read_leader_epochs(path.parent)
    leader_epochs.trimmed(leader_epochs.committed(found, 100, 0), 50)


def _mark(path: Path) -> None:
    mark = read_uncleanable(DirectoryNotes(path.parent))
    if mark is not None:
        mark.is_due({}, 1)


def _view(path: Path) -> None:
    path.with_suffix("").mkdir(exist_ok=True)
    generations = Generations(path.parent)
    generations.topic(1)
    generations.was_emptied(1)
    generations.query_ids()


def _query_id(path: Path) -> None:
    (path.parent / "offsets").mkdir(exist_ok=True)
    read_checkpoint(str(path.parent))
    end_offsets([path.read_text(errors="replace")])
    generations = Generations(path.parent.parent)
    generations.query_id(1)


def _append(path: Path) -> None:
    for encoding in Encoding:
        for partition in (None, 3):
            given: dict[str, Any] = {"partition": partition, "encoding": encoding}
            with contextlib.suppress(InvalidInputError):
                _append_lines(path, partial(TextLines("=", "NULL").record, **given))
            _append_lines(path, partial(json_record, **given))


def _append_lines(path: Path, parse: Callable[[bytes], dict[str, Any] | None]) -> None:
    list(cli_append._batches(io.BytesIO(path.read_bytes()), parse, lambda _: None))


def _config(path: Path) -> None:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        TopicConfig.parse(found)


def _offsets(path: Path) -> None:
    """Take the text of an option, which Python has decoded, and the offsets that Spark brings."""
    text = path.read_text(errors="replace")
    end_offsets([text])
    nested = parse_object(text)
    if nested is not None:
        from_json(nested)
    StartOrEnd.parse(text, option="startingOffsets")
