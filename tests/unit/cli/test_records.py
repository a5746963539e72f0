"""`append` and `read`: what goes in comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders.batch_builder import ABORT, at_times, joined, marker
from tests.unit.cli.conftest import Command


@pytest.fixture
def root(kafkalog: Command, tmp_path: Path) -> Path:
    assert kafkalog("topics", "create", tmp_path / "log", "t", "--partitions", 2).status == 0
    return tmp_path / "log"


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


RECORDS = [
    {"key": "a", "value": "1", "timestamp": 1_700_000_000_123},
    {"key": "b", "value": None, "timestamp": 5, "partition": 1},
    {"key": "ä", "value": "", "headers": [{"key": "h", "value": "x"}, {"key": "", "value": None}]},
]


def test_records_come_back_as_they_were_appended(kafkalog: Command, root: Path) -> None:
    result = kafkalog("append", root, "t", stdin=lines(*RECORDS) + b"\n")
    assert result.status == 0
    assert result.lines[-1] == "3 records appended"
    found = {record["key"]: record for record in kafkalog("read", root, "t", "--json").json}
    for record in RECORDS:
        assert record.items() <= found[record["key"]].items()
    assert "headers" not in found["a"]
    assert found["b"]["partition"] == 1


@pytest.mark.parametrize("encoding", ["utf8", "base64", "hex"])
def test_what_is_read_can_be_appended_again(
    kafkalog: Command, root: Path, tmp_path: Path, encoding: str
) -> None:
    option = ("--encoding", encoding)
    kafkalog("append", root, "t", stdin=lines(*RECORDS))
    printed = kafkalog("read", root, "t", "--json", *option).out
    kafkalog("topics", "create", root, "copy", "--partitions", 2)
    path = tmp_path / "records"
    path.write_text(printed)
    assert kafkalog("append", root, "copy", path, *option).status == 0
    again = kafkalog("read", root, "copy", "--json", *option).json
    assert [{**record, "topic": "t"} for record in again] == [
        json.loads(line) for line in printed.splitlines()
    ]


def test_bytes_that_are_not_text_are_not_lost(kafkalog: Command, root: Path) -> None:
    record = {"key": "ff00", "value": "80", "headers": [{"key": "h", "value": "fe"}]}
    kafkalog("append", root, "t", "--encoding", "hex", stdin=lines(record))
    refused = kafkalog("read", root, "t", "--json")
    assert refused.status == 2
    assert "offset 0: the key is not UTF-8; use --encoding base64 or hex" in refused.err
    (found,) = kafkalog("read", root, "t", "--json", "--encoding", "hex").json
    assert found["timestampType"] == "CreateTime"
    assert record.items() <= found.items()
    assert "\ufffd" in kafkalog("read", root, "t").out


@pytest.mark.parametrize(
    "value",
    ['{"n": 1, "tags": ["a", "ä"], "in": {"value": 2}}', "[1,2]", "0.10", "1e400", "true", "{}"],
)
def test_a_value_that_is_not_text_is_written_as_the_json_of_its_line(
    kafkalog: Command, root: Path, value: str
) -> None:
    line = '{"headers":[{"key":"value","value":"x"}], "value" :\t' + value + ' , "key":"k"}'
    assert kafkalog("append", root, "t", stdin=line.encode()).status == 0
    (found,) = kafkalog("read", root, "t", "--json").json
    assert (found["key"], found["value"]) == ("k", value)


def test_a_key_that_is_not_text_is_written_as_the_json_of_its_line(
    kafkalog: Command, root: Path
) -> None:
    line = '{"value":"v","key": {"region": "eu","id":1.0} }'
    assert kafkalog("append", root, "t", stdin=line.encode()).status == 0
    (found,) = kafkalog("read", root, "t", "--json").json
    assert (found["key"], found["value"]) == ('{"region": "eu","id":1.0}', "v")


def test_a_value_in_an_encoding_is_text_or_null(kafkalog: Command, root: Path) -> None:
    line = lines({"key": "00", "value": {"n": 1}})
    refused = kafkalog("append", root, "t", "--encoding", "hex", stdin=line)
    assert (refused.status, refused.out) == (2, "")
    assert "line 1: value: expected text or null, found" in refused.err


def test_a_range_of_one_partition_is_read(kafkalog: Command, root: Path) -> None:
    records = [{"key": f"{n}", "value": "v"} for n in range(10)]
    kafkalog("append", root, "t", "--partition", 0, stdin=lines(*records))
    place = ("read", root, "t", "--json", "--partition", 0)
    ranged = kafkalog(*place, "--start", 3, "--end", 5).json
    assert [record["key"] for record in ranged] == ["3", "4"]
    assert kafkalog("read", root, "t", "--start", 3).status == 2
    for option in ("--start", "--end"):
        outside = kafkalog(*place, option, 11)
        assert (outside.status, outside.out) == (1, "")
        assert "the valid range is [0, 10]" in outside.err


def test_a_line_tells_partition_offset_time_key_and_value(kafkalog: Command, root: Path) -> None:
    record = {"key": None, "value": "v", "timestamp": 1_700_000_000_123}
    kafkalog("topics", "alter", root, "t", "--config", "cleanup.policy=delete")
    kafkalog("append", root, "t", "--partition", 1, stdin=lines(record))
    assert kafkalog("read", root, "t").lines == ["1\t0\t2023-11-14T22:13:20.123Z\tnull\tv"]


def test_a_record_without_a_key_is_told_which_topics_take_it(kafkalog: Command, root: Path) -> None:
    record = lines({"key": None, "value": "v"})
    refused = kafkalog("append", root, "t", stdin=record)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "command line's --config cleanup.policy=delete" in refused.err
    kafkalog("topics", "create", root, "events", "--config", "cleanup.policy=delete")
    assert kafkalog("append", root, "events", stdin=record).status == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 2: expected a JSON object"),
        (b"[]", "line 2: expected a JSON object"),
        (b"apple=6", "lines of text are for --text and --key-separator"),
        (b"[" * 100_000, "line 2: "),
        (b'{"key":"a"}', "the field 'value' is missing"),
        (b'{"key":"k","value":{"n":NaN}}', "line 2: expected a JSON object: NaN is not JSON"),
        (b'{"value":"v","kye":"a"}', "unknown field 'kye'"),
        (b'{"key":"k","value":"v","timestamp":"now"}', "timestamp: expected a whole number"),
        (b'{"key":"k","value":"v","timestamp":9223372036854775808}', "timestamp: expected a whole"),
        (b'{"key":"k","value":"v","partition":true}', "partition: expected a whole number"),
        (b'{"key":"k","value":"v","headers":[1]}', "headers: expected objects"),
        (b'{"key":"k","value":"v","headers":[{"value":"x"}]}', "a header's key is text"),
        (b'{"key":"k","value":"\\ud800"}', "value: "),
        (b'{"key":"k","value":"v","partition":7}', "partition"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_appended(
    kafkalog: Command, root: Path, line: bytes, reason: str
) -> None:
    result = kafkalog("append", root, "t", stdin=lines(RECORDS[0]) + line + b"\n")
    assert (result.status, result.out) == (2, "")
    assert reason in result.err
    assert result.err.count("\n") == 1
    assert kafkalog("read", root, "t").lines == []
    assert [path.name for path in root.iterdir() if "staged" in path.name] == []


def test_many_records_are_one_commit(
    kafkalog: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kafkalog.cli import append

    monkeypatch.setattr(append, "_PORTION_SIZE", 1000)
    records = lines(*({"key": f"{n}", "value": "v" * 50} for n in range(2000)))
    before = kafkalog("status", root, "--json").json[0]["record"]
    assert kafkalog("append", root, "t", stdin=records).lines[-1] == "2000 records appended"
    assert kafkalog("status", root, "--json").json[0]["record"] == before + 1
    assert len(kafkalog("read", root, "t").lines) == 2000


def test_nothing_is_appended_from_nothing(kafkalog: Command, root: Path) -> None:
    result = kafkalog("append", root, "t")
    assert (result.status, result.out) == (0, "0 records appended\n")


def test_whole_batches_are_appended_raw(kafkalog: Command, root: Path) -> None:
    kafkalog("append", root, "t", "--partition", 0, stdin=lines(*RECORDS))
    (source,) = (root / "t-0").glob("*.log")
    kafkalog("topics", "create", root, "copy")
    result = kafkalog("append", root, "copy", "--raw", source, "--partition", 0, "--json")
    assert result.json == [{"topic": "copy", "partition": 0, "offset": 0, "nextOffset": 3}]
    assert (root / "copy-0" / source.name).read_bytes() == source.read_bytes()
    again = kafkalog("append", root, "copy", "--raw", source, "--partition", 0)
    assert again.status == 2
    assert kafkalog("verify", root, "--deep").status == 0


@pytest.mark.parametrize("option", [[], ["--partition", 0, "--raw"]])
def test_a_missing_input_file_is_wrong_usage(
    kafkalog: Command, root: Path, tmp_path: Path, option: list[str | int]
) -> None:
    result = kafkalog("append", root, "t", *option, tmp_path / "none")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"kafkalog: {tmp_path / 'none'}: No such file or directory\n"


def test_one_is_not_many(kafkalog: Command, root: Path) -> None:
    result = kafkalog("append", root, "t", stdin=lines(RECORDS[0]))
    assert result.lines[-1] == "1 record appended"


def test_where_no_log_is_the_verb_that_makes_one_is_named(
    kafkalog: Command, tmp_path: Path
) -> None:
    for verb in ("append", "read"):
        result = kafkalog(verb, tmp_path / "x", "t")
        assert result.status == 2
        assert f"kafkalog topics create {tmp_path / 'x'} NAME" in result.err


def test_raw_needs_a_partition_and_takes_no_other_file(kafkalog: Command, root: Path) -> None:
    assert kafkalog("append", root, "t", "--raw", "x.log").status == 2
    assert kafkalog("append", root, "t", "y", "--raw", "x.log", "--partition", 0).status == 2


def test_transactions_count_as_the_isolation_level_says(kafkalog: Command, root: Path) -> None:
    batches = [at_times(0, [1], 7, transactional=True), marker(1, ABORT, 7, timestamp=2)]
    path = root.parent / "aborted.log"
    path.write_bytes(joined(batches))
    assert kafkalog("append", root, "t", "--raw", path, "--partition", 0).status == 0
    assert kafkalog("read", root, "t").lines == []
    level = ("--isolation-level", "read_uncommitted")
    assert len(kafkalog("read", root, "t", *level).lines) == 1
    assert kafkalog("verify", root).status == 0
