"""Results that the JVM of Spark sends to the driver: all of them, or an error.

PySpark reads rows until the socket closes, and it closes too if the JVM dies or fails to write. The
rows that came would then be committed as the whole micro-batch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

__all__ = ["collected", "is_connect", "messages_from_socket"]

_SENDER_SECONDS: Final = 60
"""The JVM may take so long to report on a thread that has closed its socket."""


def is_connect(owner: DataFrame | SparkSession) -> bool:
    """Return whether a frame, or a session, is one of Spark Connect."""
    return type(owner).__module__.startswith("pyspark.sql.connect.")


def collected(frame: DataFrame) -> list[Row]:
    """Return the rows of a frame; raise py4j's error if the JVM died while it sent them."""
    rows = frame.collect()
    if not is_connect(frame):
        jvm: Any = frame.sparkSession.sparkContext._jvm
        jvm.java.lang.System.nanoTime()  # any call will do: it fails without a JVM
    return rows


def messages_from_socket(address: Any, gateway: Any) -> list[Any]:
    """Return the messages, undecoded, that a thread of the JVM sends over a socket.

    `address` comes from `PythonRDD.runJob`: a port, a secret and Spark's `SocketAuthServer`. The
    server raises what its thread raised. A `VirtualMachineError` kills the thread before the server
    learns of it, so the wait has a limit.
    """
    from pyspark.serializers import NoOpSerializer
    from pyspark.util import _load_from_socket

    found: Any = _load_from_socket(address, NoOpSerializer())
    # Before Spark 4.2 PySpark returns a plain iterator.
    with found if hasattr(found, "__exit__") else contextlib.nullcontext(found) as stream:
        messages = list(stream)
    _, _, sender = address
    limit = gateway.jvm.scala.concurrent.duration.Duration.apply(f"{_SENDER_SECONDS}s")
    try:
        sender.getResult(limit)
    finally:
        # py4j's object is in a cycle once it is called, and the JVM would keep the messages.
        gateway.detach(sender)
    return messages
