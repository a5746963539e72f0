"""The packages that a part of kafkalog needs and the installation does not have by itself.

`pyproject.toml` offers them as extras of the same names.
"""

from __future__ import annotations

from typing import Final

PACKAGES: Final = {
    "spark": ("pyspark>=4.0,<4.3", "pandas>=2.2,<3"),
    "state": ("protobuf>=6.33",),
    "metrics": ("prometheus-client>=0.20",),
    "sqlite": ("adbc-driver-sqlite>=1.8",),
    "schema-registry": ("confluent-kafka[schemaregistry]>=2.12", "fastavro>=1.9"),
    "postgres": ("psycopg[binary]>=3.2", "adbc-driver-postgresql>=1.8"),
}
"""The requirements by extra. They are named one by one: an index need not have kafkalog."""


def install_command(extra: str) -> str:
    """Return the command that installs what an extra needs."""
    return " ".join(["pip install", *(f'"{package}"' for package in PACKAGES[extra])])
