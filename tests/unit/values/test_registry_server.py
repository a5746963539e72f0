"""What a registry's answers become. They come from a server of HTTP that says what a test wants."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, SchemaNotFoundError, SchemaRegistryError
from kafkalog.values.decoded_value import avro_document
from kafkalog.values.framed_avro import MISSES_MAX, FramedAvro

TEXT = '{"type":"record","name":"Order","fields":[]}'
SECRET = "geheim"


class Answers:
    """A server of HTTP with an answer (status, body) for each path, and the requests it had."""

    def __init__(self) -> None:
        self.by_path: dict[str, tuple[int, Any]] = {}
        self.requests: list[str] = []
        self.authorizations: set[str | None] = set()
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                answers.requests.append(path)
                answers.authorizations.add(self.headers["Authorization"])
                status, body = answers.by_path.get(path, (404, {"error_code": 40403}))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Answers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def registry(self, **config: object) -> kafkalog.SchemaRegistry:
        url = f"http://me:{SECRET}@127.0.0.1:{self.port}"
        return kafkalog.SchemaRegistry(url, config={"max.retries": 0, **config})


@pytest.fixture
def answers() -> Iterator[Answers]:
    with Answers() as server:
        yield server


def test_an_id_is_asked_for_once_and_known_in_other_processes(answers: Answers) -> None:
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT}
    registry = answers.registry()
    copy = pickle.loads(pickle.dumps(registry))
    assert copy.schema(7) == copy.schema(7) == registry.schema(7)
    assert pickle.loads(pickle.dumps(registry)).schema(7).text == TEXT
    assert answers.requests == ["/schemas/ids/7"] * 2
    assert registry.ids() == {7}


def test_the_latest_version_is_that_of_the_moment(answers: Answers) -> None:
    registry = answers.registry()
    for number in (1, 2):
        answers.by_path["/subjects/a/versions/latest"] = (
            200,
            {"subject": "a", "version": number, "id": number, "schema": TEXT},
        )
        assert registry.latest("a").id == number


def test_an_id_that_is_not_there_is_asked_for_again(answers: Answers) -> None:
    registry = answers.registry()
    with pytest.raises(SchemaNotFoundError, match="there is no schema of the id 7"):
        registry.schema(7)
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT}
    assert registry.schema(7).text == TEXT


def test_a_micro_batch_of_garbage_costs_a_hundred_requests_and_hides_no_valid_id(
    answers: Answers,
) -> None:
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT}
    values = FramedAvro(answers.registry(), reader=TEXT)
    garbage = set(range(2**20, 2**20 + 300))
    for turn in (1, 2, 3):
        values.ask({7} | garbage)
        assert len(answers.requests) == 1 + turn * MISSES_MAX
    assert {f"/schemas/ids/{number}" for number in garbage | {7}} == set(answers.requests)
    answers.by_path["/schemas/ids/8"] = 200, {"schema": TEXT}
    values.ask({8} | garbage)
    assert len(answers.requests) == 2 + 4 * MISSES_MAX
    assert "/schemas/ids/8" in answers.requests


def test_any_number_of_valid_ids_is_asked_for(answers: Answers) -> None:
    many = range(1, 2 * MISSES_MAX)
    for number in many:
        answers.by_path[f"/schemas/ids/{number}"] = 200, {"schema": TEXT}
    registry = answers.registry()
    FramedAvro(registry, reader=TEXT).ask(set(many))
    assert registry.ids() == set(many)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, {"error_code": 401, "message": "no"}, r"refuses \(HTTP 401\)"),
        (403, b"", r"refuses \(HTTP 403\)"),
        (404, b"<html>", r"there is no schema registry \(HTTP 404\)"),
        (500, {"error_code": 50001, "message": "broken store"}, "answers HTTP 500: broken store"),
        (301, b"", r"redirects \(HTTP 301\)\. Give the URL to which it leads"),
        (200, b"", "the answer is not a schema registry's"),
        (200, b"<html>", "the answer is not a schema registry's"),
        (200, {"schema": TEXT, "references": 5}, "the answer is not a schema registry's"),
        (200, [1], "the answer is not a schema registry's"),
        (200, {"hello": 1}, "the answer is not a schema registry's"),
    ],
)
def test_a_refusal_is_one_sentence_without_a_secret(
    answers: Answers, status: int, body: Any, says: str
) -> None:
    answers.by_path["/schemas/ids/7"] = status, body
    registry = answers.registry()
    with pytest.raises(SchemaRegistryError, match=says) as told:
        registry.schema(7)
    assert SECRET not in str(told.value) + repr(registry)
    assert str(told.value).startswith(f"http://127.0.0.1:{answers.port}: no schema of the id 7: ")


def test_credentials_are_sent(answers: Answers) -> None:
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT}
    answers.registry().schema(7)
    assert answers.authorizations == {"Basic bWU6Z2VoZWlt"}


def test_a_registry_that_does_not_answer_is_an_error() -> None:
    with Answers() as gone:
        registry = gone.registry()
    with pytest.raises(SchemaRegistryError, match="the schema registry cannot be reached") as told:
        registry.schema(7)
    assert SECRET not in str(told.value)


def test_a_server_that_says_nothing_ends_in_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        registry = kafkalog.SchemaRegistry(url, config={"max.retries": 0, "timeout": 0.2})
        with pytest.raises(SchemaRegistryError, match=r"cannot be reached .*timed out"):
            registry.schema(7)


def test_a_schema_whose_reference_is_missing_is_not_said_to_be_missing_itself(
    answers: Answers,
) -> None:
    references = [{"name": "A", "subject": "a", "version": 3}]
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT, "references": references}
    words = "schema 7 lacks a reference: .* no version 3 of the subject 'a'"
    with pytest.raises(SchemaNotFoundError, match=words):
        answers.registry().schema(7)


def test_what_is_not_a_schema_is_named(answers: Answers) -> None:
    answers.by_path["/subjects/a/versions/1"] = (
        200,
        {"subject": "a", "version": 1, "id": 8, "schema": "nonsense"},
    )
    references = [{"name": "A", "subject": "a", "version": 1}]
    answers.by_path["/schemas/ids/7"] = 200, {"schema": TEXT, "references": references}
    with pytest.raises(InvalidInputError, match=r"^schema 7: an Avro schema: expected JSON"):
        answers.registry().schema(7)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://h:99999", "ftp://h", "", 5])
def test_what_is_not_the_url_of_a_server_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInputError, match="SchemaRegistry: expected"):
        kafkalog.SchemaRegistry(url)


def test_a_lookup_names_the_record_of_a_schema_that_cannot_be_had(answers: Answers) -> None:
    answers.by_path["/schemas/ids/7"] = 500, b""
    with pytest.raises(SchemaRegistryError, match=r"^t-0 offset 3: .*id 7: .* HTTP 500"):
        avro_document(b"\0\0\0\0\7x", "t-0 offset 3", answers.registry())
