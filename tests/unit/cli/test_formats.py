"""Records in kcat's format, the last of them, and configs with units."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import kafkalog as library
from kafkalog.cli.terminal.config_text import config_text, config_value
from kafkalog.cli.terminal.record_format import RecordFormat
from kafkalog.errors import InvalidInputError
from tests.unit.cli.conftest import Command

MS = 1_700_000_000_000
ROW = {
    "topic": "t",
    "partition": 1,
    "offset": 7,
    "timestamp": MS * 1000,
    "key": b"k",
    "value": b"v\xff",
    "headers": [{"key": "by", "value": b"ann"}, {"key": "no", "value": None}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with library.open(tmp_path / "log") as log:
        log.create_topic("t", 2, {"cleanup.policy": "delete"})
        columns = {
            "key": [*(f"k{n}" for n in range(12)), "gone"],
            "value": [*(f"{n}" for n in range(12)), None],
            "partition": [n % 2 for n in range(13)],
        }
        log.append("t", pa.table(columns), now_ms=MS)
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (r"%t %p %o %k %s\n", b"t 1 7 k v\xff\n"),
        (r"%T|%K|%S|%h", b"1700000000000|1|2|by=ann,no=NULL"),
        (r"100%%\t\x41\0\\\r", b"100%\tA\0\\\r"),
        (r"%R%s", b"\0\0\0\x02v\xff"),
        ("é%k", "ék".encode()),
        ("", b""),
    ],
)
def test_a_format_has_the_tokens_of_kcat(text: str, line: bytes) -> None:
    assert RecordFormat(text).line(ROW) == line


def test_a_null_has_no_text_and_the_size_minus_one() -> None:
    nothing = {**ROW, "key": None, "value": None, "headers": None}
    assert RecordFormat("[%k|%K|%s|%S|%h]").line(nothing) == b"[|-1||-1|]"
    assert RecordFormat("%R").line(nothing) == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("text", ["%x", "%", "\\q", "\\", "\\xZZ", "\\x4"])
def test_what_means_nothing_in_a_format_is_named(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"--format: .* means nothing .*%t %p %o"):
        RecordFormat(f"a{text}")


def test_records_are_read_in_a_format(kafkalog: Command, root: Path) -> None:
    read = kafkalog("read", root, "t", "--partition", 0, "--start", 5, "--format", r"%t/%p/%o %k\n")
    assert (read.status, read.lines) == (0, ["t/0/5 k10", "t/0/6 gone"])
    encoded = kafkalog(
        "read", root, "t", "--partition", 1, "--limit", 1, "--format", "%s,", "--encoding", "hex"
    )
    assert encoded.out == "31,"
    assert kafkalog("read", root, "t", "--format", "%x").status == 2
    assert kafkalog("read", root, "t", "--format", "%s", "--json").status == 2


def test_a_negative_start_counts_from_the_end_of_each_partition(
    kafkalog: Command, root: Path
) -> None:
    def offsets(*options: object) -> list[tuple[int, int]]:
        rows = kafkalog("read", root, "t", "--json", *options).json
        return [(row["partition"], row["offset"]) for row in rows]

    assert offsets("--start", -1) == [(0, 6), (1, 5)]
    assert offsets("--start", -2, "--partition", 0) == [(0, 5), (0, 6)]
    assert len(offsets("--start", -100)) == 13
    assert kafkalog("read", root, "t", "--start", "1").status == 2  # of which partition?


def test_tail_prints_the_last_records(kafkalog: Command, root: Path) -> None:
    def keys(*options: object) -> list[str]:
        return [row["key"] for row in kafkalog("tail", root, "t", "--json", *options).json]

    assert keys("-n", 1) == ["gone", "k11"]
    assert keys("-n", 2, "--partition", 1) == ["k9", "k11"]
    assert len(keys()) == 13
    assert keys("-n", 0) == []
    assert kafkalog("tail", root, "t", "-n", "1", "--format", r"%o\n").lines == ["6", "5"]


def test_tail_counts_records_where_a_cleaning_has_left_gaps(kafkalog: Command, root: Path) -> None:
    with library.open(root) as log:
        log.alter_topic("t", {"cleanup.policy": "compact"})
        log.append("t", [("only", str(number)) for number in range(20)])
        log.clean("t", force=True)
        kept = {
            number: [row["offset"] for batch in log.read("t", number) for row in batch.to_pylist()]
            for number in log.offsets("t")
        }
    for count in (1, 2, 3, 50):
        shown = kafkalog("tail", root, "t", "-n", count, "--json").json
        for number, offsets in kept.items():
            found = [row["offset"] for row in shown if row["partition"] == number]
            assert found == offsets[-count:]


def test_records_before_an_offset_are_deleted(kafkalog: Command, root: Path) -> None:
    (row,) = kafkalog("delete-records", root, "t", "--partition", 0, "--before", 3, "--json").json
    assert row == {"topic": "t", "partition": 0, "logStartOffset": 3}
    assert kafkalog("delete-records", root, "t", "--before", -1).lines == [
        "t-0 begins at offset 7",
        "t-1 begins at offset 6",
    ]
    assert kafkalog("read", root, "t").lines == []
    assert kafkalog("delete-records", root, "t", "--before", 3).status == 2
    assert kafkalog("delete-records", root, "t", "--before", 9, "--partition", 0).status == 1
    kafkalog("topics", "create", root, "c")
    refused = kafkalog("delete-records", root, "c", "--before", -1)
    assert (refused.status, "cleanup.policy" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "typed", "value", "shown"),
    [
        ("retention.ms", "1d", "86400000", "1d"),
        ("retention.ms", "36h", "129600000", "36h"),
        ("retention.ms", "1500", "1500", "1500"),
        ("retention.ms", "1500ms", "1500", "1500"),
        ("retention.ms", "-1", "-1", "-1"),
        ("segment.bytes", "64MiB", "67108864", "64MiB"),
        ("segment.bytes", "1000", "1000", "1000"),
        ("flush.messages", "5", "5", "5"),
        ("cleanup.policy", "compact", "compact", "compact"),
    ],
)
def test_a_config_has_units_as_it_is_typed_and_shown(
    name: str, typed: str, value: str, shown: str
) -> None:
    assert config_value(name, typed) == value
    assert config_text({name: value}) == f"{name}={shown}"


@pytest.mark.parametrize(("name", "typed"), [("retention.ms", "1y"), ("segment.bytes", "1d")])
def test_an_unknown_unit_is_named_with_those_there_are(name: str, typed: str) -> None:
    with pytest.raises(
        InvalidInputError, match=f"config {name}: .* is not a unit .expected one of"
    ):
        config_value(name, typed)
