"""A Spark whose Python processes start quickly."""

from __future__ import annotations

from pathlib import Path

__all__ = ["make_spark_home"]


def make_spark_home(home: Path, package: Path | None = None) -> Path:
    """Make a Spark without `pyspark.zip`: out of it each of its Python processes starts slowly.

    They find the package where this process has it, compiled; `package` is another one.
    """
    import pyspark

    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to((package or Path(pyspark.__file__).parent) / name)
    return home
