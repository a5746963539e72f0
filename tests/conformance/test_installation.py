"""Which Kafka the tests run: a Docker engine's where one answers, else the jars, else none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.conformance.clients import Sender
from tests.conformance.installation import (
    POM,
    VARIABLE,
    WAYS,
    Ended,
    Installation,
    Process,
    Program,
    UnavailableError,
    choose,
    chosen,
)
from tests.conformance.jars import Jars
from tests.conformance.kafka import CLEAN_SHUTDOWN, KafkaBroker
from tests.conformance.record import consumed


class Idle:
    """An installation that is never asked to run anything: these tests are about the choice."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, program: Program, *arguments: str, directory: Path, timeout: float) -> Ended:
        raise NotImplementedError

    def start(self, program: Program, *arguments: str, directory: Path, output: Path) -> Process:
        raise NotImplementedError


def here(name: str) -> Installation:
    return Idle(name)


def missing(reason: str) -> Installation:
    raise UnavailableError(reason)


def test_docker_comes_first_where_an_engine_answers() -> None:
    assert [*WAYS] == ["docker", "jars"]
    choice = choose({"docker": lambda: here("image"), "jars": lambda: here("jars")}, "")
    assert (choice.installation.name, choice.passed_over) == ("image", [])


def test_the_jars_are_used_where_no_engine_answers_and_the_reason_is_kept() -> None:
    choice = choose({"docker": lambda: missing("silence"), "jars": lambda: here("jars")}, "")
    assert choice.installation.name == "jars"
    assert str(choice) == "jars; no Kafka from docker: silence"


def test_where_there_is_neither_both_reasons_are_told() -> None:
    ways = {"docker": lambda: missing("silence"), "jars": lambda: missing("no jars")}
    with pytest.raises(UnavailableError) as fault:
        choose(ways, "")
    assert str(fault.value) == "no Kafka from docker: silence; no Kafka from jars: no jars"


@pytest.mark.parametrize("wanted", ["docker", "jars"])
def test_what_is_asked_for_is_used_or_nothing(wanted: str) -> None:
    assert choose({n: lambda n=n: here(n) for n in WAYS}, wanted).installation.name == wanted
    others = {name: lambda: here("another") for name in WAYS if name != wanted}
    with pytest.raises(UnavailableError, match="not here"):
        choose({wanted: lambda: missing("not here"), **others}, wanted)


def test_asking_for_what_does_not_exist_is_told() -> None:
    with pytest.raises(UnavailableError, match="expected one of docker, jars"):
        choose(WAYS, "podman")


# --- the ways themselves -------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path, listener


def reason_of_docker(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    pytest.importorskip("testcontainers")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with pytest.raises(UnavailableError) as fault:
        WAYS["docker"]()
    return str(fault.value)


def test_a_missing_socket_is_not_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason = reason_of_docker(monkeypatch, tmp_path / "none.sock")
    assert "No such file" in reason
    assert "\n" not in reason


def test_a_socket_that_nobody_listens_on_is_not_an_engine(
    monkeypatch: pytest.MonkeyPatch, listener: tuple[Path, socket.socket]
) -> None:
    listener[1].close()
    assert "refused" in reason_of_docker(monkeypatch, listener[0])


@pytest.mark.slow
def test_a_socket_that_does_not_answer_is_not_an_engine_and_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, listener: tuple[Path, socket.socket]
) -> None:
    begin = time.monotonic()
    assert "imed out" in reason_of_docker(monkeypatch, listener[0])
    assert time.monotonic() - begin < 20


def test_jars_that_were_not_fetched_whole_are_none(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    with pytest.raises(UnavailableError, match="make peers"):
        Jars.find(tmp_path)


def test_without_java_no_kafka_jars_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ready").touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match="Java is missing"):
        Jars.find(tmp_path)


def test_the_image_is_of_the_release_that_has_tools() -> None:
    container = pytest.importorskip("tests.conformance.container")
    release = container._release()
    assert f"<version>{release}</version>" in POM.read_text()
    assert release.startswith("4.")


# --- a run without any Kafka ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome"), [(None, "skipped"), ("true", "error")])
def test_without_a_kafka_a_run_skips_with_the_reason_but_ci_fails(
    tmp_path: Path, ci: str | None, outcome: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {VARIABLE: "docker", "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    environment |= {"CI": ci} if ci else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path}/run", "tests/conformance/test_verify.py"]
    result = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert f"2 {outcome}" in result.stdout
    assert "no Kafka from docker: " in result.stdout
    assert result.returncode == (1 if ci else 0)


# --- a run with one ------------------------------------------------------------------------------


@pytest.fixture
def installation(peers: None) -> Installation:
    return chosen().installation


@pytest.mark.peers
@pytest.mark.slow
def test_a_program_runs_in_our_directory_as_our_user(
    installation: Installation, tmp_path: Path
) -> None:
    log = tmp_path / f"{0:020d}.log"
    log.touch()
    ended = installation.run(
        Program.DUMP_LOG_SEGMENTS, "--files", str(log), directory=tmp_path, timeout=60
    )
    assert (ended.status, f"Dumping {log}" in ended.output) == (0, True)
    output = tmp_path / "output"
    process = installation.start(
        Program.SERVER, str(tmp_path / "none.properties"), directory=tmp_path, output=output
    )
    assert process.wait(60) == process.poll() == 1
    process.send_signal(signal.SIGKILL)
    assert "none.properties" in output.read_text()
    assert output.stat().st_uid == os.getuid()


@pytest.mark.peers
@pytest.mark.slow
def test_a_broker_keeps_its_records_and_its_port_when_it_is_killed_or_stopped(
    peers: None, tmp_path: Path
) -> None:
    with KafkaBroker(tmp_path) as broker:
        broker.create_topic("topic")
        sender = Sender(broker)
        for number, end in enumerate((broker.kill, broker.stop)):
            sender.send("topic", b"%d" % number)
            sender.flush()
            end()
            assert (broker.log_dir / CLEAN_SHUTDOWN).exists() == (end == broker.stop)
            broker.start()
        found = consumed(broker.bootstrap, "topic", 0)
        assert [record.value for record in found] == [b"0", b"1"]
        assert "started" in broker.output.read_text()
        assert {path.stat().st_uid for path in tmp_path.rglob("*")} == {os.getuid()}
