"""`failOnDataLoss`: a read needs records that are gone."""

from __future__ import annotations

import logging

from kafkalog.errors import DataLossError

_LOGGER = logging.getLogger(__name__)


def report_data_loss(kind: str, reason: str, *, fail: bool) -> None:
    """Raise DataLossError, or only warn.

    `kind` is Spark's name of the case, such as PARTITIONS_DELETED. It is in the message, because
    the class of a Python error does not reach the JVM.
    """
    if fail:
        raise DataLossError(
            f"[KAFKA_DATA_LOSS.{kind}] {reason}; "
            "set the option failOnDataLoss to false to go on without these records"
        )
    _LOGGER.warning("[KAFKA_DATA_LOSS.%s] %s; going on, since failOnDataLoss=false", kind, reason)
