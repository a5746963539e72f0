"""Groups and Kafka's own topics on a broker's disk beside what Kafka's own tools print of them.

In CI a few seeds; all of them with KAFKALOG_GROUPS=full (`make groups-test`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import pytest

from kafkalog.inspection.consumer_group import GroupType
from kafkalog.inspection.groups import Groups, read_groups
from kafkalog.storage_engine.place import open_log
from tests.conformance.group_disk import GroupDisk
from tests.conformance.test_dump import our_lines

pytestmark = [pytest.mark.peers, pytest.mark.slow]

SEEDS: Final = 30 if os.environ.get("KAFKALOG_GROUPS") == "full" else 2
_ABSENT: Final = "-"


@pytest.fixture(scope="module")
def disk(peers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupDisk]:
    yield GroupDisk(tmp_path_factory.mktemp("groups"), SEEDS)


def found_on(disk: GroupDisk) -> Groups:
    with open_log(disk.root, read_only=True, create=False) as log:
        return read_groups(log)


def test_positions_are_those_that_kafka_consumer_groups_prints(disk: GroupDisk) -> None:
    columns = "GROUP", "TOPIC", "PARTITION", "LEADER-EPOCH", "CURRENT-OFFSET", "LOG-END-OFFSET"
    wanted = {tuple(row[name] for name in (*columns, "LAG")) for row in disk.groups}
    found: set[tuple[Any, ...]] = set()
    for group in found_on(disk).by_name.values():
        if group.type is not GroupType.SHARE:
            for at in group.positions:
                epoch = _ABSENT if at.leader_epoch is None else at.leader_epoch
                row = group.name, at.topic, at.partition, epoch, at.offset, at.end, at.lag
                found.add(tuple(map(str, row)))
    assert len(wanted) > 15 * SEEDS
    assert found == wanted


def test_start_offsets_are_those_that_kafka_share_groups_prints(disk: GroupDisk) -> None:
    columns = "GROUP", "TOPIC", "PARTITION", "START-OFFSET", "LAG"
    wanted = {
        tuple(row[name] for name in columns)
        for row in disk.shared
        if row["START-OFFSET"] != _ABSENT
    }
    found = {
        tuple(map(str, (group.name, at.topic, at.partition, at.offset, at.lag)))
        for group in found_on(disk).by_name.values()
        if group.type is GroupType.SHARE
        for at in group.positions
    }
    assert len(wanted) >= SEEDS
    assert found == wanted


def test_every_record_of_a_broker_is_of_a_known_type_and_sound(disk: GroupDisk) -> None:
    found = found_on(disk)
    assert not found.unknown and not found.damage and not found.notices


def test_the_decoders_print_the_lines_of_kafka_dump_log(disk: GroupDisk) -> None:
    files = disk.files()
    for (option, paths), lines in zip(files.items(), disk.printed(files), strict=True):
        assert sum(line.startswith("|") for line in lines) > 3, option
        assert our_lines(paths, option) == lines, option
