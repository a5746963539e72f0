"""Directories and buckets of systems that speak Kafka's protocol and have another format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import open_log
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.store_log import memory_address
from tests.unit.storage_engine.test_metadata_log import batch, frame, partition, topic, written

REDPANDA = "it is a directory of Redpanda, and its format is not Kafka's"
TANSU = "it is storage of Tansu, and its format is not Kafka's"
NOT_READ = "kafkalog does not read it"


def redpanda(data: Path) -> Path:
    for name in ("kafka/orders/0_23", "redpanda/controller/0_0", "kafka_internal/id_allocator/0_7"):
        (data / name).mkdir(parents=True)
        (data / name / "0-1-v1.log").write_bytes(bytes(61))
        (data / name / "0-1-v1.base_index").write_bytes(bytes(20))
    (data / "pid.lock").touch()
    return data


def tansu(bucket: Path) -> Path:
    cluster = bucket / "clusters/tansu"
    partition = cluster / "topics/orders/partitions/0000000000"
    (partition / "records").mkdir(parents=True)
    (partition / "watermark.json").write_text("{}")
    (partition / f"records/{0:020d}.batch").write_bytes(bytes(70))
    (cluster / "groups").mkdir()
    return bucket


@pytest.mark.parametrize(
    "below", ["", "kafka", "kafka/orders", "kafka/orders/0_23", "kafka/orders/0_23/0-1-v1.log"]
)
@pytest.mark.parametrize(
    "use",
    [
        lambda path: kafkalog.open(path, read_only=True),
        kafkalog.open,
        lambda path: list(verify(path)),
        lambda path: adopt(path, now_ms=0),
    ],
)
def test_a_directory_of_redpanda_is_named_and_left_alone(
    tmp_path: Path, below: str, use: Callable[[Path], object]
) -> None:
    data = redpanda(tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError, match="Redpanda, and its format is not Kafka's") as told:
        use(data / below)
    assert NOT_READ in str(told.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_tansus_storage_is_named_in_a_directory_and_in_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=TANSU):
        kafkalog.open(tansu(tmp_path), read_only=True)
    address = memory_address()
    client = ObjectClient(address)
    for path in tmp_path.rglob("*.*"):
        client.create(str(path.relative_to(tmp_path)), path.read_bytes())
    client.create("clusters/tansu/groups/consumers/g.json", b"{}")
    with pytest.raises(InvalidInputError, match=TANSU):
        open_log(address, read_only=True, create=False)


def test_a_broker_of_automq_has_metadata_and_one_sentence_about_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = BrokerRoot(tmp_path / "log").path
    stream = frame(501, bytes(28) + b"\0")
    written(root, batch(0, [topic("orders"), partition(0), stream]))
    with kafkalog.open(root, read_only=True) as log:
        log.topics()
    assert any("the cluster was AutoMQ's" in each for each in caplog.messages)
    (found,) = (each for each in verify(root) if "AutoMQ" in str(each))
    assert not found.is_damage


@pytest.mark.parametrize("name", ["clusters/mine/topics", "0-1/data", "orders/0_23/1-1.log"])
def test_another_directory_is_not_taken_for_theirs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InvalidInputError) as told:
        kafkalog.open(tmp_path, read_only=True)
    assert NOT_READ not in str(told.value)
