"""Following a topic from Python: where it begins, what it yields, and what ends it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import DataLossError, InvalidInputError, OffsetOutOfRangeError
from kafkalog.storage_engine.log.followed_topic import FollowedTopic
from tests.unit.rules.places import Place

POLL_S = 0.01
PATIENCE_S = 10
AN_HOUR_S = 3600


def values(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    for batch in batches:
        yield from batch["value"].to_pylist()


def taken(followed: FollowedTopic, count: int) -> list[bytes]:
    found = values(followed)
    return [next(found) for _ in range(count)]


def test_a_follower_gets_what_is_there_and_then_each_commit(place: Place) -> None:
    place.topic(partitions=2)
    place.append(("a", "1"), partition=1)
    with place.log.follow("t", "earliest", poll_s=POLL_S) as followed:
        assert taken(followed, 1) == [b"1"]
        for number in range(3):
            place.append(("b", f"{number}"), partition=number % 2)
            assert taken(followed, 1) == [b"%d" % number]
        place.log.alter_topic("t", partitions=3, keys_may_move=True)
        place.append(("c", "new"), partition=2)
        assert taken(followed, 1) == [b"new"]


def test_a_follower_begins_at_the_end_or_where_it_is_told(place: Place) -> None:
    place.topic(partitions=2)
    place.append(("a", "0"), ("a", "1"), partition=0)
    place.append(("b", "2"), partition=1)
    with place.log.follow("t", poll_s=POLL_S) as late, place.log.follow("t", {0: 1}) as given:
        place.append(("c", "3"), partition=1)
        assert taken(late, 1) == [b"3"]
        assert taken(given, 3) == [b"1", b"2", b"3"]


def test_a_follower_has_the_columns_of_a_read(place: Place) -> None:
    place.topic()
    place.append(("a", "1"))
    for include_headers in (False, True):
        with place.log.follow("t", "earliest", include_headers=include_headers) as followed:
            (read,) = place.log.read("t", 0, include_headers=include_headers)
            assert next(iter(followed)) == read


@pytest.mark.parametrize("start", [{0: 2}, {0: -1}])
def test_a_start_that_is_not_there_is_refused(place: Place, start: dict[int, int]) -> None:
    place.topic()
    place.append(("a", "1"))
    with pytest.raises(OffsetOutOfRangeError):
        place.log.follow("t", start)


def test_a_start_of_another_kind_is_refused(place: Place) -> None:
    place.topic()
    with pytest.raises(InvalidInputError, match="start: expected 'earliest', 'latest' or a dict"):
        place.log.follow("t", "beginning")
    with pytest.raises(InvalidInputError, match="isolation level"):
        place.log.follow("t", isolation_level="serializable")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"start": {0: "1"}}, "start: the offset of partition 0: expected a whole number"),
        ({"start": {0: 1.5}}, "start: the offset of partition 0: expected a whole number"),
        ({"start": {"0": 0}}, "start: a partition: expected a whole number"),
        *(({"poll_s": each}, "poll_s: expected seconds above 0") for each in (0, -1, "1", None)),
        ({"poll_s": math.nan}, "poll_s: expected seconds above 0"),
        ({"poll_s": math.inf}, "poll_s: expected seconds above 0"),
    ],
)
def test_a_wrong_offset_or_time_of_a_follower_is_refused_at_once(
    place: Place, given: dict[str, Any], found: str
) -> None:
    with pytest.raises(InvalidInputError, match=found):
        place.topic().log.follow("t", **given)


def test_a_follower_ends_with_the_log(place: Place) -> None:
    place.topic()
    other = place.other(read_only=True)
    followed = other.follow("t", poll_s=POLL_S)
    closing = threading.Timer(0.05, other.close)
    closing.start()
    assert list(followed) == []
    closing.join()


def test_async_for_gets_each_commit_and_a_cancelled_task_ends(place: Place) -> None:
    place.topic()
    found: list[bytes] = []

    async def follow() -> None:
        async for batch in followed:
            found.extend(batch["value"].to_pylist())
            seen.set()

    async def work() -> None:
        task = asyncio.create_task(follow())
        for number in range(2):
            place.append(("a", f"{number}"))
            await seen.wait()
            seen.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    seen = asyncio.Event()
    followed = place.log.follow("t", poll_s=POLL_S)
    asyncio.run(work())
    assert found == [b"0", b"1"]


def test_tasks_that_follow_leave_the_threads_of_asyncio_to_others(place: Place) -> None:
    place.topic()

    async def first(followed: FollowedTopic) -> list[bytes]:
        async for batch in followed:
            found: list[bytes] = batch["value"].to_pylist()
            return found
        return []

    async def work() -> list[bytes]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        idle, busy = (asyncio.create_task(first(each)) for each in followed)
        await asyncio.sleep(0)
        try:
            append = asyncio.to_thread(place.log.append, "busy", [("a", "1")])
            await asyncio.wait_for(append, PATIENCE_S)
            return await asyncio.wait_for(busy, PATIENCE_S)
        finally:
            for each in followed:
                each.close()
            assert await idle == []

    place.log.create_topic("busy")
    followed = [place.log.follow(topic, poll_s=POLL_S) for topic in ("t", "busy")]
    assert asyncio.run(work()) == [b"1"]


def test_what_retention_takes_before_it_is_read_is_an_error(place: Place) -> None:
    place.topic(cleanup_policy="delete")
    with place.log.follow("t", poll_s=POLL_S) as followed:
        place.append(("a", "1"), ("a", "2"))
        place.log.delete_records("t", 0, 1)
        with pytest.raises(DataLossError, match=r"offsets 0 to 0 were deleted .* from \{0: 1\}"):
            next(iter(followed))


def test_a_topic_that_is_deleted_ends_its_followers_with_an_error(place: Place) -> None:
    place.topic()
    with place.log.follow("t", poll_s=POLL_S) as followed:
        place.log.delete_topic("t")
        with pytest.raises(DataLossError, match="topic 't' was deleted while it was followed"):
            next(iter(followed))


def test_a_commit_wakes_a_follower_that_would_look_again_in_an_hour(place: Place) -> None:
    place.topic()
    poll_s = AN_HOUR_S if place.tells_of_commits else POLL_S
    with place.log.follow("t", poll_s=poll_s) as followed:
        appending = threading.Timer(0.1, lambda: place.append(("a", "1")))
        appending.start()
        assert taken(followed, 1) == [b"1"]
        appending.join()


def test_a_table_has_the_latest_record_of_each_key(place: Place) -> None:
    place.topic(partitions=2)
    empty = place.log.table("t")
    assert empty.num_rows == 0
    place.append(("a", "1"), ("b", "1"), ("a", "2"), partition=0)
    place.append(("c", "1"), ("c", None), partition=1)
    found = place.log.table("t")
    assert found.schema == empty.schema
    assert dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True)) == {
        b"a": b"2",
        b"b": b"1",
    }
    assert place.log.table("t", partition=1).num_rows == 0
    assert "headers" in place.log.table("t", include_headers=True).schema.names


def test_all_partitions_are_read_in_turn(place: Place) -> None:
    place.topic(partitions=3)
    place.append(("a", "0"), partition=2)
    place.append(("b", "1"), partition=0)
    assert [*values(place.log.read("t"))] == [b"1", b"0"]
    with pytest.raises(InvalidInputError, match="Name the partition"):
        next(place.log.read("t", start=1))


def test_an_empty_topic_gives_one_empty_batch_with_the_columns(place: Place) -> None:
    place.topic(partitions=2)
    for arguments in ({}, {"partition": 1}, {"columns": ["key"]}, {"include_headers": True}):
        (empty,) = place.log.read("t", **arguments)
        assert empty.num_rows == 0
        place.append(("a", "1"), partition=1)
        assert next(place.log.read("t", **arguments)).schema == empty.schema
        place.log.delete_topic("t")
        place.topic(partitions=2)


def test_a_closed_log_is_not_followed(place: Place) -> None:
    place.topic()
    place.log.close()
    with pytest.raises(InvalidInputError, match="the log is closed: open it again"):
        place.log.follow("t")
