"""An error leaves kafkalog for Spark with its one sentence before all frames.

Two places turn an error into text, frames first:

- A worker of Spark does so with the error that ends it. It writes the last line alone if the
  variable SPARK_HIDE_TRACEBACK is in its environment at that moment.
- py4j does so in the driver, with the error of a function of `foreachBatch`. It writes an error's
  cause before the error. The cause is therefore the sentence, an error without frames.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar, cast

from kafkalog.errors import InvalidInputError, KafkaLogError

_Kind = TypeVar("_Kind", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_HIDES_FRAMES = "SPARK_HIDE_TRACEBACK"


def plain(kind: _Kind) -> _Kind:
    """Decorate a class whose public methods Spark calls in its workers."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, plain_in_worker(method))
    return kind


def plain_in_worker(function: _Function) -> _Function:
    """Decorate a function, or a generator, that Spark calls in its workers."""

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except KafkaLogError:
            _hide_frames()
            raise

    @functools.wraps(function)
    def generated(*arguments: Any, **named: Any) -> Iterator[Any]:
        try:
            yield from function(*arguments, **named)
        except KafkaLogError:
            _hide_frames()
            raise

    return cast("_Function", generated if inspect.isgeneratorfunction(function) else called)


def plain_in_batch(function: _Function) -> _Function:
    """Decorate a function that `foreachBatch` calls, or a function of the user's inside it.

    A record that an expression refuses is an InvalidInputError, whatever error Spark makes of it.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        os.environ.pop(_HIDES_FRAMES, None)  # an earlier error did not end this worker
        try:
            return function(*arguments, **named)
        except Exception as fault:
            error = refusal(fault) or fault
            sentence = _sentence(error)
            if sentence is None:
                raise
            _hide_frames()
            raise error.with_traceback(None) from sentence

    return cast("_Function", called)


def _hide_frames() -> None:
    """Hide the frames of the error that is about to end this worker; elsewhere do nothing."""
    program = getattr(sys.modules["__main__"], "__spec__", None)
    if program is not None and program.name.startswith("pyspark."):
        os.environ[_HIDES_FRAMES] = "1"


def refusal(fault: Any) -> InvalidInputError | None:
    """Return our error for one that an expression of Spark's raised; None for other errors.

    Either `raise_error` names the record, or Spark cannot compute a value. The class 22 of the
    SQLSTATE means the latter: a data exception.
    """
    try:
        if fault.getCondition() == "USER_RAISED_EXCEPTION":
            return InvalidInputError((fault.getMessageParameters() or {}).get("errorMessage", ""))
        if (fault.getSqlState() or "").startswith("22"):
            reason = str(fault.getMessage()).strip().partition("\n")[0].partition(" SQLSTATE")[0]
            return InvalidInputError(
                f"an expression fails on the value of a record: {reason} Use an expression that "
                "gives null instead, as try_cast does."
            )
    except Exception:  # no error of Spark's, or its JVM is gone
        return None
    return None


def _sentence(error: Exception) -> KafkaLogError | None:
    """Return an error of ours without frames; None if none of ours is in the error."""
    if isinstance(error, KafkaLogError):
        alone = copy.copy(error)
        alone.__cause__ = alone.__context__ = None
        return alone.with_traceback(None)
    found = re.findall(r"^(?:.*[ :])?kafkalog\.errors\.\w+: (.+)", str(error), re.MULTILINE)
    return KafkaLogError(found[-1]) if found else None
