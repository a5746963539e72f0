"""Kafka's messages by our table beside Kafka's own classes: the same fields from the same bytes.

A few draws in CI; many with KAFKALOG_GROUPS=full (`make groups-test`).
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from kafkalog.inspection.kafka_json import kafka_json
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.message import read_message
from tests.builders.batch_builder import BatchBuilder
from tests.builders.segment_files import write_segment
from tests.conformance import message_table
from tests.conformance.jars import PEERS, Jars
from tests.conformance.test_dump import kafkas_lines, our_lines

pytestmark = [pytest.mark.peers, pytest.mark.slow]

_SOURCE: Final = Path(__file__).with_name("MessageTwin.java")
_DRAWS: Final = 300 if os.environ.get("KAFKALOG_GROUPS") == "full" else 6
_BITS: Final = {"int8": 7, "int16": 15, "uint16": 15, "int32": 31, "int64": 63}
_TEXTS: Final = ("", "a", "orders", "späte Grüße", '"\\\n\x1f\x7f', "x" * 200)


@pytest.fixture(scope="module")
def jars(peers: None) -> Jars:
    if not (PEERS / ".ready").exists():
        pytest.skip("only the jars have the definitions and the encoder")
    return Jars.find()


def test_the_table_is_that_of_the_release(jars: Jars) -> None:
    assert message_table.TABLE.read_text() == message_table.made(message_table.JARS)


def test_every_message_of_every_version_is_read_as_kafka_wrote_it(jars: Jars) -> None:
    table = json.loads(message_table.TABLE.read_text())["messages"]
    draw = random.Random(11)
    wanted = [
        (name, version, drawn(draw, message["fields"], version))
        for name, message in sorted(table.items())
        for version in versions(message["versions"])
        for _ in range(_DRAWS)
    ]
    lines = "".join(f"{name} {version} {json.dumps(given)}\n" for name, version, given in wanted)
    result = subprocess.run(
        jars.source_command(_SOURCE), input=lines, capture_output=True, text=True, check=True
    )
    answers = result.stdout.splitlines()
    assert len(answers) == len(wanted) > 500
    for (name, version, _), answer in zip(wanted, answers, strict=True):
        data, _, words = answer.partition(" ")
        found, end = read_message(name, version, bytes.fromhex(data))
        assert kafka_json(found) == words, (name, version)
        assert end == len(data) // 2


def test_the_records_of_tiered_storage_are_dumped_in_kafkas_lines(
    jars: Jars, tmp_path: Path
) -> None:
    """Kafka's tool refuses offsets and states that cannot be; those that are drawn can."""
    table = json.loads(message_table.TABLE.read_text())
    draw = random.Random(12)
    wanted = []
    for number, name in table["records"]["__remote_log_metadata"].items():
        for _ in range(_DRAWS):
            given = drawn(draw, table["messages"][name]["fields"], 0)
            for field in given.keys() & {"startOffset", "endOffset"}:
                given[field] = abs(given[field]) // 2 + (2**62 if field == "endOffset" else 0)
            for field in given.keys() & {"remoteLogSegmentState", "remotePartitionDeleteState"}:
                given[field] = draw.randrange(3)
            if "segmentLeaderEpochs" in given:
                given["segmentLeaderEpochs"].append({"leaderEpoch": 7, "offset": 3})
            wanted.append((int(number), name, given))
    builder = BatchBuilder()
    for (number, _, _), data in zip(wanted, encoded(jars, wanted), strict=True):
        builder.add(None, bytes([1, number, 0]) + data)
    write_segment(tmp_path, 0, [builder.build()], indexes=False)
    paths, option = sorted(tmp_path.glob("*.log")), "--remote-log-metadata-decoder"
    lines = kafkas_lines(paths, option)
    assert sum(" payload: Remote" in line for line in lines) == len(wanted)
    assert our_lines(paths, option) == lines


def encoded(jars: Jars, wanted: Sequence[tuple[int, str, Mapping[str, Any]]]) -> list[bytes]:
    """Return the bytes of messages of version 0, by Kafka's encoder."""
    lines = "".join(f"{name} 0 {json.dumps(given)}\n" for _, name, given in wanted)
    result = subprocess.run(
        jars.source_command(_SOURCE), input=lines, capture_output=True, text=True, check=True
    )
    return [bytes.fromhex(line.partition(" ")[0]) for line in result.stdout.splitlines()]


def versions(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def has(spec: str | None, version: int) -> bool:
    if spec is None or spec == "none":
        return False
    first, _, last = spec.removesuffix("+").partition("-")
    return int(first) <= version and (spec.endswith("+") or version <= int(last or first))


def drawn(draw: random.Random, fields: Sequence[Mapping[str, Any]], version: int) -> dict[str, Any]:
    """Return fields with any values, as Kafka's JSON; tagged ones may be absent."""
    found = {}
    for field in fields:
        is_absent = "tag" in field and draw.random() < 0.4
        if has(field["versions"], version) and not is_absent:
            is_null = has(field.get("nullable"), version) and draw.random() < 0.3
            found[field["name"]] = None if is_null else value(draw, field, field["type"], version)
    return found


def value(draw: random.Random, field: Mapping[str, Any], kind: str, version: int) -> Any:
    if kind.startswith("[]"):
        return [value(draw, field, kind[2:], version) for _ in range(draw.choice((0, 1, 2, 5)))]
    if kind == "struct":
        return drawn(draw, field["fields"], version)
    if kind == "string":
        return draw.choice(_TEXTS)
    if kind == "bool":
        return draw.random() < 0.5
    if kind == "uuid":
        return layout.topic_id_text(draw.randbytes(16))
    if kind == "bytes":
        return base64.b64encode(draw.randbytes(draw.randrange(40))).decode()
    if kind == "float64":
        return draw.choice((0.0, 0.5, -1.25, 1e7, 123456789.125, 1e-4, 5e300))
    bits = draw.randrange(_BITS[kind] + 1)
    drawn_number = draw.getrandbits(bits) if bits else 0
    return drawn_number if kind == "uint16" or draw.random() < 0.8 else -drawn_number
