"""This Python, the packages that it needs, and the Python that Spark's workers run."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from typing import Final

import kafkalog
from kafkalog.cli.environment.check import Check
from kafkalog.cli.environment.program import printed_by
from kafkalog.extras import install_command

_INSTALL: Final = f"Install what Spark needs: {install_command('spark')}."
_VARIABLE: Final = "PYSPARK_PYTHON"
_ASKED: Final = """
import sys
sys.path = [place for place in sys.path if place]
print("Python", "%d.%d" % sys.version_info[:2])
import kafkalog
print("kafkalog", kafkalog.__version__)
"""


def check_python() -> Check:
    """Say which Python this is: the installation has refused one that is too old."""
    return Check("python", f"{platform.python_version()}, {sys.executable}")


def check_kernels() -> Check:
    """Check that the kernels are compiled."""
    if kafkalog.__compiled__:
        return Check("kernels", "compiled")
    advice = (
        "Install a C compiler (Debian: apt-get install gcc libc6-dev python3-dev), and then "
        "kafkalog again: its kernels run some 60 times as fast."
    )
    return Check("kernels", "not compiled", advice, is_wrong=False)


def check_spark() -> Check:
    """Check the releases of Spark and of pandas, which Spark asks for, and say what fits them."""
    versions = {}
    for package in ("pyspark", "pandas"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Check("spark", f"{package} is not installed", _INSTALL)
    from kafkalog.spark_release import avro_package, delta_package, fault_of_release

    spark, pandas = versions["pyspark"], versions["pandas"]
    found = f"pyspark {spark}, pandas {pandas}"
    if fault_of_release(spark) is not None:
        return Check("spark", found, f"Install Spark 4.0 or later. {_INSTALL}")
    release, delta = delta_package(spark)
    delta = delta if spark.startswith(f"{release}.") else f"Delta Lake is for Spark {release}"
    found = f"{found}; it takes {avro_package(spark)}; {delta}"
    is_fit = (2, 2) <= tuple(map(int, re.findall(r"\d+", pandas)[:2])) < (3, 0)
    advice = None if is_fit else f"Spark knows pandas from 2.2 to before 3. {_INSTALL}"
    return Check("spark", found, advice, is_wrong=False)


def check_workers_python(environment: Mapping[str, str]) -> Check:
    """Check that Spark's workers run a Python of this version that has this kafkalog."""
    program = environment.get(_VARIABLE, "python3")
    given = (
        f"{_VARIABLE}={program}"
        if _VARIABLE in environment
        else f"{_VARIABLE} is not set: {program}"
    )
    text, fault = printed_by([program, "-c", _ASKED])
    has = dict(
        line.split(" ", 1) for line in text.splitlines() if re.match(r"Python|kafkalog ", line)
    )
    version = ".".join(map(str, sys.version_info[:2]))
    parts = [f"Python {has['Python']}" if "Python" in has else fault or "it is no Python"]
    if "Python" in has:
        parts.append(f"kafkalog {has['kafkalog']}" if "kafkalog" in has else "without kafkalog")
    advice = None
    if has != {"Python": version, "kafkalog": kafkalog.__version__}:
        advice = (
            f"Call kafkalog.register(spark) in the session, or export {_VARIABLE}={sys.executable} "
            "before it starts."
        )
    return Check("workers", f"{given}, {' '.join(parts)}", advice)
