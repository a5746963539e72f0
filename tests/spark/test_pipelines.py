"""A declarative pipeline of the guide, run by Spark's own command, reads a log and writes one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

import kafkalog
from tests import ROOT, spark_peers

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PATIENCE_S = 300
SPECIFICATION = """
name: shop
storage: file://{0}/storage
libraries:
  - glob:
      include: definitions/**
"""


@pytest.mark.parametrize("release", ["4.1", "4.2", "newest"])
def test_a_pipeline_reads_a_log_and_writes_one(tmp_path: Path, release: str) -> None:
    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    if release != "newest":
        spark_peers.require(release)
        home = spark_peers.package(release)
        environment = spark_peers.environment(release)
    with kafkalog.open(tmp_path / "log") as log:
        for topic in ("orders", "stock"):
            log.create_topic(topic)
        log.append("orders", [("1", '{"item":"apple"}'), ("2", '{"item":"pear"}')])
        log.append("stock", [("apple", "5"), ("apple", "6")])
    (source,) = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs/spark.md").read_text(), re.M | re.S)
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "shop.py").write_text(source.replace("/data/", f"{tmp_path}/"))
    (tmp_path / "spark-pipeline.yml").write_text(SPECIFICATION.format(tmp_path))
    ended = subprocess.run(
        [home / "bin" / "spark-pipelines", "run", "--conf", "spark.ui.enabled=false"],
        check=False,
        cwd=tmp_path,
        env={**environment, "SPARK_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout
    with kafkalog.open(tmp_path / "log") as log:
        (rows,) = log.read("items", 0)
    assert rows.column("value").to_pylist() == [b"apple", b"pear"]
    assert list((tmp_path / "spark-warehouse" / "stock").glob("*.parquet"))
