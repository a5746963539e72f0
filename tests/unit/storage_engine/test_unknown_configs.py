"""What a broker's directory does not say is not guessed: an adoption keeps every record for it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests.builders.batch_builder import BatchBuilder
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine import test_metadata_log as metadata
from tests.unit.storage_engine.broker_root import TOPIC_ID, BrokerRoot

NOW_MS = 1_700_000_000_000
YEAR_MS = 365 * 86_400_000
KEYS = [(b"a", b"1"), (b"gone", b"1"), (b"gone", None), (b"b", b"1")]


def broker(root: Path, **config: str) -> Path:
    """Write a stopped broker's directory; `config` is what the cluster's metadata has of `t`."""
    made = BrokerRoot(root)
    directory = made.partition("t-0", bases=(0,), end=0)
    for base in (0, len(KEYS)):
        builder = BatchBuilder(base_offset=base)
        for key, value in KEYS:
            builder.add(key, value, timestamp=1000)
        write_segment(directory, base, [builder.build()])
    made.shut_down()
    if config:
        topic_id = base64.urlsafe_b64decode(TOPIC_ID + "==")
        records = [metadata.frame(2, metadata.text("t") + topic_id + b"\0")]
        records.append(metadata.partition(0, topic_id))
        for name, value in config.items():
            records.append(metadata.config("t", name.replace("_", "."), value))
        place = root / "__cluster_metadata-0"
        place.mkdir()
        (place / f"{0:020d}.log").write_bytes(metadata.batch(0, records))
    return root


def take(root: Path, config: dict[str, dict[str, str]] | None = None) -> str:
    return "\n".join(adopt(root, config=config, now_ms=NOW_MS).notices)


def left_after_years(root: Path) -> list[tuple[bytes, bytes | None]]:
    """Return what four cleanings, each followed by retention and a year, leave of the topic."""
    with DirectoryLog(root) as engine:
        for year in range(1, 5):
            clean(engine, force=True, now_ms=NOW_MS + year * YEAR_MS)
            engine.apply_retention(now_ms=NOW_MS + year * YEAR_MS)
        rows = [row for table in engine.read("t", 0) for row in table.to_pylist()]
    return [(row["key"], row["value"]) for row in rows]


POLICIES = ["delete", "compact", "compact,delete"]
ALL = {"delete": 2 * KEYS, "compact": [KEYS[0], *KEYS[2:]], "compact,delete": [KEYS[0], *KEYS[2:]]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", ["metadata", "topic", "all", "altered", "taken again"])
def test_an_adoption_deletes_nothing_that_an_unknown_config_may_keep(
    tmp_path: Path, policy: str, source: str
) -> None:
    given = {"cleanup.policy": policy}
    root = broker(
        tmp_path / "kafka", **({"cleanup_policy": policy} if source == "metadata" else {})
    )
    config = {"topic": {"t": given}, "all": {"*": given}, "taken again": {"t": given}}
    said = take(root, config.get(source))
    if source == "altered":
        with DirectoryLog(root) as engine:
            engine.alter_topic("t", given)
        assert "cleanup.policy is not known" in said
    else:
        assert ("its retention.ms is not known" in said) == ("delete" in policy)
        assert ("its delete.retention.ms is not known" in said) == ("compact" in policy)
    if source == "taken again":
        release(root, now_ms=NOW_MS)
        take(root)
    assert left_after_years(root) == ALL[policy]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", ["metadata", "topic", "all", "altered"])
def test_what_is_known_is_obeyed_and_nothing_is_said(
    tmp_path: Path, policy: str, source: str
) -> None:
    known = {"retention.ms": str(10 * YEAR_MS), "delete.retention.ms": "0"}
    given = {"cleanup.policy": policy, **known}
    in_metadata = {name.replace(".", "_"): value for name, value in given.items()}
    root = broker(tmp_path / "kafka", **(in_metadata if source == "metadata" else {}))
    said = take(root, {"topic": {"t": given}, "all": {"*": given}}.get(source))
    if source == "altered":
        with DirectoryLog(root) as engine:
            engine.alter_topic("t", given)
    else:
        assert said == ""
    left = left_after_years(root)
    assert left == ([] if "delete" in policy else [KEYS[0], KEYS[3]])


@pytest.mark.parametrize("given", [{}, {"cleanup.policy": "compact"}])
def test_a_copy_goes_on_after_an_adoption_only_if_no_deletion_can_be_missing(
    tmp_path: Path, given: dict[str, str]
) -> None:
    root, copied = broker(tmp_path / "kafka", cleanup_policy="compact"), tmp_path / "copy"
    with DirectoryLog(root, read_only=True) as source, DirectoryLog(copied) as destination:
        copy(source, destination, now_ms=NOW_MS)
    builder = BatchBuilder(base_offset=9).add(b"c", b"1")  # the broker cleaned offset 8 away
    write_segment(root / "t-0", 9, [builder.build()])
    (root / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 9\n")
    take(root, {"t": given})
    with (
        DirectoryLog(root, read_only=True) as source,
        DirectoryLog(copied) as destination,
        pytest.raises(InvalidInputError, match=r"delete\.retention\.ms"),
    ):
        copy(source, destination, now_ms=NOW_MS + 1)
