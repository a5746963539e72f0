"""The table of docs/spark-connect.md: its cells are run.

KAFKALOG_CONNECT=full runs each of them (`make connect-test`); else all of the classic column, and
each row in one of the two columns of Connect, which are the same: every other row in either.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyspark
import pytest

import kafkalog
from tests import ROOT, spark_peers
from tests.builders.log_contents import values
from tests.spark.connect.cells import (
    AVRO,
    CELLS,
    IS_FULL,
    LOCAL_CELLS,
    PLAIN_CELLS,
    RUNS,
    SERVER_CELLS,
    run_cell,
)
from tests.spark.connect.conftest import outcomes, run_program, started_server, with_jar
from tests.spark.connect.moving import copy_and_keep
from tests.spark.sink.test_spark_foreach_batch import forget_commit

pytestmark = [pytest.mark.spark, pytest.mark.slow]
DOCUMENT = (ROOT / "docs" / "spark-connect.md").read_text()
SENTENCES = {" ".join(text.split()) for text in re.findall(r"`([^`]+)`", DOCUMENT)}
ROW = re.compile(r"^\| (.+?) \| (\w+) \| (\w+) \| (\w+) \|$", re.M)
TABLE = {feature: outcomes for feature, *outcomes in ROW.findall(DOCUMENT)}
RUN = {"classic": PLAIN_CELLS, "local": LOCAL_CELLS, "server": SERVER_CELLS}
SESSIONS = [*RUN]


def test_the_table_has_a_row_for_each_feature() -> None:
    assert list(TABLE) == ["feature", *CELLS]
    assert TABLE["feature"] == SESSIONS


def test_each_feature_runs_in_a_session_of_connect() -> None:
    assert {*LOCAL_CELLS, *SERVER_CELLS, AVRO} == {*CELLS}


def test_a_started_server_is_like_a_local_one() -> None:
    assert all(local == server for _, local, server in [TABLE[feature] for feature in CELLS])


@pytest.mark.parametrize(
    ("session", "feature"), [(session, feature) for session in RUN for feature in RUN[session]]
)
def test_a_feature_does_what_the_table_says(
    session: str,
    feature: str,
    request: pytest.FixtureRequest,
    conninfo: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "Postgres" in feature and not conninfo:
        pytest.skip("no PostgreSQL server")
    if session == "classic":
        monkeypatch.setenv("KAFKALOG_POSTGRES", conninfo)
        spark: Any = request.getfixturevalue("spark")
        outcome = run_cell(feature, spark, tmp_path / "cell")
    else:
        outcome = request.getfixturevalue(f"{session}_outcomes")[feature]
    if TABLE[feature][SESSIONS.index(session)] == RUNS:
        assert outcome == RUNS, outcome
    else:
        release = "_" + pyspark.__version__.rpartition(".")[0] + "_"
        sentence = outcome.replace(pyspark.__version__, "VERSION").replace(release, "_RELEASE_")
        assert sentence in SENTENCES


def test_framed_values_run_on_a_local_server_that_has_sparks_avro_package(tmp_path: Path) -> None:
    variables = {"SPARK_TESTING": "1", **with_jar(tmp_path, spark_peers.avro_package())}
    assert outcomes("local[2]", tmp_path, AVRO, **variables) == {AVRO: RUNS}


@pytest.mark.skipif(not IS_FULL, reason="`make connect-test` starts this server")
def test_framed_values_run_on_a_started_server_that_has_sparks_avro_package(
    tmp_path: Path,
) -> None:
    with started_server(tmp_path, **with_jar(tmp_path, spark_peers.avro_package())) as remote:
        assert outcomes(remote, tmp_path, AVRO) == {AVRO: RUNS}


def test_a_named_query_moves_between_sessions_and_goes_on_exactly_once(
    spark: Any, tmp_path: Path
) -> None:
    def write(value: str) -> None:
        with kafkalog.open(tmp_path / "log") as log:
            log.append("t", [("key", value)])

    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
    write("classic")
    copy_and_keep(spark, tmp_path)
    write("connect")
    for name in ("copy", "table"):
        forget_commit(tmp_path / name, 0)  # Connect repeats the micro-batch of the classic session
    run_program("moving", "local[2]", tmp_path, tmp_path, SPARK_TESTING="1")
    write("classic again")
    for name in ("copy", "table"):
        forget_commit(tmp_path / name, 1)
    copy_and_keep(spark, tmp_path)
    with kafkalog.open(tmp_path / "log") as log:
        assert values(log, "copy") == [b"classic", b"connect", b"classic again"]
    with closing(sqlite3.connect(tmp_path / "t.db")) as database:
        assert database.execute("SELECT key, value, offset FROM t").fetchall() == [
            ("key", b"classic again", 2)
        ]
