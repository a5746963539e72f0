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

_SPARK_MIN: Final = (4, 2)
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
    """Check the release of Spark, and that pandas is there, which Spark asks for."""
    versions = {}
    for package in ("pyspark", "pandas"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Check("spark", f"{package} is not installed", _INSTALL)
    found = tuple(map(int, re.findall(r"\d+", versions["pyspark"])[:2]))
    wanted = ".".join(map(str, _SPARK_MIN))
    advice = (
        None if found >= _SPARK_MIN else f"Install Spark {wanted} or later: pip install -U pyspark."
    )
    return Check("spark", ", ".join(f"{name} {text}" for name, text in versions.items()), advice)


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
