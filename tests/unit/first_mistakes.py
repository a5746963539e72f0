"""The rows of docs/first-mistakes.md: what an error says, and the line that causes it."""

from __future__ import annotations

import pickle
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kafkalog
from kafkalog.sink.upsert import PostgresUpsert, SQLiteUpsert
from tests import ROOT

_ROW = re.compile(r"^\| `(?P<error>[^`]+)` \| `(?P<line>[^`]+)` \| .* \|$", re.M)
_OF_SPARK = re.compile(r"\b(spark|source|rows|sink)\b[.(,]")


def mistakes(of_spark: bool) -> list[tuple[str, str]]:
    """Return the error and the line of each row that needs Spark, or of each that does not."""
    rows = _ROW.findall((ROOT / "docs" / "first-mistakes.md").read_text())
    return [row for row in rows if bool(_OF_SPARK.search(row[1])) == of_spark]


def make_log(directory: Path) -> dict[str, Any]:
    """Make what the page's lines speak of below a directory, which is its `/data`."""
    log = kafkalog.open(directory / "log")
    log.create_topic("stock")
    log.create_topic("orders", config={"cleanup.policy": "delete"})
    log.append("stock", [("apple", "3"), ("pear", "7")])
    (directory / "notes.txt").write_text("apple 3\n")
    (directory / "empty").mkdir()
    upserts = {"SQLiteUpsert": SQLiteUpsert, "PostgresUpsert": PostgresUpsert}
    return {"kafkalog": kafkalog, "log": log, "pickle": pickle, **upserts}


def error_of(
    line: str, names: dict[str, Any], directory: Path, command: Callable[..., Any] | None = None
) -> str:
    """Return what a line of the page says when it fails, its paths those of the page."""
    here = line.replace("/data/", f"{directory}/")
    if line.startswith("kafkalog "):
        assert command is not None
        said = str(command(*shlex.split(here)[1:]).err)
    else:
        try:
            exec(compile(here, line, "exec"), names)
        except Exception as error:
            said = str(error)
        else:
            said = ""
    return said.replace(str(directory), "/data")


def says(shown: str, said: str) -> bool:
    """Return whether an error says what the page shows, with `...` for what it leaves out."""
    parts = (re.escape(part.strip()) for part in shown.split("..."))
    return re.search(".*".join(parts), said, re.S) is not None
