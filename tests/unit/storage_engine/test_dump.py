"""What `dump` yields for every kind of file, sound and damaged."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.inspection.dump import dump_file
from kafkalog.inspection.dump_entry import DumpOptions, is_damage
from kafkalog.inspection.dump_text import line
from tests.builders.batch_builder import GZIP, Record, batch, batch_data, marker
from tests.builders.message_builder import message, wrapper
from tests.builders.segment_files import aborted_entry, name, producer_snapshot, write_segment

DEEP = DumpOptions(deep_iteration=True)
DATA = DumpOptions(print_data_log=True)
BATCHES = [batch(0, 4), batch(4, 4, last=9), batch(10, 4), batch(14, 4), batch(18, 4)]


def dumped(path: Path, options: DumpOptions | None = None) -> list[dict[str, Any]]:
    return list(dump_file(path, options))


def of_type(entries: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["type"] == kind]


def findings(path: Path, options: DumpOptions | None = None) -> list[str]:
    return [entry["kind"] for entry in of_type(dumped(path, options), "finding")]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    write_segment(tmp_path, 0, BATCHES, interval=50)
    return tmp_path / name(0, ".log")


# --- logs ----------------------------------------------------------------------------------------


def test_a_batch_has_the_fields_of_its_header(tmp_path: Path) -> None:
    data = batch_data(
        [Record(5, 1000, b"k", b"v")],
        last_offset=8,
        attributes=0x50,
        base_timestamp=900,
        leader_epoch=2,
        producer=(7, 1, 2**31 - 2),
    )
    path = tmp_path / name(5, ".log")
    path.write_bytes(data)
    first, entry = dumped(path)
    assert first == {"type": "log", "startOffset": 5}
    assert entry == {
        "type": "batch",
        "baseOffset": 5,
        "lastOffset": 8,
        "count": 1,
        "baseSequence": 2**31 - 2,
        "lastSequence": 1,
        "producerId": 7,
        "producerEpoch": 1,
        "partitionLeaderEpoch": 2,
        "isTransactional": True,
        "isControl": False,
        "deleteHorizonMs": 900,
        "position": 0,
        "timestampType": "CreateTime",
        "maxTimestamp": 1000,
        "size": len(data),
        "magic": 2,
        "compresscodec": "none",
        "crc": struct.unpack_from(">I", data, 17)[0],
        "isvalid": True,
    }


def test_deep_iteration_adds_records_and_printing_adds_their_data(log: Path) -> None:
    assert of_type(dumped(log), "record") == []
    assert [entry["offset"] for entry in of_type(dumped(log, DEEP), "record")] == [
        record.offset for item in BATCHES for record in item.records
    ]
    assert "key" not in of_type(dumped(log, DEEP), "record")[0]
    assert [(entry["key"], entry["payload"]) for entry in of_type(dumped(log, DATA), "record")] == [
        (record.key, record.value) for item in BATCHES for record in item.records
    ]


def test_headers_are_those_of_the_record(tmp_path: Path) -> None:
    headers = [(b"a", b"1"), (b"", None), (b"\xff", b""), (b"long" * 50, b"x" * 300)]
    records = [Record(0, 1, None, None, headers), Record(1, 2, b"", b"")]
    path = tmp_path / name(0, ".log")
    path.write_bytes(batch_data(records))
    first, second = of_type(dumped(path, DATA), "record")
    assert first["headers"] == headers
    assert first["headerKeys"] == ["a", "", "\ufffd", "long" * 50]
    assert (first["key"], first["payload"], first["keySize"], first["valueSize"]) == (
        *(None, None),
        *(-1, -1),
    )
    assert (second["key"], second["payload"], second["headerKeys"]) == (b"", b"", [])


def test_a_marker_says_what_it_ends(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [batch(0, 1), marker(1)])
    record = of_type(dumped(tmp_path / name(0, ".log"), DATA), "record")[1]
    assert (record["endTxnMarker"], record["coordinatorEpoch"]) == ("COMMIT", 0)
    assert "key" not in record


@pytest.mark.parametrize("magic", [0, 1])
def test_messages_within_a_wrapper_are_iterated(tmp_path: Path, magic: int) -> None:
    inner = [Record(n, 1000 + n, b"k", b"v%d" % n) for n in range(1, 4)]
    data = message(magic, 0, b"a", None, timestamp=7)
    data += wrapper(magic, GZIP, inner)
    path = tmp_path / name(0, ".log")
    path.write_bytes(data)
    entries = dumped(path, DATA)
    assert [entry["offset"] for entry in of_type(entries, "message")] == [0, 3]
    assert [(e["offset"], e["payload"]) for e in of_type(entries, "record")] == [
        (0, None),
        (1, b"v1"),
        (2, b"v2"),
        (3, b"v3"),
    ]
    assert line(of_type(entries, "message")[0], bytes.decode).startswith("offset: 0 position: 0 ")


def test_only_whole_batches_below_max_bytes_are_looked_at(log: Path) -> None:
    two = len(BATCHES[0].data + BATCHES[1].data)
    entries = dumped(log, DumpOptions(max_bytes=two + 5))
    assert [entry["baseOffset"] for entry in of_type(entries, "batch")] == [0, 4]
    assert of_type(entries, "finding") == []


def test_a_batch_with_a_wrong_checksum_is_shown_and_the_next_ones_too(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    data[70] ^= 1
    log.write_bytes(data)
    entries = dumped(log, DEEP)
    assert [entry["isvalid"] for entry in of_type(entries, "batch")] == [
        *(False, True, True, True),
        False,
    ]
    assert {entry["offset"] for entry in of_type(entries, "record")} == set(range(4, 18)) - {8, 9}
    assert findings(log) == ["checksum", "checksum"]


def test_records_that_do_not_decode_are_a_finding(tmp_path: Path) -> None:
    path = tmp_path / name(0, ".log")
    path.write_bytes(batch_data([Record(0, 1, b"k", b"v")], payload=b"\x08\x00\x00\x00\x7f"))
    assert findings(path) == []
    assert findings(path, DEEP) == ["records"]


def test_gaps_are_told_and_are_not_damage(log: Path) -> None:
    (gap,) = of_type(dumped(log, DEEP), "finding")
    assert (gap["kind"], gap["before"], gap["offset"]) == ("gap", 7, 10)
    assert not is_damage(gap)
    assert line(gap, bytes.decode) == "  7 is followed by 10"


@pytest.mark.parametrize(
    ("tail", "kind"), [(b"garbage", "trailing bytes"), (bytes(5000), "preallocated")]
)
def test_bytes_after_the_last_batch_are_counted(log: Path, tail: bytes, kind: str) -> None:
    with log.open("ab") as file:
        file.write(tail)
    (found,) = of_type(dumped(log), "finding")
    assert (found["kind"], found["size"]) == (kind, len(tail))
    assert is_damage(found) == (kind == "trailing bytes")
    expected = f"Found {len(tail)} invalid bytes at the end of {log.name}"
    assert line(found, bytes.decode) == expected


def test_a_log_cut_at_any_byte_is_dumped_up_to_there(log: Path) -> None:
    data = log.read_bytes()
    ends = [len(b"".join(item.data for item in BATCHES[:count])) for count in range(6)]
    for size in range(len(data)):
        log.write_bytes(data[:size])
        entries = dumped(log, DEEP)
        assert len(of_type(entries, "batch")) == sum(0 < end <= size for end in ends)
        end = max(end for end in ends if end <= size)
        # The first bytes of an offset cannot be told from the zeros of a preallocated file.
        kind = "trailing bytes" if any(data[end:size]) else "preallocated"
        found = [e["kind"] for e in of_type(entries, "finding") if e["kind"] != "gap"]
        assert found == ([] if size == end else [kind]), size


# --- indexes -------------------------------------------------------------------------------------


def test_index_entries_are_compared_with_the_log(log: Path) -> None:
    index = log.with_suffix(".index")
    entries = dumped(index)
    assert [(entry["offset"], entry["position"]) for entry in entries] == [
        (item.last_offset, len(b"".join(b.data for b in BATCHES[:place])))
        for place, item in enumerate(BATCHES)
        if place
    ]
    data = bytearray(index.read_bytes())
    data[3] += 1
    index.write_bytes(data)
    (found,) = dumped(index, DumpOptions(verify_index_only=True))
    assert (found["kind"], found["indexOffset"], found["logOffset"]) == ("index mismatch", 10, 9)


def test_time_index_entries_are_compared_with_the_log(log: Path) -> None:
    index = log.with_suffix(".timeindex")
    assert findings(index) == []
    assert len(dumped(index)) == 4
    data = index.read_bytes()
    for position, kinds in ((7, {"time mismatch"}), (11, {"time offset"}), (0, {"time mismatch"})):
        changed = bytearray(data)
        changed[position] ^= 1
        index.write_bytes(changed)
        assert kinds <= set(findings(index)), position
    index.write_bytes(data[12:24] + data[:12])
    assert findings(index) == ["time order"]


def test_zeros_end_an_index(log: Path) -> None:
    for suffix in (".index", ".timeindex"):
        index = log.with_suffix(suffix)
        before = dumped(index)
        index.write_bytes(index.read_bytes() + bytes(2400))
        assert dumped(index) == before


def test_half_an_entry_is_a_finding(log: Path) -> None:
    for suffix in (".index", ".timeindex"):
        index = log.with_suffix(suffix)
        index.write_bytes(index.read_bytes()[:-3])
        assert findings(index) == ["index size"]
        assert findings(index, DumpOptions(index_sanity_check=True)) == ["index size"]


def test_the_sanity_check_looks_at_the_last_entry_alone(log: Path) -> None:
    check = DumpOptions(index_sanity_check=True)
    index = log.with_suffix(".index")
    data = index.read_bytes()
    assert [entry["type"] for entry in dumped(index, check)] == ["sanity check"]
    index.write_bytes(b"\xff" + data[1:])
    assert findings(index, check) == []
    index.write_bytes(data[:-8] + b"\xff" * 8)
    assert findings(index, check) == ["index offset"]


def test_an_index_without_a_log_is_shown_unconfirmed(log: Path) -> None:
    log.unlink()
    index = log.with_suffix(".index")
    entries = dumped(index)
    assert of_type(entries, "finding")[0]["kind"] == "no log"
    assert len(of_type(entries, "index entry")) == 4


@pytest.mark.parametrize("stage", [".cleaned", ".swap", ".deleted"])
def test_files_of_a_cleaning_are_dumped_like_live_ones(log: Path, stage: str) -> None:
    for path in list(log.parent.iterdir()):
        path.rename(path.with_name(path.name + stage))
    assert len(of_type(dumped(log.with_name(log.name + stage)), "batch")) == len(BATCHES)
    index = log.with_suffix(".index")
    assert findings(index.with_name(index.name + stage)) == []


def test_aborted_transactions_are_shown_with_half_an_entry_told(tmp_path: Path) -> None:
    path = tmp_path / name(0, ".txnindex")
    path.write_bytes(aborted_entry(7, 1, 5) + b"half")
    entry, found = dumped(path)
    assert line(entry, bytes.decode) == (
        "version: 0 producerId: 7 firstOffset: 1 lastOffset: 5 lastStableOffset: 6"
    )
    assert is_damage(found)


def test_producers_are_shown_and_a_damaged_snapshot_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / name(9, ".snapshot")
    data = producer_snapshot([(7, 1, 3, 8, 4, 1000, 2, 5)])
    path.write_bytes(data)
    (entry,) = dumped(path)
    assert line(entry, bytes.decode) == (
        "producerId: 7 producerEpoch: 1 coordinatorEpoch: 2 currentTxnFirstOffset: OptionalLong[5] "
        "lastTimestamp: 1000 firstSequence: 2147483647 lastSequence: 3 lastOffset: 8 "
        "offsetDelta: 4 timestamp: 1000"
    )
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert findings(path) == ["damage"], size


# --- the other files -----------------------------------------------------------------------------


def test_checkpoints_are_shown_entry_by_entry(tmp_path: Path) -> None:
    path = tmp_path / "leader-epoch-checkpoint"
    path.write_text("0\n2\n0 0\n3 17\n")
    assert [(entry["epoch"], entry["startOffset"]) for entry in dumped(path)] == [(0, 0), (3, 17)]
    path = tmp_path / "replication-offset-checkpoint"
    path.write_text("0\n1\nsome-topic 3 17\n")
    (entry,) = dumped(path)
    assert (entry["topic"], entry["partition"], entry["offset"]) == ("some-topic", 3, 17)
    path.write_text("")
    assert dumped(path) == []


@pytest.mark.parametrize(
    "text", ["1\n0\n", "0\nx\n", "0\n2\nt 0 1\n", "0\n1\nt 0\n", "0\n1\nt x 1\n"]
)
def test_a_malformed_checkpoint_is_a_finding(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recovery-point-offset-checkpoint"
    path.write_text(text)
    assert "damage" in findings(path)


def test_metadata_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "partition.metadata"
    path.write_text("version: 0\ntopic_id: abc")
    assert dumped(path) == [{"type": "properties", "version": "0", "topic_id": "abc"}]
    path = tmp_path / "meta.properties"
    path.write_text("#comment\nversion=1\ncluster.id=x\n")
    assert dumped(path) == [{"type": "properties", "version": "1", "cluster.id": "x"}]


def test_the_journal_is_shown_record_by_record(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        log.append("t", [(b"k", b"v")], now_ms=5)
    path = tmp_path / "log" / "commit"
    header, *records = dumped(path)
    assert header["type"] == "journal"
    assert [entry["number"] for entry in records] == [1, 2]
    assert all(entry["isPublished"] for entry in records)
    assert records[1]["change"]["partitions"]["t"]["0"][0] == 1
    data = bytearray(path.read_bytes())
    data[520 + len("record")] ^= 1
    path.write_bytes(data)
    assert findings(path) == ["damage"]


def test_an_unknown_name_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InvalidInputError, match=r"notes\.txt"):
        dumped(tmp_path / "notes.txt")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for missing in (name(0, ".log"), name(0, ".index"), "commit", "leader-epoch-checkpoint"):
        with pytest.raises(StorageError, match=missing):
            dumped(tmp_path / missing)
