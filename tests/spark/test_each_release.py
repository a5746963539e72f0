"""A chosen set of the suites holds on each older release of Spark, with its Delta Lake and Avro."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests import ROOT, spark_peers
from tests.delta_spark import settings_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CHOSEN = [
    "datasource/test_spark.py::test_a_stream_from_now_on_begins_where_it_was_started",
    "datasource/test_ktable.py::test_updates_are_every_change_once",
    "datasource/test_materialized_table.py::test_a_table_shows_what_view_latest_shows",
    "sink/test_spark_writes.py::test_batch_writes_land_each_time_unless_they_carry_a_transaction",
    "sink/test_spark_writes.py::test_a_stream_is_exactly_once_and_an_older_checkpoint_is_refused",
    "sink/test_spark_foreach_batch.py::test_append_is_exactly_once_in_update_mode",
    "sink/test_spark_foreach_batch.py::test_sqlite_upsert_follows_exactly_once",
    "sink/test_spark_postgres_upsert.py::test_tables_follow_a_log_exactly_once",
    "sink/test_spark_table_view.py::test_a_view_follows_and_outlives_its_table",
    "values/test_debezium.py::test_an_event_gives_the_row_after_it_a_deletion_or_a_reason",
    "sink/delta_rules.py::test_a_commit_has_the_rows_and_the_position",
    "values/bare_avro_rules.py::test_a_framed_value_is_decoded_as_the_error_says",
    "values/debezium_avro_rules.py::test_rows_become_framed_values_that_avro_reads",
    "values/debezium_avro_rules.py::test_fields_of_the_event_become_columns_on_request",
]
"""The rules of Delta Lake and those of Avro begin a session of their own."""
PATIENCE_S = 1200


@pytest.fixture(scope="module", params=spark_peers.RELEASES)
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return what each chosen test failed with on a release; "" if it passed."""
    release: str = request.param
    spark_peers.require(release)
    scratch = tmp_path_factory.mktemp("release")
    jars = spark_peers.jars(release)
    settings = settings_of(jars)
    (scratch / "spark-defaults.conf").write_text(
        "".join(f"{name} {value}\n" for name, value in settings.items())
    )
    report = scratch / "report.xml"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--junit-xml={report}", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")),
            *(f"tests/spark/{test}" for test in CHOSEN),
        ],
        check=False,
        cwd=ROOT,
        env={
            **spark_peers.environment(release),
            "SPARK_CONF_DIR": str(scratch),
            "KAFKALOG_AVRO_JAR": jars.rpartition(":")[2],
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert report.exists(), ended.stdout[-8000:] + ended.stderr[-2000:]
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        faults = [str(each.text) for kind in ("failure", "error") for each in case.iter(kind)]
        faults += [str(each.get("message")) for each in case.iter("skipped")]
        found[str(case.get("name"))] = "\n".join(faults)
    return found


@pytest.mark.parametrize("test", CHOSEN, ids=lambda test: re.sub(r".*::test_", "", test))
def test_an_older_release_of_spark_does_the_same(faults: dict[str, str], test: str) -> None:
    name = test.partition("::")[2]
    assert name in faults
    if faults[name]:
        pytest.fail(faults[name], pytrace=False)
