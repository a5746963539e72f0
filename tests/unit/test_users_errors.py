"""An error of the user's code is the user's: it passes through as it is, and marks nothing."""

from __future__ import annotations

import errno
import functools
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient

FAULTS = [
    ValueError("mine"),
    TypeError("mine"),
    TimeoutError("mine"),
    RuntimeError("mine"),
    FileNotFoundError(errno.ENOENT, "mine", "/mine"),
    OSError(errno.ENOSPC, "mine"),
]
KINDS = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, marks=pytest.mark.slow if n % 3 else (), id=type(one).__name__)
        for n, one in enumerate(FAULTS)
    ],
)


PLACES: dict[Path, Path | str] = {}
"""The log of each test, by its directory."""


@pytest.fixture(params=["directory", "store"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kafkalog.KafkaLog]:
    place = tmp_path / "log" if request.param == "directory" else memory()
    PLACES[tmp_path] = place
    with kafkalog.open(place) as opened:
        opened.create_topic("t", config={"segment.bytes": "500", "file.delete.delay.ms": "60000"})
        for number in range(20):
            opened.append("t", [("a", f"{number}"), (f"k{number}", "1" * 50)])
        yield opened


def memory() -> str:
    return f"memory://{secrets.token_hex(8)}/log"


def raising(fault: Exception) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise fault

    return call


def rows(fault: Exception) -> Iterator[tuple[str, str]]:
    yield "a", "1"
    raise fault


def batches(fault: Exception) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"key": [b"a"], "value": [b"1"]})
    raise fault


def keys(fault: Exception) -> Iterator[str]:
    yield "a"
    raise fault


ACTS: dict[str, Callable[[kafkalog.KafkaLog, Exception, Path], object]] = {
    "records": lambda log, fault, _: log.append("t", rows(fault)),
    "keys": lambda log, fault, _: log.erase("t", keys(fault)),
    "wait": lambda log, fault, _: log.erase("t", ["k1"], wait=raising(fault)),
    "steps of an erasure": lambda log, fault, _: log.erase("t", ["k1"], progress=raising(fault)),
    "progress of a cleaning": lambda log, fault, _: log.clean(
        "t", force=True, progress=raising(fault)
    ),
    "progress of a copy": lambda _, fault, path: kafkalog.copy(
        PLACES[path], path / "copy", progress=raising(fault)
    ),
    "progress of latest records": lambda log, fault, _: list(
        log.latest("t", progress=raising(fault))
    ),
    "progress of occurrences": lambda log, fault, _: log.occurrences(
        "t", ["k1"], progress=raising(fault)
    ),
}


@KINDS
@pytest.mark.parametrize("act", ACTS)
def test_an_error_of_what_a_call_takes_is_the_users(
    log: kafkalog.KafkaLog, tmp_path: Path, fault: Exception, act: str
) -> None:
    with pytest.raises(type(fault)) as found:
        ACTS[act](log, fault, tmp_path)
    assert found.value is fault
    place = PLACES[tmp_path]
    if isinstance(place, Path):
        assert read_uncleanable(DirectoryNotes(place / "t-0")) is None
        assert [each for each in verify(place) if each.is_damage] == []
    log.append("t", [("last", "1")])
    assert log.lookup("t", "last") is not None


class Handler:
    """A signal handler in four forms, which raises an error."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    def method(self, *_: object) -> NoReturn:
        raise self.fault

    def __call__(self, *_: object) -> NoReturn:
        raise self.fault

    def form(self, name: str) -> Callable[..., Any]:
        return {
            "function": raising(self.fault),
            "method": self.method,
            "partial": functools.partial(raising(self.fault), "argument"),
            "object": self,
        }[name]


@KINDS
@pytest.mark.parametrize("form", ["function", "method", "partial", "object"])
@pytest.mark.parametrize("act", ["clean", "retention", "append"])
def test_an_error_of_a_signal_handler_is_the_users_whatever_its_kind(
    tmp_path: Path, fault: Exception, form: str, act: str
) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        policy = "delete" if act == "retention" else "compact"
        log.create_topic("t", config={"segment.bytes": "100", "cleanup.policy": policy})
        for number in range(5):
            log.append("t", [("a", f"{number}" * 90)])
        rung = Rung()
        before = signal.signal(signal.SIGUSR1, Handler(fault).form(form))
        try:
            with file_system.replaced(rung), pytest.raises(type(fault)) as found:
                if act == "append":
                    log.append("t", [("a", "1")])
                elif act == "clean":
                    log.clean("t", force=True)
                else:
                    with DirectoryLog(tmp_path / "log") as engine:
                        engine.apply_retention(now_ms=10**13)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert found.value is fault
        assert read_uncleanable(DirectoryNotes(tmp_path / "log" / "t-0")) is None
        log.append("t", [("last", "1")])
    assert [each for each in verify(tmp_path / "log") if each.is_damage] == []


class Rung(file_system.FileSystem):
    """A disk at whose first sync or rename a signal comes."""

    def replace(self, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().replace(*arguments)

    def fsync(self, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().fsync(*arguments)

    def fdatasync(self, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().fdatasync(*arguments)


FAULT: list[Exception] = []


def provider() -> NoReturn:
    raise FAULT[-1]


class Provider:
    def __call__(self) -> NoReturn:
        raise FAULT[-1]


@KINDS
@pytest.mark.parametrize("name", ["provider", "Provider"])
@pytest.mark.parametrize("act", ["get", "list", "create", "head"])
def test_an_error_of_a_provider_of_credentials_is_the_users_and_ends_the_request(
    fault: Exception, name: str, act: str
) -> None:
    FAULT.append(fault)
    options = {"store.endpoint": "http://127.0.0.1:1", "store.allow_http": "true"}
    options |= {"store.region": "x", "store.credentials": f"{__name__}:{name}"}
    address = StoreAddress.parse("s3://bucket/log", options)
    client = ObjectClient(address)  # whose patience is a minute
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: client.get("x"),
        "list": lambda: list(client.list("")),
        "create": lambda: client.create("x", b""),
        "head": lambda: client.head("x"),
    }
    with pytest.raises(type(fault)) as found:
        acts[act]()
    assert found.value is fault
