"""No verb, error, log line or pickle holds a secret of the object store, whatever goes wrong."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.cleaner import CleanerConfig
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.object_store_proxy import Fault, Rule, StoreProxy
from tests.object_store_server import StoreServer
from tests.unit.cli.conftest import Command
from tests.unit.storage_engine.store_log import Impatient, WithoutProbe

RECORDS = b'{"key":"a","value":"1"}\n{"key":"b","value":"2"}\n{"key":"a","value":"3"}\n'
VERBS = [
    "append {log} t",
    "topics create {log} other --config cleanup.policy=delete",
    "topics list {log}",
    "read {log} t --key a",
    "writers {log}",
    "status {log} --json",
    "explain {log} t",
    "clean {log} t --force",
    "copy {log} {copy}",
    "copy {log} {again}",
    "verify {log} --deep",
    "erase {log} t b --now --report {report}",
    "delete-records {log} other --before -1",
    "topics delete {log} other",
    "status {log} --html {picture}",
]
FAULTS = {
    "refused": Fault.REFUSED_403,
    "broken connections": Fault.REQUEST_LOST,
    "answers that are lost": Fault.ANSWER_LOST,
}


class Hasty(WithoutProbe):
    """A client that soon gives up."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address, patience_s=0.1)


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture, store_server: StoreServer) -> Iterator[list[str]]:
    """Yield a list; in the end nothing in it, and no log line, may hold a secret."""
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    yield texts
    text = "\n".join([*texts, caplog.text])
    assert len(text) > 200
    secrets = (store_server.secret, store_server.access_key, "Signature", "AWS4-HMAC")
    assert [each for each in secrets if each in text] == []


@pytest.fixture
def places(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The addresses of a log, and of what the verbs write; the environment says the rest."""
    monkeypatch.setattr(object_log, "ObjectClient", Hasty)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    log = s3_url
    library.open(log).create_topic("t", 1, {"cleanup.policy": "compact,delete"})
    files = {name: str(tmp_path / name) for name in ("copy", "report", "picture")}
    return {"log": log, "again": f"{log}-copy", **files}


def ran(kafkalog: Command, places: dict[str, str], seen: list[str]) -> list[int]:
    """Run every verb, and note what it prints; return the statuses."""
    statuses = []
    for verb in VERBS:
        result = kafkalog(*verb.format(**places).split(), stdin=RECORDS)
        statuses.append(result.status)
        seen += [result.out, result.err]
    for name in ("report", "picture"):
        written = Path(places[name])
        seen.append(written.read_text() if written.exists() else "")
    return statuses


def test_no_verb_prints_or_logs_a_secret(
    kafkalog: Command, places: dict[str, str], seen: list[str]
) -> None:
    statuses = ran(kafkalog, places, seen)
    assert statuses == [0] * len(statuses), seen


@pytest.mark.parametrize("problem", FAULTS)
def test_no_verb_that_fails_prints_or_logs_a_secret(
    kafkalog: Command,
    places: dict[str, str],
    seen: list[str],
    store_proxy: StoreProxy,
    problem: str,
) -> None:
    store_proxy.reset(Rule(FAULTS[problem], times=1 << 20))
    assert 0 not in ran(kafkalog, places, seen)


def test_no_traceback_pickle_or_repr_of_a_log_and_its_cleaner_holds_a_secret(
    places: dict[str, str], seen: list[str], store_proxy: StoreProxy, caplog: Any
) -> None:
    """A traceback is written with the values of all local variables, as some loggers do."""
    config = CleanerConfig(backoff_ms=10)
    with library.open(places["log"], cleaner=config) as log:
        log.append("t", [("a", "1")])
        store_proxy.reset(Rule(Fault.REFUSED_403, times=1 << 20))
        acts: list[Callable[[], object]] = [
            lambda: log.append("t", [("a", "2")]),
            lambda: list(log.read("t", 0)),
            lambda: log.clean(force=True),
            log.status,
            lambda: log.erase("t", [b"a"]),
            lambda: library.copy(places["log"], places["copy"]),
            lambda: ObjectLog(places["log"]),
        ]
        for act in acts:
            with pytest.raises(KafkaLogError) as failed:
                act()
            told = traceback.TracebackException.from_exception(failed.value, capture_locals=True)
            seen += told.format()
        until = time.monotonic() + 60
        while "403" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
        assert "403" in caplog.text
        store_proxy.reset()
        seen += [repr(log), repr(vars(log))]
    engine = ObjectLog(places["log"])
    seen += [repr(pickle.dumps(each)) for each in (engine, engine.address)]
    seen += [repr(engine), repr(vars(engine)), repr(vars(engine.client))]
