"""What a release says of the topics that the broker's cluster does not know, or has too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.storage_engine.test_adopt import (
    OTHER_ID,
    TOPIC_ID,
    broker_partition,
    broker_root,
    give_back,
    metadata_log,
    take,
)


def changed(root: Path) -> None:
    with DirectoryLog(root) as engine:
        engine.create_topic("fresh")
        engine.delete_topic("t")


def test_an_unchanged_set_of_topics_needs_no_word(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    assert give_back(root).notices == ()
    assert not (root / "kl-adopted-topics").exists()


@pytest.mark.parametrize("with_metadata", [False, True])
def test_topics_created_and_deleted_here_are_named(tmp_path: Path, with_metadata: bool) -> None:
    root = broker_root(tmp_path)
    if with_metadata:
        metadata_log(root)
    take(root)
    changed(root)
    created, deleted = give_back(root).notices
    assert "does not know the topics fresh" in created
    assert "--topic-ids" in created
    assert "the topics t deleted here will come back empty" in deleted


def test_partitions_that_were_added_here_are_named(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    broker_partition(root, "t-1", TOPIC_ID)
    take(root, config={"t": {"cleanup.policy": "delete"}})
    with DirectoryLog(root) as engine:
        count = len(engine.describe("t").partitions)
        engine.alter_topic("t", partitions=count + 2)
    (notice,) = give_back(root).notices
    assert f"knows {count} of the {count + 2} partitions of the topic t," in notice
    assert "copy their records to another topic first" in notice


def test_a_topic_that_was_given_its_id_is_known(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    changed(root)
    (deleted,) = give_back(root, topic_ids={"fresh": OTHER_ID}).notices
    assert "come back empty" in deleted


def test_a_topic_created_anew_under_its_name_is_both(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    with DirectoryLog(root) as engine:
        engine.delete_topic("t")
        engine.create_topic("t")
    created, deleted = give_back(root).notices
    assert "does not know the topics t," in created
    assert "the topics t deleted" in deleted


def test_an_id_that_was_drawn_here_is_not_the_clusters(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    broker_partition(root, "old-0", None)
    take(root)
    (told,) = give_back(root).notices
    assert "the topics old had no id at the adoption" in told


def test_without_what_was_known_at_the_adoption_the_word_is_a_general_one(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    (root / "kl-adopted-topics").unlink()
    (notice,) = give_back(root).notices
    assert "a topic that was created here" in notice


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "1.5", "two"])
def test_a_line_without_a_number_of_partitions_is_skipped(tmp_path: Path, count: str) -> None:
    root = broker_root(tmp_path)
    take(root)
    with (root / "kl-adopted-topics").open("a") as file:
        file.write(f"broken {OTHER_ID} {count}\n")
    changed(root)
    created, deleted = give_back(root).notices
    assert "does not know the topics fresh" in created
    assert "the topics t deleted" in deleted


def test_ids_in_standard_base64_are_those_of_kafka(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    give_back(root, topic_ids={"t": "+/" + OTHER_ID[2:] + "=="})
    text = (root / "t-0" / "partition.metadata").read_text()
    assert text.endswith("-_" + OTHER_ID[2:])
    assert TOPIC_ID not in text
