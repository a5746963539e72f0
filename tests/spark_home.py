"""A Spark that is quick with few rows: its start, its plans and its Python processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["INTERPRETED", "make_spark_home", "quick_session", "remember_names"]

INTERPRETED: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Compilers take longer than the rows of a test do without them."""


def make_spark_home(home: Path, package: Path | None = None) -> Path:
    """Make a Spark without `pyspark.zip`: out of it each of its Python processes starts slowly.

    They find the package where this process has it, compiled; `package` is another one.
    """
    import pyspark

    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to((package or Path(pyspark.__file__).parent) / name)
    return home


def quick_session(scratch: Path, settings: Mapping[str, str]) -> Any:
    """Start a session of a process of its own, with further settings; `scratch` is its place."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_HOME"] = str(make_spark_home(scratch / "home"))
    remember_names()
    builder = SparkSession.builder.master("local[2]")
    builder = builder.config(
        map={
            **INTERPRETED,
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            # Most objects of a plan are garbage at once.
            "spark.driver.extraJavaOptions": "-Xms1g -Xmn512m",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            **settings,
        }
    )
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def remember_names() -> None:
    """Let py4j ask Java once for each name.

    For each part of `org.apache.spark`, and for each imported name, Java looks into all jars.
    """
    from py4j.java_gateway import JavaClass, JavaPackage, JVMView

    for kind in (JVMView, JavaPackage):
        kind.__getattr__ = _remembered(kind.__getattr__, (JavaClass, JavaPackage))


def _remembered(
    ask: Callable[[Any, str], Any], kept: tuple[type, ...]
) -> Callable[[Any, str], Any]:
    def found(place: Any, name: str) -> Any:
        answer = ask(place, name)
        if isinstance(answer, kept):
            place.__dict__[name] = answer
        return answer

    return found
