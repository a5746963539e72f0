"""The differences between the releases of Spark that kafkalog runs on: 4.0 to 4.3.

Spark 4.2 asks a source where a micro-batch may end, given its start and a limit, and knows
`SupportsTriggerAvailableNow`. Spark 4.1 has the Arrow writer of streams; 4.0 does not, but its
workers hand Arrow batches to any `DataSourceArrowWriter`, in a stream too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError

__all__ = [
    "HAS_LIMITS",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "avro_package",
    "delta_package",
    "fault_of_release",
    "lacking",
    "refuse_limits",
]

_OLDEST: Final = (4, 0)
_AVRO: Final = {(4, 0): "4.0.2", (4, 1): "4.1.1", (4, 2): "4.2.0"}
"""The newest Avro package of a release of Spark. That of 4.2 runs on 4.3, which has none yet."""
_DELTA: Final = "4.4.0"
_DELTA_IS_FOR: Final = ((4, 0), (4, 1), (4, 2))
"""Delta Lake runs on the release of Spark for which it is built, and on no other."""

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
    from pyspark.sql.types import StructType

    HAS_LIMITS: bool
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            ReadMinRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:  # before Spark 4.2
        HAS_LIMITS = False
        ReadLimit = ReadAllAvailable = ReadMaxRows = ReadMinRows = type("ReadLimit", (), {})
        SupportsTriggerAvailableNow = type("SupportsTriggerAvailableNow", (), {})
    else:
        HAS_LIMITS = True
    try:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter
    except ImportError:  # before Spark 4.1, or without Spark
        with contextlib.suppress(ImportError):
            from pyspark.sql.datasource import DataSourceArrowWriter as DataSourceStreamArrowWriter


def _line_of(version: str) -> tuple[int, int]:
    """Return the release line of "4.2.1" or "4.2.1.dev0": (4, 2)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def fault_of_release(version: str) -> str | None:
    """Return why kafkalog does not run on a release of Spark; None if it does."""
    if _line_of(version) >= _OLDEST:
        return None
    return f"Spark has no sources in Python (expected Spark 4.0 or later, found {version})"


def avro_package(version: str) -> str:
    """Return the Maven coordinates of the Avro package for a release of Spark."""
    line = min(max(_line_of(version), _OLDEST), max(_AVRO))
    return f"org.apache.spark:spark-avro_2.13:{_AVRO[line]}"


def delta_package(version: str) -> tuple[str, str]:
    """Return a release of Spark with Delta Lake, this one if it has it, and Delta's coordinates."""
    line = _line_of(version)
    major, minor = line if line in _DELTA_IS_FOR else max(_DELTA_IS_FOR)
    return f"{major}.{minor}", f"io.delta:delta-spark_{major}.{minor}_2.13:{_DELTA}"


def lacking(what: str, since: str, instead: str) -> InvalidInputError:
    """Return the error for what this release of Spark lacks, and has `since` a later one."""
    import pyspark

    return InvalidInputError(
        f"{what}: this Spark lacks it (expected Spark {since} or later, found "
        f"{pyspark.__version__}). {instead}, or use Spark {since}."
    )


def refuse_limits(names: Sequence[str]) -> None:
    """Raise InvalidInputError for options of a stream that this release of Spark cannot keep."""
    if names and not HAS_LIMITS:
        instead = "Leave the option out, and each micro-batch reads all that is there"
        raise lacking(f"option {names[0]}", "4.2", instead)


def arrow_schema(schema: StructType, *, has_large_types: bool) -> pa.Schema:
    """Return the Arrow schema of what Spark's `toArrow` returns for a frame."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Before Spark 4.2 there is no time zone to choose: it is this one.
    zone: dict[str, Any] = {"timezone": "UTC"} if HAS_LIMITS else {}
    return to_arrow_schema(
        schema,
        error_on_duplicated_field_names_in_struct=True,
        prefers_large_types=has_large_types,
        **zone,
    )
