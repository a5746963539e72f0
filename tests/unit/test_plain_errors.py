"""An error leaves kafkalog for Spark with its one sentence before all frames."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from kafkalog.datasource.batch_reader import KafkaLogBatchReader
from kafkalog.datasource.range_reader import RangeReader
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import CorruptBatchError, InvalidInputError, OffsetOutOfRangeError
from kafkalog.plain_errors import plain, plain_in_batch
from kafkalog.sink.append import Append
from kafkalog.sink.upsert.upsert import Upsert
from kafkalog.sink.writer import StreamWriter, TableBatchWriter

HIDES = "SPARK_HIDE_TRACEBACK"
CALLED_BY_WORKERS = [
    *(KafkaLogDataSource, KafkaLogBatchReader, KafkaLogStreamReader, RangeReader),
    *(TableBatchWriter, StreamWriter),
]


@plain
class Reader:
    def __init__(self, fault: Exception | None = None) -> None:
        if fault is not None:
            raise fault

    def partitions(self, fault: Exception) -> None:
        raise fault

    def read(self, fault: Exception) -> Iterator[int]:
        yield 1
        raise fault


CALLS: list[Callable[[Exception], Any]] = [
    Reader,
    lambda fault: Reader().partitions(fault),
    lambda fault: list(Reader().read(fault)),
]


@pytest.fixture(autouse=True)
def _frames_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDES, "")  # so that it is put back
    monkeypatch.delenv(HIDES)


def run_as(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=program))
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[misc]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("program", "fault", "is_hidden"),
    [
        ("pyspark.daemon", InvalidInputError("no topic"), True),
        ("pyspark.sql.streaming.python_streaming_source_runner", InvalidInputError("no"), True),
        ("pyspark.daemon", KeyError("a bug"), False),
        ("pytest", InvalidInputError("no topic"), False),
    ],
)
def test_frames_are_hidden_for_an_error_of_ours_that_ends_a_worker(
    program: str,
    fault: Exception,
    is_hidden: bool,
    call: Callable[[Exception], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_as(program, monkeypatch)
    with pytest.raises(type(fault)):
        call(fault)
    assert (HIDES in os.environ) == is_hidden


def test_the_variable_is_that_of_spark() -> None:
    from pyspark.util import handle_worker_exception

    assert HIDES in handle_worker_exception.__code__.co_consts


@pytest.mark.parametrize("kind", CALLED_BY_WORKERS)
def test_all_that_spark_calls_in_a_worker_is_plain(kind: type) -> None:
    methods = [
        method
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and not name.startswith("_")
    ]
    assert methods
    assert all(hasattr(method, "__wrapped__") for method in methods)


def in_batch(fault: Exception) -> str:
    """Return what py4j makes of an error that leaves a function of `foreachBatch`."""

    @plain_in_batch
    def apply() -> None:
        try:
            raise OSError("below")
        except OSError:
            raise fault  # noqa: B904 - the context is what must not be shown

    try:
        apply()
    except Exception:
        return traceback.format_exc()
    raise AssertionError


@pytest.mark.parametrize(
    "fault",
    [
        InvalidInputError("stock-0 offset 3: no number"),
        OffsetOutOfRangeError("stock", 0, 7, 1, 5),
        CorruptBatchError("/data/x.log", 9, "a batch", "nothing"),
    ],
)
def test_the_sentence_of_an_error_of_ours_is_the_first_line_of_a_batch(fault: Exception) -> None:
    lines = in_batch(fault).splitlines()
    assert lines[0] == lines[-1] == f"kafkalog.errors.{type(fault).__name__}: {fault}"
    assert not any("below" in line for line in lines)


class RefusedRecord(Exception):
    """As Spark raises it for `raise_error`."""

    def getCondition(self) -> str:
        return "USER_RAISED_EXCEPTION"

    def getMessageParameters(self) -> dict[str, str]:
        return {"errorMessage": "stock-0 offset 3: no number"}


def test_a_record_that_an_expression_refuses_is_an_invalid_input() -> None:
    first = in_batch(RefusedRecord()).splitlines()[0]
    assert first == "kafkalog.errors.InvalidInputError: stock-0 offset 3: no number"


class FailedExpression(Exception):
    """As Spark raises it for a cast."""

    def getCondition(self) -> str:
        return "CAST_INVALID_INPUT"

    def getSqlState(self) -> str:
        return "22018"

    def getMessage(self) -> str:
        return "[CAST_INVALID_INPUT] 'zz' is no INT. SQLSTATE: 22018\n== SQL ==\ncast(n as int)"


def test_an_expression_that_fails_on_a_value_is_an_invalid_input_that_names_a_remedy() -> None:
    assert in_batch(FailedExpression()).splitlines()[0] == (
        "kafkalog.errors.InvalidInputError: an expression fails on the value of a record: "
        "[CAST_INVALID_INPUT] 'zz' is no INT. Use an expression that gives null instead, as "
        "try_cast does."
    )


def test_an_error_of_spark_is_led_by_the_sentence_of_ours_inside() -> None:
    text = "[PYTHON_EXCEPTION] It failed: kafkalog.errors.DataLossError: gone. SQLSTATE: 38000"
    lines = in_batch(ValueError(text)).splitlines()
    assert lines[0] == "kafkalog.errors.KafkaLogError: gone. SQLSTATE: 38000"
    assert lines[-1] == f"ValueError: {text}"


def test_an_error_of_others_keeps_its_frames() -> None:
    assert in_batch(KeyError("a bug")).startswith("Traceback")


def test_what_foreach_batch_calls_is_plain() -> None:
    assert all(hasattr(kind.__call__, "__wrapped__") for kind in (Append, Upsert))
