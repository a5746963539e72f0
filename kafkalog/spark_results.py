"""What Spark's JVM sends the driver: all of it, or an error.

PySpark takes the end of a socket for the end of the rows, so what it returns may end early if the
JVM dies, or fails to write. A table would then commit a part of a micro-batch as the whole.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

__all__ = ["collected", "is_connect", "messages_from_socket"]

_SENDER_SECONDS: Final = 60
"""How long the JVM may take to say how a thread ended that has closed its socket."""


def is_connect(owner: DataFrame | SparkSession) -> bool:
    """Return whether a frame, or a session, is one of Spark Connect."""
    return type(owner).__module__.startswith("pyspark.sql.connect.")


def collected(frame: DataFrame) -> list[Row]:
    """Return the rows of a frame; raise py4j's error if the JVM has died on the way."""
    rows = frame.collect()
    if not is_connect(frame):
        frame.sparkSession.sparkContext._jvm.java.lang.System.nanoTime()  # type: ignore[union-attr]
    return rows


def messages_from_socket(address: Any, jvm: Any) -> list[Any]:
    """Return all that a server of one connection in the JVM sends, as it is.

    `address` is what `PythonRDD.runJob` returns: where to connect, a secret, Spark's
    `SocketAuthServer`. Its result is the error of the thread that sent. A thread that ends by a
    `VirtualMachineError` leaves none, so the wait for it has a limit.
    """
    from pyspark.serializers import NoOpSerializer
    from pyspark.util import _load_from_socket

    found: Any = _load_from_socket(address, NoOpSerializer())
    # Before Spark 4.2 PySpark returns a plain iterator.
    with found if hasattr(found, "__exit__") else contextlib.nullcontext(found) as stream:
        messages = list(stream)
    _, _, sender = address
    sender.getResult(jvm.scala.concurrent.duration.Duration.apply(f"{_SENDER_SECONDS}s"))
    return messages
