"""How much memory this process, and Spark's workers, may have."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kafkalog.cli.environment.check import Check
from kafkalog.storage_engine.fs import files, host

_ARGUMENTS: Final = "PYSPARK_SUBMIT_ARGS"
_SETTING: Final = "spark.executor.pyspark.memory"
_HOST_MIN: Final = 2 << 30
"""The JVM of a driver takes 1 GiB unless told otherwise, and each worker some 200 MiB."""
_WORKER_MIN: Final = 1 << 30
"""It limits the address space: loading pyarrow takes half of this, the keys of a view an eighth."""
_UNITS: Final = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def check_memory(environment: Mapping[str, str]) -> list[Check]:
    """Check the limit of the control groups, and Spark's own for Python workers."""
    limit = host.memory_limit()
    text = "no limit of a control group" if limit is None else f"limit of {_shown(limit)}"
    advice = None
    if limit is not None and limit < _HOST_MIN:
        advice = (
            f"Give the container {_shown(_HOST_MIN)}, or Spark's driver less "
            "(spark.driver.memory): the kernel kills what is above the limit."
        )
    return [Check("memory", text, advice, is_wrong=False), _check_workers(environment)]


def _check_workers(environment: Mapping[str, str]) -> Check:
    name = "worker memory"
    try:
        value = dict(_settings(environment)).get(_SETTING)
    except ValueError as fault:
        given = f"{_ARGUMENTS}={environment.get(_ARGUMENTS)}"
        return Check(name, f"{given}: {fault}", f"Close the quotation in {_ARGUMENTS}.")
    if value is None:
        return Check(name, f"{_SETTING} is not set: no limit")
    size = re.fullmatch(r"(\d+)([bkmgt]?)b?", value.strip().lower())
    if size is None:
        return Check(name, f"{_SETTING}={value}", f"Set {_SETTING} to a size, for example 2g.")
    amount = int(size[1]) * _UNITS[size[2] or "m"]  # Spark takes a bare number as MiB
    is_little = 0 < amount < _WORKER_MIN
    text = f"Set {_SETTING} to 1g or more for each core of an executor: a task fails below that."
    advice = text if is_little else None
    return Check(name, f"{_SETTING}={value}", advice)


def _settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield Spark's settings from its file, then those of PYSPARK_SUBMIT_ARGS, which win.

    Raises ValueError for arguments with an open quotation.
    """
    spark = find_spec("pyspark")
    home = environment.get("SPARK_HOME") or (spark and spark.origin and Path(spark.origin).parent)
    place = environment.get("SPARK_CONF_DIR") or (home and Path(home) / "conf")
    if place:
        try:
            text = files.read_users_file(Path(place) / "spark-defaults.conf").decode(
                errors="replace"
            )
        except OSError:
            text = ""
        for line in text.splitlines():
            words = re.split(r"[\s=:]+", line.strip(), maxsplit=1)
            if len(words) == 2 and not words[0].startswith("#"):
                yield words[0], words[1]
    words = shlex.split(environment.get(_ARGUMENTS, ""))
    for option, value in itertools.pairwise(["", *words]):
        given = value.removeprefix("--conf=")
        if "=" in given and (option in {"--conf", "-c"} or given != value):
            name, _, setting = given.partition("=")
            yield name, setting


def _shown(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
