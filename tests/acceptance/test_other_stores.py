"""Other servers of S3: a log works where conditional writes do; elsewhere it is refused."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.log import KafkaLog
from tests.object_store_server import BUCKET
from tests.other_store_servers import OtherStoreServer, fault

pytestmark = pytest.mark.slow
WRITERS = 3
COMMITS = 6
TOPIC = {"cleanup.policy": "compact", "segment.bytes": "4096"}
Opening = Callable[[], KafkaLog]


@pytest.fixture
def opening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    """Return what opens a log of the test's own on the server of this name."""
    reason = fault(request.param)
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    key = "S3RVER" if request.param == "s3rver" else "any"  # the one that s3rver knows
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
    path = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    with OtherStoreServer(request.param) as server:
        options = {
            "store.endpoint": f"http://127.0.0.1:{server.port}",
            "store.region": "us-east-1",
            "store.allow_http": "true",
        }
        yield lambda: kafkalog.open(path, options=options)


@pytest.mark.parametrize("opening", ["moto"], indirect=True)
def test_a_store_whose_conditional_writes_race_has_one_writer_or_is_refused(
    opening: Opening,
) -> None:
    """moto looks for an object and then makes it, so two creators may win. The probe may see it."""
    values = [b"%d" % number for number in range(COMMITS)]
    try:
        log = opening()
    except StorageError as fault:
        assert "creators of one object win (expected 1)" in str(fault)
        return
    with log:
        log.create_topic("t", 1, TOPIC)
        for value in values:
            log.append("t", [(b"k", value)])
        read = [value for batch in log.read("t", 0) for value in batch["value"].to_pylist()]
        assert read == values
        (stats,) = log.clean("t", force=True)
        assert (stats.error, stats.records_removed) == (None, COMMITS - 1)


@pytest.mark.parametrize("opening", ["gofakes3"], indirect=True)
def test_writers_at_once_lose_and_double_nothing_and_a_cleaning_keeps_the_latest(
    opening: Opening,
) -> None:
    values = {
        b"%d" % writer: [b"%d-%d" % (writer, number) for number in range(COMMITS)]
        for writer in range(WRITERS)
    }

    def write(key: bytes) -> None:
        with opening() as log:
            for value in values[key]:
                log.append("t", [(key, value)])

    with opening() as log:
        log.create_topic("t", 1, TOPIC)
    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, values))
    with opening() as log:
        read = [value for batch in log.read("t", 0) for value in batch["value"].to_pylist()]
        assert Counter(read) == Counter(value for written in values.values() for value in written)
        (stats,) = log.clean("t", force=True)
        assert (stats.error, stats.records_removed) == (None, WRITERS * (COMMITS - 1))
        kept = [value for batch in log.read("t", 0) for value in batch["value"].to_pylist()]
    assert sorted(kept) == [written[-1] for written in values.values()]


@pytest.mark.parametrize("opening", ["s3proxy", "s3rver"], indirect=True)
def test_a_store_without_conditional_writes_is_refused_by_name(opening: Opening) -> None:
    with pytest.raises(StorageError, match=r"creators of one object win .expected 1.. Use a store"):
        opening()
