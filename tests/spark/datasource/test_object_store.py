"""Spark reads a log in an S3 store as it reads a directory; a proxy counts the requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer
from tests.unit.datasource.two_logs import TwoLogs

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Job:
    """A running Spark job with the secret of a server."""

    def __init__(self, scratch: Path, server: StoreServer) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.datasource.stored_session", str(scratch)],
            cwd=ROOT,
            env={**os.environ, **server.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def ask(self, step: str, **options: str) -> Any:
        """Have the job do a step, and return what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([step, options]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("found "):
                return json.loads(line.removeprefix("found "))
        raise AssertionError(f"the job ended with {self._process.wait()}")

    def close(self) -> None:
        """Let the job end."""
        self._process.communicate(timeout=120)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, store_server: StoreServer) -> Iterator[Job]:
    made = Job(tmp_path_factory.mktemp("job"), store_server)
    yield made
    made.close()


@pytest.fixture
def two(tmp_path: Path, s3_address: StoreAddress) -> TwoLogs:
    """A directory and a store with the same records: 5 commits, 3 partitions."""
    options = {
        "store.endpoint": str(s3_address.endpoint),
        "store.region": "us-east-1",
        "store.allow_http": "true",
    }
    made = TwoLogs(tmp_path, str(s3_address), **options).topic()
    for count in (20, 1, 40, 3, 30):
        made.append(count)
    return made


def both(job: Job, two: TwoLogs, step: str, **options: str) -> list[Any]:
    """Return what a step makes of the directory and of the store."""
    given = {"subscribe": "t", **options}
    directory = {name: text + "-d" if name == "name" else text for name, text in given.items()}
    return [
        job.ask(step, path=two.directory, **directory),
        job.ask(step, path=two.url, **two.options, **given),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"includeHeaders": "true"},
        {"startingOffsets": '{"t":{"0":3,"1":0,"2":-2}}', "endingOffsets": "latest"},
        {"minPartitions": "7"},
        {"view": "latest"},
        {"view": "latest", "keys": '["k1", "k3"]'},
    ],
    ids=str,
)
def test_a_batch_read_gives_the_rows_of_a_directory(
    job: Job, two: TwoLogs, options: dict[str, str]
) -> None:
    ours, stored = both(job, two, "read", **options)
    assert stored == ours
    assert ours


@pytest.mark.parametrize("options", [{"startingOffsets": "earliest"}, {"view": "latest"}], ids=str)
def test_a_stream_gives_the_micro_batches_of_a_directory(
    job: Job, two: TwoLogs, options: dict[str, str]
) -> None:
    given = {**options, "maxOffsetsPerTrigger": "25", "name": "-".join(options)}
    ours, stored = both(job, two, "drain", **given)
    assert stored == ours
    assert len(ours) == (1 if "view" in options else 4)
    two.append(10)
    ours, stored = both(job, two, "drain", **given)
    assert stored == ours
    assert sum(map(len, ours)) == 10


def test_a_stream_from_a_store_into_a_store_lands_once(job: Job, two: TwoLogs) -> None:
    two.topic("copy")
    for turn in range(3):
        both(job, two, "copy", topic="copy", name="copies")
        if turn == 1:
            two.append(10)
    directory, stored = both(job, two, "read", subscribe="copy")
    assert len(stored) == 104
    assert stored == directory


def test_a_batch_write_creates_its_topic_in_a_store(job: Job, two: TwoLogs) -> None:
    options = {"path": two.url, **two.options}
    job.ask("write", **options, topic="made", numPartitions="2")
    found = job.ask("read", **options, subscribe="made")
    assert sorted(row[3:5] for row in found) == [["a", "1"], ["b", "2"]]


def test_tasks_send_a_request_for_each_object_and_none_for_the_state(
    job: Job, two: TwoLogs, store_proxy: StoreProxy
) -> None:
    options = {"path": two.url, "subscribe": "t", **two.options}
    assert job.ask("tasks", **options) == 1
    store_proxy.reset()
    assert len(job.ask("read", **options)) == 94
    data = [each for each in store_proxy.requests if "/data/" in each]
    assert len(data) == 5
    # The load asks for the mark. A process that has planned before asks for it too, and polls. A
    # new one opens the log.
    opening = {"LIST": 1, "GET": 1 + 1 + 6 + 1 + 5}
    assert store_proxy.counts in ({"GET": 1 + 1 + 1 + 5}, opening)


def test_a_frame_is_of_the_moment_at_which_spark_planned_it(
    job: Job, two: TwoLogs, store_proxy: StoreProxy
) -> None:
    options = {"path": two.url, "subscribe": "t", **two.options}
    assert job.ask("keep", **options) == 94
    two.append(6)
    store_proxy.reset()
    assert job.ask("again") == 94
    assert store_proxy.counts == {"GET": 5}
    assert job.ask("keep", **options) == 100


def test_a_read_goes_on_after_a_passing_fault_and_names_a_missing_object(
    job: Job, two: TwoLogs, store_proxy: StoreProxy
) -> None:
    options = {"path": two.url, "subscribe": "t", **two.options}
    for fault in (Fault.REFUSED_503, Fault.ANSWER_LOST, Fault.CUT_BODY):
        store_proxy.reset(Rule(fault, "GET", "/data/", times=2))
        assert len(job.ask("read", **options)) == 94
    store_proxy.reset(Rule(Fault.STALE_404, "GET", "/data/", times=100))
    said = job.ask("fail", **options)
    assert "the object is missing" in said and two.url in said


def test_no_error_and_no_plan_holds_the_secret(
    job: Job, two: TwoLogs, store_proxy: StoreProxy, store_server: StoreServer
) -> None:
    options = {"path": two.url, "subscribe": "t", **two.options}
    store_proxy.reset(Rule(Fault.STALE_404, "GET", "/data/", times=100))
    said = job.ask("fail", **options)
    assert store_server.secret not in said and store_server.access_key not in said
