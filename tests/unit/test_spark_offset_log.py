"""Spark's offset log in both formats; the texts are those that Spark 4.3 writes."""

from __future__ import annotations

import pytest

from kafkalog.spark_offset_log import OffsetLogEntry, listed_files

PLANNED = '{"batchWatermarkMs":0,"batchTimestampMs":1795935097295,"conf":{}}'
V1 = f'v1\n{PLANNED}\n{{"t": {{"0": 1, "1": 0}}}}\n-\n7'
V2 = f'v2\n{PLANNED}\n2:7\n1:-\n0:{{"t":{{"1":0,"0":1}}}}'
NAMED = f'v2\n{PLANNED}\ntwo:{{"u": {{"0": 1}}}}\none:{{"t": {{"0": 1}}}}'


def test_a_source_has_its_number_or_its_name() -> None:
    assert OffsetLogEntry.parse(V1).sources == {"0": '{"t": {"0": 1, "1": 0}}', "1": "-", "2": "7"}
    assert OffsetLogEntry.parse(V2).sources == {"0": '{"t":{"1":0,"0":1}}', "1": "-", "2": "7"}
    assert OffsetLogEntry.parse(NAMED).sources["two"] == '{"u": {"0": 1}}'
    assert OffsetLogEntry.parse(NAMED).planned_ms == 1795935097295


def test_equal_ends_have_one_digest_and_others_another() -> None:
    entries = [OffsetLogEntry.parse(text) for text in (V1, V2, NAMED, V1.replace("7", "8"))]
    first, same, *others = [entry.ends({}) for entry in entries]
    assert first == same == "3-" + first[2:]
    assert first not in others


@pytest.mark.parametrize("text", ["", "v3\n{}\n7", "7", "{}\nv1"])
def test_another_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected the version v1 or v2"):
        OffsetLogEntry.parse(text)


@pytest.mark.parametrize("metadata", ["", "[]", "{}", '{"batchTimestampMs": "x"}', "[" * 100_000])
def test_metadata_of_another_form_has_no_time(metadata: str) -> None:
    assert OffsetLogEntry.parse(f"v1\n{metadata}\n7").planned_ms is None


def test_a_compacted_list_of_files_has_the_same_files_as_the_one_before() -> None:
    lines = [f'{{"path":"file:///d/{n}","timestamp":{n},"batchId":{n}}}' for n in range(11)]
    alone = "\n".join(["v1", lines[1]])
    assert listed_files("\n".join(["v1", *lines]), 1) == listed_files(alone, 1) != ""
    entry = OffsetLogEntry.parse(f'v1\n{PLANNED}\n{{"logOffset":1}}\n7')
    assert entry.file_sources == {"0": 1}
    assert entry.ends({"0": listed_files(alone, 1)}) != entry.ends({"0": lines[2]})
